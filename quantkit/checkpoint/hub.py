"""Ask the Hugging Face hub by its own client: a whole snapshot, one file, or some bytes of one.

Every failure is a SourceError that names repository and revision, and says what to do.
"""

import glob
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from quantkit.checkpoint.disk import FULL
from quantkit.checkpoint.file_names import HUB_CLIENT_NAME
from quantkit.checkpoint.sidecars import WEIGHT_SUFFIXES
from quantkit.errors import ResourceError, SourceError

if TYPE_CHECKING:
    from quantkit.checkpoint.http_range import FileRange

_NEVER_FETCHED = [f"*{suffix}" for suffix in WEIGHT_SUFFIXES if suffix != ".safetensors"]
_HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LONGEST_NAME = 1024
_FETCH_AGAIN = "check the network and the free disk space, then run the same command again: downloads resume"
_ASK_AGAIN = "check the network, then run the same command again"
_ANSWER_TIMEOUT = 30  # seconds; the client's own default is to wait for ever


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A repository at one commit: ``directory`` is a folder of links into the cache."""

    directory: Path
    hub_id: str
    commit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """A file as the hub lists it: its length and, of large ones, its sha256, where it says them."""

    num_bytes: int | None
    sha256: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A repository at the commit that ``revision`` stood for, and what it holds."""

    hub_id: str
    revision: str
    commit: str
    files: Mapping[str, HubFile]

    def __str__(self) -> str:
        return f"{self.hub_id}@{self.revision}"


def parse_hub_id(text: str) -> tuple[str, str] | None:
    """Id and revision of ``org/name[@revision]``; None for what is no hub id, paths included."""
    match = _HUB_ID.fullmatch(text)
    if match is None or text.startswith((".", "/", "~")):
        return None
    return match["id"], match["revision"] or "main"


def is_offline() -> bool:
    """Whether the client was told to ask nobody, and to take what is in its cache."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def fetch_snapshot(hub_id: str, revision: str) -> Snapshot:
    """All files of a repository but other weight formats. Raises SourceError with the remedy for every failure."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # exported late

    if not sys.stderr.isatty() or os.environ.get("CI"):
        disable_progress_bars()  # a log has no lines that are drawn over
    with _errors_said(f"{hub_id}@{revision}", _FETCH_AGAIN):
        directory = Path(snapshot_download(hub_id, revision=revision, ignore_patterns=_NEVER_FETCHED))
    return Snapshot(directory=directory, hub_id=hub_id, commit=directory.name)


def find_repository(hub_id: str, revision: str) -> Repository:
    """What a revision stands for now, and what it holds; one question, so that the two belong together."""
    from huggingface_hub import HfApi

    from quantkit.checkpoint.http_range import patiently

    with _errors_said(f"{hub_id}@{revision}", _ASK_AGAIN):
        info = patiently(
            lambda: HfApi().model_info(hub_id, revision=revision, files_metadata=True, timeout=_ANSWER_TIMEOUT)
        )
        files: dict[str, HubFile] = {}
        for sibling in info.siblings or ():
            size = sibling.size if sibling.lfs is None else sibling.lfs.size
            sha256 = None if sibling.lfs is None else sibling.lfs.sha256
            if not _is_name(sibling.rfilename) or not _is_length(size):
                raise ValueError(f"it lists the file {str(sibling.rfilename)[:80]!a} with {str(size)[:80]!a} bytes")
            if sha256 is not None and not (isinstance(sha256, str) and _SHA256.fullmatch(sha256)):
                raise ValueError(f"it lists the file {sibling.rfilename[:80]!a} with the sha256 {str(sha256)[:80]!a}")
            if any(fnmatch(sibling.rfilename, pattern) for pattern in _NEVER_FETCHED):
                continue
            files[sibling.rfilename] = HubFile(num_bytes=size, sha256=sha256)
        if not isinstance(info.sha, str) or _COMMIT.fullmatch(info.sha) is None:
            raise ValueError("it names no commit")
    return Repository(hub_id=hub_id, revision=revision, commit=info.sha, files=files)


def download_file(repository: Repository, name: str) -> Path:
    """One small file, in the client's cache."""
    from huggingface_hub import hf_hub_download

    with _errors_said(f"{repository}: {name}", _FETCH_AGAIN):
        return Path(hf_hub_download(repository.hub_id, name, revision=repository.commit))


def fetch_file(repository: Repository, name: str, directory: Path, stop: Event) -> Path:
    """One file of any size into a directory of ours, begun downloads resumed; ``StoppedError`` soon after ``stop``.

    What a signed address or a connection can do to it passes: it is asked for again, from where it broke off.
    """
    from huggingface_hub import hf_hub_download

    from quantkit.checkpoint.http_range import patiently, stopping_bar

    with _errors_said(f"{repository}: {name}", _FETCH_AGAIN):
        bar = stopping_bar(stop)
        return Path(
            patiently(
                lambda: hf_hub_download(
                    repository.hub_id, name, revision=repository.commit, local_dir=directory, tqdm_class=bar
                ),
                stop=stop,
            )
        )


def forget_file(directory: Path, name: str) -> None:
    """Remove a file that ``fetch_file`` has brought, and what the client noted of it."""
    (directory / name).unlink(missing_ok=True)
    notes = directory / HUB_CLIENT_NAME / "huggingface" / "download"
    for path in notes.glob(f"{glob.escape(name)}.*"):
        path.unlink(missing_ok=True)


def read_range(repository: Repository, name: str, begin: int, end: int, stop: Event | None = None) -> "FileRange":
    """Bytes ``[begin, end)`` of a file, as far as it goes. Nothing is kept in the cache."""
    from huggingface_hub import hf_hub_url

    from quantkit.checkpoint import http_range

    listed_bytes = repository.files[name].num_bytes
    with _errors_said(f"{repository}: {name}", _ASK_AGAIN):
        url = hf_hub_url(repository.hub_id, name, revision=repository.commit)
        return http_range.read_range(url, begin, end, listed_bytes, stop)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and len(value.encode()) <= _LONGEST_NAME


def _is_length(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)


@contextmanager
def _errors_said(what: str, remedy: str) -> Iterator[None]:
    """What the client raises, as SourceErrors about ``what``; ``remedy`` for failures on the way."""
    import httpx
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    # the client's own warnings quote addresses, and those may be signed
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)

    def failed(problem: str, remedy: str) -> SourceError:
        return SourceError(f"{what}: {problem}", remedy=remedy)

    try:
        yield
    except GatedRepoError as error:
        raise failed(
            "the repository is gated", "accept its terms on the hub and log in with `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise failed("the hub has no such revision", "check the part behind @") from error
    except RepositoryNotFoundError as error:
        raise failed(
            "the hub has no such repository, or it is private", "check the name, or log in with `hf auth login`"
        ) from error
    except HFValidationError as error:
        raise failed("is not a hub id", "write it as org/name or org/name@revision") from error
    except LocalEntryNotFoundError as error:
        raise failed(
            "cannot be fetched and is not in the cache: the hub cannot be reached",
            "check the network, or name a directory (there is none of that name here)",
        ) from error
    except OfflineModeIsEnabled as error:
        raise failed("the hub is not asked, because HF_HUB_OFFLINE is set", "unset it, or name a directory") from error
    except (HfHubHTTPError, httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        if isinstance(error, OSError) and error.errno in FULL:
            raise ResourceError(
                f"{what}: cannot be kept ({error.strerror})", remedy="free space, then run the same command again"
            ) from error
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
        remedy = "log in with `hf auth login`, as somebody who may read it" if status in {401, 403} else remedy
        raise failed(f"cannot be fetched ({shown(error)})", remedy) from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise failed(
            f"the hub's answer is not understood ({shown(error)})",
            "check HF_ENDPOINT, and whether a proxy or a login page answers in the hub's place",
        ) from error


def shown(said: object) -> str:
    """The first line of what the client or the hub says, without the token, and the secrets in addresses."""
    from huggingface_hub import get_token

    line = next(iter(str(said).splitlines()), "") or type(said).__name__
    line = re.sub(r"(https?://)[^/@\s'\"]*@", r"\1", line)
    line = re.sub(r"(https?://[^?\s'\"]*)\?[^\s'\"]*", r"\1", line)
    line = re.sub(r"(?i)bearer\s+[^\s'\"]+", "the token", line)
    token = get_token()
    return line.replace(token, "the token") if token else line
