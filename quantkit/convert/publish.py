"""Publish a finished output on the Hugging Face hub, by its own client: private unless asked otherwise.

Nothing is written into the output, and what the hub holds already is not sent again: the same command goes on with an
upload that was interrupted. Failures are SourceErrors that say what to do; the token is never shown.
"""
# ruff: noqa: PLC0415  (the hub's client takes a while to import)

import glob
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from quantkit import __version__
from quantkit.checkpoint.file_names import MANIFEST_NAME
from quantkit.checkpoint.hub import shown
from quantkit.checkpoint.output import WORK_NAME, finish_renaming
from quantkit.convert.conversion import Conversion
from quantkit.convert.convert import ConvertReport
from quantkit.convert.manifest import differences, recorded_errors, recorded_gains
from quantkit.errors import QuantkitError, SourceError, UsageError, VerificationError
from quantkit.integrity.manifest import FileRecord, read_manifest, record_of
from quantkit.threads import ReportProgress
from quantkit.verify.hashes import check_hashes
from quantkit.verify.report import Finding
from quantkit.verify.structure import check_files

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

_MADE_BY_THE_HUB = ".gitattributes"  # in every repository
_ANSWER_TIMEOUT = 30  # seconds
_LOOK_ROUND = 0.2  # seconds
_AGAIN = "run the same command again: what the hub has is not sent twice"
_OTHER = "choose another directory with -o, or remove it"
_STATUS = {  # of the hub's answer: what it means, and what to do
    401: ("the hub does not accept the token", "log in with `hf auth login`, or correct HF_TOKEN"),
    403: ("the token may not write there", "use a token with write access, of somebody who may write there"),
    404: (
        "the hub has no such user, organization or repository, or hides it",
        "check the name, and the token's rights",
    ),
    409: ("another change is under way", f"wait for it, then {_AGAIN}"),
    412: ("somebody else has changed the repository meanwhile", f"look at it, then {_AGAIN}"),
    429: ("the hub wants fewer requests", f"wait some minutes, then {_AGAIN}"),
}
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PushTarget:
    """A repository of the hub, ``org/name``, and whether everybody may read it."""

    hub_id: str
    is_public: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """What the repository holds now, at ``commit``; ``num_sent`` of its files were not there before."""

    hub_id: str
    url: str
    commit: str
    is_public: bool
    num_files: int
    num_bytes: int
    num_sent: int


def prepare(conversion: Conversion, target: PushTarget) -> ConvertReport | None:
    """Before anything is converted: may this be published, and does the hub know who asks?

    Returns what the conversion has made, where it is complete already. Raises UsageError for a target directory that
    holds another conversion.
    """
    if conversion.plan.is_incomplete:
        _refuse_incomplete(conversion.target)
    check_push(target)
    return already_made(conversion)


def check_push(target: PushTarget) -> None:
    """Raise UsageError for what is no name on the hub, SourceError where the hub does not know who asks."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, exported late

    try:
        validate_repo_id(target.hub_id)
    except HFValidationError as error:
        raise UsageError(f"--push-to {target.hub_id!r} is no name on the hub", remedy="write it as org/name") from error
    with _told(target):
        account = HfApi().whoami()
        token = account.get("auth", {}).get("accessToken", {})
    if token.get("role") == "read":
        raise SourceError(f"{target.hub_id}: the token may only read", remedy=_STATUS[403][1])


def already_made(conversion: Conversion) -> ConvertReport | None:
    """The output of this very run, where the target holds it. Raises UsageError for that of another."""
    target = conversion.target
    finish_renaming(target)
    if target.is_symlink() or not (target / MANIFEST_NAME).is_file() or (target / WORK_NAME).exists():
        return None
    manifest = read_manifest(target)
    try:
        difference = next(differences(manifest, conversion), "")
        classes, gains = recorded_errors(manifest.document), recorded_gains(manifest.document)
    except (LookupError, TypeError, AttributeError) as error:
        raise VerificationError(f"lacks or garbles {error}", file=target / MANIFEST_NAME, remedy=_OTHER) from error
    if difference:
        raise UsageError(f"exists already, and was made {difference}", file=target, remedy=_OTHER)
    return ConvertReport(
        output=target,
        plan=conversion.plan,
        classes=classes,
        gains=gains,
        findings=(),
        seconds=time.monotonic() - conversion.started,
        encoded_bytes=0,
        encode_seconds=0.0,
        earlier_bytes=conversion.plan.checkpoint.num_bytes,
    )


def publish_output(
    output: Path, target: PushTarget, *, num_jobs: int, shows_bars: bool, report_progress: ReportProgress
) -> PublishReport:
    """Every file that the manifest names, and the manifest; all of them are hashed before and compared afterwards."""
    records = _checked_records(output, num_jobs=num_jobs, report_progress=report_progress)
    try:
        return _apart(lambda: _push(output, records, target, shows_bars=shows_bars))
    except UsageError:
        raise
    except BaseException as error:
        error.add_note(f"{output} is complete: the same command goes on with the upload")
        raise


def _checked_records(output: Path, *, num_jobs: int, report_progress: ReportProgress) -> dict[str, FileRecord]:
    manifest = read_manifest(output)
    if any(manifest.document.get(mark) for mark in ("is_incomplete", "partial")):
        _refuse_incomplete(output)
    records = manifest.output_files
    findings = [finding for finding in check_files(output, records) if finding.is_error]
    damaged = Finding(check="files", message="its sha256 is not the manifest's: the file is damaged")
    if not findings:
        findings = check_hashes(output, records, wrong=damaged, num_jobs=num_jobs, report_progress=report_progress)
    for finding in findings:
        raise VerificationError(
            finding.message, file=output / (finding.file or ""), remedy="convert again; nothing was uploaded"
        )
    return {**records, MANIFEST_NAME: record_of(output / MANIFEST_NAME)}


def _refuse_incomplete(output: Path) -> None:
    raise UsageError(
        "lacks weights that its config promises, and is not published",
        file=output,
        remedy="convert a source that is whole, or leave --push-to out",
    )


def _apart(work: Callable[[], _T]) -> _T:
    """In a thread of its own: a signal ends the wait for it, where it would wait for the client's transfers."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="quantkit-push")
    try:
        future = pool.submit(work)
        while not wait([future], timeout=_LOOK_ROUND).done:
            pass  # a signal that another thread was given is seen between two waits only
        return future.result()
    finally:
        pool.shutdown(wait=False)


def _push(output: Path, records: Mapping[str, FileRecord], target: PushTarget, *, shows_bars: bool) -> PublishReport:
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars, logging  # type: ignore[attr-defined]  # exported late

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # its warnings name addresses with signatures in them
    if not shows_bars:
        disable_progress_bars()
    with _told(target):
        api = HfApi()
        api.create_repo(target.hub_id, private=not target.is_public, exist_ok=True)
        info = _look_at(target)
        missing = _missing(output, records, target, info)
        if missing:
            api.upload_folder(
                repo_id=target.hub_id,
                folder_path=output,
                allow_patterns=[glob.escape(name) for name in missing],
                commit_message=f"Upload an output of quantkit {__version__}",
                parent_commit=info.sha,
            )
            info = _look_at(target)
        lost = _missing(output, records, target, info)
    if lost:
        raise SourceError(f"{target.hub_id}: {lost[0]} was sent, and the hub does not list it", remedy=_AGAIN)
    return PublishReport(
        hub_id=target.hub_id,
        url=f"{api.endpoint}/{target.hub_id}",
        commit=info.sha or "",
        is_public=not info.private,
        num_files=len(records),
        num_bytes=sum(record.file_bytes for record in records.values()),
        num_sent=len(missing),
    )


def _look_at(target: PushTarget) -> "ModelInfo":
    """What the repository holds. Raises UsageError where others may read it, or may not, against what was asked."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(target.hub_id, files_metadata=True, timeout=_ANSWER_TIMEOUT)
    if bool(info.private) == target.is_public:
        raise UsageError(
            f"{target.hub_id} exists and is {'private' if info.private else 'public'}",
            remedy="leave --public out, or open it in its settings on the hub"
            if info.private
            else "give --public, close it in its settings on the hub, or choose another name",
        )
    return info


def _missing(output: Path, records: Mapping[str, FileRecord], target: PushTarget, info: "ModelInfo") -> list[str]:
    """Files that the repository lacks. Raises UsageError for one that it holds and that is none of this output's."""
    there = set()
    for sibling in info.siblings or ():
        name = sibling.rfilename
        if name == _MADE_BY_THE_HUB and name not in records:
            continue
        if name not in records or not _is_same(output / name, records[name], sibling):
            raise UsageError(
                f"{target.hub_id} exists and holds {name[:200]!r}, which is not of this output",
                remedy="choose another name, or empty that repository",
            )
        there.add(name)
    return sorted(records.keys() - there)


def _is_same(path: Path, record: FileRecord, sibling: "RepoSibling") -> bool:
    if sibling.lfs is not None:
        return sibling.lfs.sha256 == record.sha256
    if sibling.size != record.file_bytes:
        return False
    content = path.read_bytes()
    return sibling.blob_id == hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@contextmanager
def _told(target: PushTarget) -> Iterator[None]:
    """What the client raises, as SourceErrors."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    try:
        yield
    except QuantkitError:
        raise
    except (OSError, RuntimeError, httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as raised:
        error: BaseException = raised
        while isinstance(error, RuntimeError) and error.__cause__ is not None:  # the client's transfers wrap theirs
            error = error.__cause__
        if isinstance(error, LocalTokenNotFoundError):
            problem, remedy = "there is no token for the hub", "log in with `hf auth login`, or set HF_TOKEN"
        elif isinstance(error, OfflineModeIsEnabled):
            problem, remedy = "the hub is not asked, because HF_HUB_OFFLINE is set", "unset it"
        elif isinstance(error, HfHubHTTPError):
            problem, remedy = _answer(error.response.status_code, error.server_message)
        elif isinstance(error, httpx.HTTPError | OSError | RuntimeError):
            problem, remedy = f"the upload broke off ({shown(error)})", f"check the network, then {_AGAIN}"
        else:
            problem = f"the hub's answer is not understood ({shown(error)})"
            remedy = "check HF_ENDPOINT, and whether a proxy or a login page answers in the hub's place"
        raise SourceError(f"{target.hub_id}: {problem}", remedy=remedy) from raised


def _answer(status: int, message: str | None) -> tuple[str, str]:
    problem, remedy = _STATUS.get(status, ("the hub is in trouble" if status >= 500 else "the hub refuses", _AGAIN))
    said = f", {shown(message)}" if message else ""
    return f"{problem} ({status}{said})", remedy
