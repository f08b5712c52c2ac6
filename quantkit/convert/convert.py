"""Plan, execute, verify, publish: a checkpoint directory in, a verified directory out, or a named error and nothing."""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit import __version__
from quantkit.checkpoint.disk import free_bytes, named_errors, write_file
from quantkit.checkpoint.output import OutputDirectory, check_target
from quantkit.checkpoint.reader import copy_file, hash_file
from quantkit.checkpoint.source import CONFIG_NAME, INDEX_NAME
from quantkit.convert.card import model_card
from quantkit.convert.journal import Journal, begin_run, read_journals, run_document
from quantkit.convert.local import Execution, Share, execute
from quantkit.convert.resume import believed
from quantkit.errors import ResourceError, VerificationError
from quantkit.integrity.manifest import MANIFEST_FORMAT, MANIFEST_NAME, FileRecord, write_json
from quantkit.integrity.weight_errors import ClassError, class_errors
from quantkit.machine import bytes_text
from quantkit.plan.plan import Plan
from quantkit.plan.resources import check_memory, disk_bytes
from quantkit.recipe import recipe_document
from quantkit.threads import ReportProgress
from quantkit.verify.report import Finding
from quantkit.verify.structure import check_structure
from quantkit.verify.thresholds import check_errors

README_NAME = "README.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport:
    """What a conversion did. ``seconds`` is wall time, ``encode_seconds`` CPU time of the encoder alone."""

    output: Path
    plan: Plan
    classes: tuple[ClassError, ...]
    findings: tuple[Finding, ...]
    seconds: float
    encoded_bytes: int
    encode_seconds: float


def convert_checkpoint(
    plan: Plan,
    target: Path,
    *,
    num_jobs: int,
    provenance: Mapping[str, str] | None = None,
    resume: bool = True,
    report_progress: ReportProgress = lambda _, __: None,
) -> ConvertReport:
    """Execute a plan and publish the output as ``target``, going on from what an earlier run of it has finished.

    ``provenance``: hub id and commit of the source, where there are any. ``resume``: without it that work is thrown
    away. Raises SourceError, ResourceError or VerificationError; finished work then stays in the partial directory,
    unless it was found wrong.
    """
    started = time.monotonic()
    check_target(target, plan.checkpoint.directory)
    with OutputDirectory(target) as output, _told_what_is_kept(plan, output):
        execution = _execute(plan, output, num_jobs, provenance or {}, resume, report_progress)
        classes = class_errors(execution.errors)
        write_documents(plan, output.directory, execution, classes, provenance or {})
        findings = (
            *check_structure(output.directory, plan),
            *check_errors(execution.errors, classes, group_size=plan.recipe.group_size),
        )
        _refuse_bad(findings)
        output.publish()
    return ConvertReport(
        output=target,
        plan=plan,
        classes=classes,
        findings=findings,
        seconds=time.monotonic() - started,
        encoded_bytes=execution.encoded_bytes,
        encode_seconds=execution.encode_seconds,
    )


def _execute(
    plan: Plan,
    output: OutputDirectory,
    num_jobs: int,
    provenance: Mapping[str, str],
    resume: bool,
    report_progress: ReportProgress,
) -> Execution:
    if not resume:
        output.start_over()
    begin_run(output.work, run_document(plan, provenance, world_size=1))
    journal = Journal(output.work)
    try:
        done = believed(plan, output.directory, journal.found, num_jobs=num_jobs, report_progress=report_progress)
        output.clear(set(done.outputs))
        output.keep = bool(done.outputs)
        check_resources(plan, output.target, num_jobs=num_jobs, done=done.outputs)
        share = Share(directory=output.directory, journal=journal, done=done)
        return execute(plan, share, num_jobs=num_jobs, report_progress=report_progress)
    finally:
        output.keep = output.keep or journal.has_output
        journal.close()


@contextmanager
def _told_what_is_kept(plan: Plan, output: OutputDirectory) -> Iterator[None]:
    """Whatever ends the run says how to go on; work that verification found wrong is not gone on from."""
    try:
        yield
    except VerificationError:
        output.keep = False
        raise
    except BaseException as error:
        num_done = len(read_journals(output.work).outputs) if output.keep else 0
        if num_done:
            error.add_note(
                f"{num_done} of {len(plan.shards)} shards are done and kept in {output.directory}: "
                "the same command goes on from there"
            )
        raise


def _refuse_bad(findings: Sequence[Finding]) -> None:
    for finding in findings:
        if finding.is_error:
            raise VerificationError(
                finding.message,
                tensor=finding.tensor,
                file=finding.file,
                remedy=f"{finding.remedy or 'this is worth a report'}; nothing was published",
            )


def check_resources(plan: Plan, target: Path, *, num_jobs: int, done: Collection[str] = ()) -> None:
    """Raise ResourceError when what is not ``done`` does not fit on the disk, or the workers not into memory."""
    there = sum(shard.file_bytes for shard in plan.shards if shard.name in done)
    needed, free = disk_bytes(plan) - there, free_bytes(target.parent)
    if needed > free:
        raise ResourceError(
            f"the output needs {bytes_text(needed)} and {bytes_text(free)} are free",
            file=target,
            remedy="free space, or choose another disk with -o",
        )
    check_memory(num_jobs)


def write_documents(
    plan: Plan,
    directory: Path,
    execution: Execution,
    classes: tuple[ClassError, ...],
    provenance: Mapping[str, str],
) -> None:
    """Sidecars, config, index, card, and last the manifest that names them all."""
    records = dict(execution.output_records)
    for sidecar in plan.checkpoint.sidecars.copied:
        path = directory / sidecar.name
        with named_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            copy_file(sidecar.path, path)
        records[sidecar.name] = _record(path)
    documents: dict[str, Mapping[str, Any]] = {
        CONFIG_NAME: plan.config,
        INDEX_NAME: {"metadata": {"total_size": plan.tensor_bytes}, "weight_map": plan.weight_map},
    }
    for name, document in documents.items():
        with named_errors(directory / name):
            write_json(directory / name, document)
        records[name] = _record(directory / name)
    with named_errors(directory / README_NAME):
        write_file(directory / README_NAME, model_card(plan, classes, provenance).encode())
    records[README_NAME] = _record(directory / README_NAME)
    with named_errors(directory / MANIFEST_NAME):
        write_json(directory / MANIFEST_NAME, manifest_document(plan, execution, classes, records, provenance))


def _record(path: Path) -> FileRecord:
    return FileRecord(file_bytes=path.stat().st_size, sha256=hash_file(path))


def manifest_document(
    plan: Plan,
    execution: Execution,
    classes: tuple[ClassError, ...],
    records: Mapping[str, FileRecord],
    provenance: Mapping[str, str],
) -> dict[str, Any]:
    """conversion.json: the same for the same source, recipe and version, wherever and however it ran."""
    errors = {error.role: error for error in classes}
    return {
        "format": MANIFEST_FORMAT,
        "tool": {"name": "quantkit", "version": __version__},
        "recipe": recipe_document(plan.recipe),
        "family": plan.family,
        "is_incomplete": plan.is_incomplete,
        "source": {
            **provenance,
            "config_sha256": hash_file(plan.checkpoint.directory / CONFIG_NAME),
            "shards": {name: record.document() for name, record in sorted(execution.source_records.items())},
        },
        "output": {
            "num_tensors": plan.num_tensors,
            "tensor_bytes": plan.tensor_bytes,
            "files": {name: record.document() for name, record in sorted(records.items())},
        },
        "parts": [
            {
                "role": part.role,
                "action": part.action,
                "source": part.codec,
                "num_weights": part.num_weights,
                "num_elements": part.num_elements,
                "source_bytes": part.source_bytes,
                "output_bytes": part.output_bytes,
            }
            for part in plan.parts
        ],
        "errors": {
            role: {
                "num_weights": error.num_weights,
                "relative_error": error.relative,
                "median_relative_error": error.median,
                "worst_relative_error": error.worst,
                "worst_weight": error.worst_name,
            }
            for role, error in errors.items()
        },
        "rules": [
            {"rule": count.rule, "action": count.action, "num_weights": count.num_weights} for count in plan.rules
        ],
        "dropped_tensors": dict(sorted(plan.dropped.items())),
        "skipped_files": dict(plan.checkpoint.sidecars.skipped),
        "warnings": list(plan.warnings),
    }
