"""The whole of ``quantkit kv-scales``: find the source, make the report, write what is worth writing."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import UsageError
from quantkit.kv_scales.into_checkpoint import check_checkpoint, write_checkpoint
from quantkit.kv_scales.make import KvScaleReport, KvScaleRequest, make_kv_scales
from quantkit.kv_scales.near import with_small_tensors
from quantkit.kv_scales.sidecar import sidecar_path, write_sidecar
from quantkit.sources import ResolvedSource, resolve_source
from quantkit.threads import ReportProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRequest:
    """``tp``: ranks of SGLang's file; ``force``: also what does nothing, or harm in some backends."""

    output: Path | None = None
    into_checkpoint: bool = False
    force: bool = False
    tp: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvScaleResult:
    """``written`` is None where nothing was, and ``why_not`` says why."""

    name: str
    report: KvScaleReport
    written: Path | None
    into_checkpoint: bool
    why_not: str


def run_kv_scales(
    source: str,
    request: KvScaleRequest,
    write: WriteRequest,
    *,
    report_progress: ReportProgress = lambda _, __: None,
) -> KvScaleResult:
    """Of a hub repository the headers and a few kilobytes are read."""
    _check_together(request, write)
    resolved = resolve_source(source, headers_only=True)
    if resolved.repository is None:
        report = make_kv_scales(resolved.checkpoint, resolved.family, request)
    else:
        with TemporaryDirectory(prefix="quantkit-") as directory:
            near = with_small_tensors(resolved.checkpoint, resolved.repository, resolved.family, Path(directory))
            report = make_kv_scales(near, resolved.family, request)
    why_not = report.why_not_written
    is_written = report.method is not None and (write.force or not why_not)
    written = _write(resolved, report, write, report_progress) if is_written else None
    return KvScaleResult(
        name=resolved.name,
        report=report,
        written=written,
        into_checkpoint=write.into_checkpoint,
        why_not="" if written else why_not,
    )


def _check_together(request: KvScaleRequest, write: WriteRequest) -> None:
    if request.spelling == "sglang" and write.tp is None:
        raise UsageError("--format sglang holds a map for every rank", remedy="give --tp N, as the server will have it")
    if request.spelling != "sglang" and write.tp is not None:
        raise UsageError("--tp is of --format sglang", remedy="leave it out: the other formats hold for any size")
    if request.spelling == "sglang" and write.into_checkpoint:
        raise UsageError("--format sglang is a file beside the checkpoint", remedy="leave --write-to out")


def _write(
    resolved: ResolvedSource, report: KvScaleReport, write: WriteRequest, report_progress: ReportProgress
) -> Path:
    if not write.into_checkpoint:
        path = sidecar_path(write.output, resolved.name, report, resolved.checkpoint.directory)
        write_sidecar(path, report, tp=write.tp)
        return path
    target = write.output or Path(f"{resolved.name}-kv-scales")
    checkpoint: Checkpoint = resolved.checkpoint
    check_checkpoint(checkpoint, report, target)
    write_checkpoint(checkpoint, resolved.family, report, target, report_progress=report_progress)
    return target
