"""An output of ours once more, with KV scales in it: a directory of its own, which appears whole or not at all.

Nothing that was published is touched. Files that do not change are hard links where the file system has them, so that
the copy of half a terabyte takes no room; scales lie in a shard of their own, and index, config and manifest are
written anew. The new manifest vouches for every file, so that each is read once and compared with the old one.
"""

import json
import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from quantkit.checkpoint.begun import WHY
from quantkit.checkpoint.disk import named_errors, write_file, write_whole
from quantkit.checkpoint.file_names import CONFIG_NAME, INDEX_NAME, MANIFEST_NAME, README_NAME, RUN_NAME
from quantkit.checkpoint.json_files import MOST_INDEX_BYTES, read_json
from quantkit.checkpoint.output import OutputDirectory, check_target
from quantkit.checkpoint.reader import Digest, copy_file
from quantkit.checkpoint.source import Checkpoint
from quantkit.convert.card import model_card
from quantkit.errors import UsageError, VerificationError
from quantkit.families.family import Family
from quantkit.integrity.manifest import FileRecord, Manifest, read_manifest, record_of, write_json
from quantkit.kv_scales.make import KvScaleReport, scales_document
from quantkit.kv_scales.sidecar import write_tensors
from quantkit.kv_scales.spelling import config_section, scale_tensors
from quantkit.machine import available_cores
from quantkit.threads import ReportProgress
from quantkit.verify.hashes import check_hashes
from quantkit.verify.kv_scales import KEY, added_document, with_section
from quantkit.verify.report import Finding
from quantkit.verify.structure import check_contract, open_output

SHARD_NAME = "model-kv-scales.safetensors"
_RUN: Mapping[str, Any] = {"command": "kv-scales"}
_SIDECAR = "leave --write-to out for a file of its own; README.md, FP8 KV scales, says how it is put into a checkpoint"
_DAMAGED = Finding(
    check="files",
    message="its sha256 is not the manifest's: the file is damaged",
    remedy="put the undamaged file back, or convert again; quantkit verify names all that is damaged",
)


def check_checkpoint(checkpoint: Checkpoint, report: KvScaleReport, target: Path) -> None:
    """Raise UsageError where scales cannot be put into a copy of this checkpoint, or the copy not there."""
    directory = checkpoint.directory
    if not (directory / MANIFEST_NAME).is_file():
        raise UsageError("is no output of quantkit", file=directory, remedy=_SIDECAR)
    if report.kind.spelling != "compressed-tensors":
        raise UsageError(f"--format {report.kind.spelling} is not what its config is written in", remedy=_SIDECAR)
    if report.kind.method != "compressed-tensors":
        what = report.kind.method or "no quantization"
        raise UsageError(f"its config declares {what}, which has no place for KV scales", remedy=_SIDECAR)
    if report.stored:
        raise UsageError(
            f"holds KV scales already ({report.stored[0].name})", file=directory, remedy="name the output without them"
        )
    check_target(target, directory)


def write_checkpoint(
    checkpoint: Checkpoint,
    family: Family,
    report: KvScaleReport,
    target: Path,
    *,
    report_progress: ReportProgress = lambda _, __: None,
) -> None:
    """As ``check_checkpoint`` has allowed. Raises VerificationError where the output is damaged."""
    manifest = read_manifest(checkpoint.directory)
    read = {name: one for name, one in manifest.output_files.items() if name in (CONFIG_NAME, INDEX_NAME)}
    _check_undamaged(checkpoint.directory, read, report_progress)
    tensors = scale_tensors([one.scales for one in report.layers], report.kind)
    with OutputDirectory(target) as output:
        _check_ours(output)
        output.start_over()
        _begin_run(output.work)
        linked = _link_files(checkpoint.directory, output.directory, manifest.output_files)
        _check_undamaged(output.directory, linked, report_progress)
        with named_errors(output.directory / SHARD_NAME):
            write_tensors(output.directory / SHARD_NAME, tensors, {})
        documents = _documents(checkpoint, report, manifest)
        for name, document in documents.items():
            with named_errors(output.directory / name):
                write_json(output.directory / name, document)
        records = {name: record_of(output.directory / name) for name in (SHARD_NAME, *documents)}
        _write_manifest(output.directory, _manifest(report, manifest), {**manifest.output_files, **records})
        _verify(output.directory, family, manifest)
        output.put_in_place()


def _begin_run(work: Path) -> None:
    """By this a copy that was cut behind its rename is known, and one before it is told from a conversion."""
    with named_errors(work):
        write_whole(work / RUN_NAME, json.dumps(_RUN).encode())


def _check_ours(output: OutputDirectory) -> None:
    """A conversion that was cut may have work of hours in a directory of this name."""
    run = output.work / RUN_NAME
    if run.is_file() and read_json(run, what=WHY) != _RUN:
        raise UsageError("holds work of a conversion", file=output.directory, remedy="choose another -o, or remove it")


def _link_files(source: Path, target: Path, records: Mapping[str, FileRecord]) -> dict[str, FileRecord]:
    """What is a link now, and nobody has read; what is copied is compared as it is.

    Raises VerificationError for a file that is not the one that the manifest names.
    """
    linked = {}
    for name, record in records.items():
        if name in (CONFIG_NAME, INDEX_NAME, README_NAME):
            continue
        path = (source / name).resolve()
        if not path.is_file() or path.stat().st_size != record.file_bytes:
            raise VerificationError("is not the file that the manifest names", file=name, remedy="run quantkit verify")
        place = target / name
        with named_errors(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path, place)
                linked[name] = record
            except OSError:  # another file system, or one without links
                digest = Digest()
                copy_file(path, place, digest)
                if digest.hexadecimal != record.sha256:
                    _refuse(replace(_DAMAGED, file=name))
    return linked


def _check_undamaged(directory: Path, records: Mapping[str, FileRecord], report_progress: ReportProgress) -> None:
    found = check_hashes(
        directory, records, wrong=_DAMAGED, num_jobs=available_cores(), report_progress=report_progress
    )
    for finding in found:
        _refuse(finding)


def _refuse(finding: Finding) -> NoReturn:
    raise VerificationError(finding.message, tensor=finding.tensor, file=finding.file, remedy=finding.remedy)


def _documents(checkpoint: Checkpoint, report: KvScaleReport, manifest: Manifest) -> dict[str, Mapping[str, Any]]:
    index = read_json(checkpoint.directory / INDEX_NAME, what="convert again", most_bytes=MOST_INDEX_BYTES)
    tensors = scale_tensors([one.scales for one in report.layers], report.kind)
    weight_map = dict(sorted({**index["weight_map"], **dict.fromkeys(tensors, SHARD_NAME)}.items()))
    total = checkpoint.num_bytes + sum(array.nbytes for array in tensors.values())
    return {
        CONFIG_NAME: with_section(checkpoint.config, config_section(report.kind)),
        INDEX_NAME: {"metadata": {"total_size": total}, "weight_map": weight_map},
    }


def _write_manifest(directory: Path, document: dict[str, Any], records: dict[str, FileRecord]) -> None:
    """The card, which tells of the scales, and the manifest that names it with all other files."""
    config = read_json(directory / CONFIG_NAME, what="it was just written")
    with named_errors(directory / README_NAME):
        write_file(directory / README_NAME, model_card(document, config).encode())
    records[README_NAME] = record_of(directory / README_NAME)
    document["output"]["files"] = {name: record.document() for name, record in sorted(records.items())}
    with named_errors(directory / MANIFEST_NAME):
        write_json(directory / MANIFEST_NAME, document)


def _manifest(report: KvScaleReport, manifest: Manifest) -> dict[str, Any]:
    """Its files are not named yet."""
    document: dict[str, Any] = deepcopy(dict(manifest.document))
    tensors = scale_tensors([one.scales for one in report.layers], report.kind)
    output = document["output"]
    output["num_tensors"] += len(tensors)
    output["tensor_bytes"] += sum(array.nbytes for array in tensors.values())
    added = added_document(
        SHARD_NAME, {name: array.shape for name, array in tensors.items()}, config_section(report.kind)
    )
    document[KEY] = {**scales_document(report), **added}
    return document


def _verify(directory: Path, family: Family, manifest: Manifest) -> None:
    checkpoint, findings = open_output(directory)
    if checkpoint is not None:
        allowed = bool(manifest.document.get("is_incomplete"))
        is_partial = manifest.document.get("partial") is not None
        findings += check_contract(checkpoint, family, allow_incomplete=allowed, is_partial=is_partial)
    for finding in findings:
        if finding.is_error:
            _refuse(replace(finding, remedy="run quantkit verify on the output"))
