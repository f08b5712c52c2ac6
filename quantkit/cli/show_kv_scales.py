"""Shows scales of a KV cache as JSON or as tables: who would use them, the proof, the layers that lose most."""

from quantkit.cli import render
from quantkit.cli.kv_scales_document import kv_scales_document
from quantkit.cli.kv_scales_text import automatic_text, gain_text, layers_text, not_written_text, use_lines
from quantkit.engines.kv_use import Attention, KvUse
from quantkit.engines.parallel import ENGINE_VERSIONS
from quantkit.kv_scales.make import KvScaleReport, PartReport
from quantkit.kv_scales.run import KvScaleResult
from quantkit.numerics.fp8 import E4M3_MAX
from quantkit.statistics.names import KvPart

_MOST_ROWS = 8


def show_kv_scales(result: KvScaleResult, *, as_json: bool) -> None:
    """The table of verdicts first: what follows matters as far as it goes."""
    if as_json:
        render.show_json(kv_scales_document(result))
        return
    report = result.report
    kind = report.kind
    versions = ", ".join(f"{name} {version}" for name, version in ENGINE_VERSIONS.items())
    render.show_table(
        f"KV scales of {result.name}: {kind.attention.value}, {layers_text(report)}, names of {kind.spelling} "
        f"({versions})",
        ["engine", "attention backend", "default", "KV scales", "why"],
        [[row.engine, row.backend, "yes" if row.is_default else "", row.use.value, row.why] for row in report.rows],
    )
    _show_bounds(report)
    _show_errors(report)
    if report.stored:
        least, largest = min(one.least for one in report.stored), max(one.largest for one in report.stored)
        render.show_line(f"stored already: {len(report.stored)} scales, {least:.4g} to {largest:.4g}")
    if result.written is None:
        render.show_line(not_written_text(result))
        return
    render.show_line(f"written: {result.written}")
    for line in use_lines(result, result.written):
        render.show_line(line)
    harmful = [f"{row.engine} {row.backend}" for row in report.rows if row.use is KvUse.HARMFUL]
    if harmful and not report.is_unit:
        render.show_notes("warning", [f"these scales make attention wrong in {', '.join(harmful)}"])
    note = automatic_text(report)
    render.show_notes("note", [note] if note else [])


def _show_bounds(report: KvScaleReport) -> None:
    if not report.bounds:
        return
    worst = sorted(report.bounds, key=lambda one: (-one.bound, one.layer))
    render.show_table(
        "Bound of the latent from its norm's gains, largest first",
        ["layer", "largest gain", "bound", "at scale 1.0"],
        [
            [str(one.layer), f"{one.gain:.4g}", f"{one.bound:.4g}", "cannot clip" if one.is_safe else "not proven"]
            for one in worst[:_MOST_ROWS]
        ],
    )
    safe = sum(one.is_safe for one in report.bounds)
    render.show_line(
        f"proven without data: at scale 1.0 the latent cannot be clipped (it stays within {E4M3_MAX:g}) in {safe} of "
        f"{len(report.bounds)} layers{', the draft among them' if report.bounds[-1].layer >= report.num_layers else ''}"
    )
    render.show_line(_of_rope(report))


def _of_rope(report: KvScaleReport) -> str:
    ropes = (part for one in report.layers for part in one.parts if part.part is KvPart.ROPE)
    largest = max((part.absmax for part in ropes), default=None)
    if largest is not None:
        verdict = "does not clip" if largest <= E4M3_MAX else "clips"
        return f"the rope part has no norm: at scale 1.0 its largest value here, {largest:.4g}, {verdict}"
    if report.kind.attention is Attention.SPARSE:
        return "the rope part has no norm: packed rows keep it in BF16; in flat FP8 rows only data bounds it (--stats)"
    return "the rope part has no norm: only data bounds it (--stats)"


def _show_errors(report: KvScaleReport) -> None:
    parts = [(one.scales.layer, part) for one in report.layers for part in one.parts]
    if not parts:
        return
    worst = sorted(parts, key=lambda one: (-one[1].at_unit.clipped_fraction, -one[1].at_unit.relative, one[0]))
    render.show_table(
        f"FP8 storage by {report.method}, per {report.kind.scope}; layers that lose most at scale 1.0 first",
        ["layer", "part", "largest", "scale", "clipped at 1.0", "error at 1.0", "clipped", "error"],
        [_error_row(layer, part) for layer, part in worst[:_MOST_ROWS]],
    )
    means = [
        f"{name} {sum(part.at_unit.relative for part in of_name) / len(of_name):.4f} at 1.0, "
        f"{sum(part.at_scale.relative for part in of_name) / len(of_name):.4f} at the scales"
        for name in dict.fromkeys(part.part for _, part in parts)
        if (of_name := [part for _, part in parts if part.part == name])
    ]
    render.show_line(f"relative error, mean of {report.num_layers} layers: {'; '.join(means)}")
    gain = gain_text(report)
    if gain:
        render.show_line(gain)


def _error_row(layer: int, part: PartReport) -> list[str]:
    low, high = float(part.scales.min()), float(part.scales.max())
    return [
        str(layer),
        part.part,
        f"{part.absmax:.4g}",
        f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}",
        f"{part.at_unit.clipped_fraction:.2e}",
        f"{part.at_unit.relative:.4f}",
        f"{part.at_scale.clipped_fraction:.2e}",
        f"{part.at_scale.relative:.4f}",
    ]
