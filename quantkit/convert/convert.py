"""Plan, execute, verify, rename: a checkpoint directory in, a verified directory out, or a named error and nothing."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint.disk import named_errors, write_file
from quantkit.checkpoint.file_names import CONFIG_NAME, INDEX_NAME, MANIFEST_NAME, README_NAME
from quantkit.checkpoint.output import OutputDirectory, check_target
from quantkit.checkpoint.reader import copy_file
from quantkit.convert.card import model_card
from quantkit.convert.conversion import Conversion, Executor, told_what_is_kept, work
from quantkit.convert.execution import Execution
from quantkit.convert.manifest import manifest_document
from quantkit.errors import VerificationError
from quantkit.integrity.manifest import record_of, write_json
from quantkit.integrity.weighed_errors import ClassGain
from quantkit.integrity.weight_errors import ClassError, class_errors
from quantkit.plan.plan import Plan
from quantkit.verify.report import Finding
from quantkit.verify.structure import check_structure
from quantkit.verify.thresholds import check_errors


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport:
    """What a conversion did. ``seconds`` is wall time, ``encode_seconds`` CPU time of the encoder alone.

    ``earlier_bytes``: of the source, that an earlier run or other ranks had converted.
    """

    output: Path
    plan: Plan
    classes: tuple[ClassError, ...]
    gains: tuple[ClassGain, ...]
    findings: tuple[Finding, ...]
    seconds: float
    encoded_bytes: int
    encode_seconds: float
    earlier_bytes: int
    calibration: Mapping[str, Any] | None = None  # what chose the codes, where that is not the search


def convert_checkpoint(conversion: Conversion, executor: Executor | None = None) -> ConvertReport:
    """Execute a plan, here or by ``executor``, and put the output in place; goes on from what an earlier run has made.

    Raises SourceError, ResourceError or VerificationError; finished work then stays in the partial directory, unless
    it was found wrong.
    """
    check_target(conversion.target, conversion.plan.checkpoint.directory)
    everything = frozenset(source.name for source in conversion.plan.checkpoint.shards)
    with OutputDirectory(conversion.target) as output, told_what_is_kept(conversion, output):
        conversion.begin(output)
        plan, execution = work(conversion, output, everything, executor)
        return complete(conversion, plan, output, execution)


def complete(conversion: Conversion, plan: Plan, output: OutputDirectory, execution: Execution) -> ConvertReport:
    """All shards are there: the files beside them, the checks, the renaming. Raises VerificationError."""
    classes = class_errors(execution.errors)
    write_documents(plan, output.directory, execution, classes, conversion)
    findings = (
        *check_structure(output.directory, plan),
        *check_errors(execution.errors, classes, plan.recipe, has_importance=plan.importance is not None),
    )
    _refuse_bad(findings)
    output.put_in_place()
    return ConvertReport(
        output=conversion.target,
        plan=plan,
        classes=classes,
        gains=execution.gains,
        findings=findings,
        seconds=time.monotonic() - conversion.started,
        encoded_bytes=execution.encoded_bytes,
        encode_seconds=execution.encode_seconds,
        earlier_bytes=execution.earlier_bytes,
        calibration=None if conversion.words is None else conversion.words.summary,
    )


def _refuse_bad(findings: Sequence[Finding]) -> None:
    for finding in findings:
        if finding.is_error:
            raise VerificationError(
                finding.message,
                tensor=finding.tensor,
                file=finding.file,
                remedy=f"{finding.remedy or 'this is worth a report'}; no output was made",
            )


def write_documents(
    plan: Plan,
    directory: Path,
    execution: Execution,
    classes: tuple[ClassError, ...],
    conversion: Conversion,
) -> None:
    """Sidecars, config, index, card, and last the manifest that names them all."""
    records = dict(execution.output_records)
    for sidecar in plan.checkpoint.sidecars.copied:
        path = directory / sidecar.name
        with named_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            copy_file(sidecar.path, path)
        records[sidecar.name] = record_of(path)
    documents: dict[str, Mapping[str, Any]] = {
        CONFIG_NAME: plan.config,
        INDEX_NAME: {"metadata": {"total_size": plan.tensor_bytes}, "weight_map": plan.weight_map},
    }
    for name, document in documents.items():
        with named_errors(directory / name):
            write_json(directory / name, document)
        records[name] = record_of(directory / name)
    manifest = manifest_document(plan, execution, classes, conversion, directory)
    with named_errors(directory / README_NAME):
        write_file(directory / README_NAME, model_card(manifest, plan.config).encode())
    records[README_NAME] = record_of(directory / README_NAME)
    manifest["output"]["files"] = {name: record.document() for name, record in sorted(records.items())}
    with named_errors(directory / MANIFEST_NAME):
        write_json(directory / MANIFEST_NAME, manifest)
