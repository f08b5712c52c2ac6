"""What `quantkit kv-scales` says behind its tables: what scales gain, why none are written, how an engine gets them."""

from collections.abc import Iterator
from pathlib import Path

from quantkit.engines.kv_use import KvUse
from quantkit.engines.parallel import EngineName
from quantkit.kv_scales.make import KvScaleReport
from quantkit.kv_scales.run import KvScaleResult
from quantkit.kv_scales.sidecar import MARK

_LEAST_GAIN = 0.01  # of the error: less is none
_FP8_DTYPE: dict[EngineName, str] = {"sglang": "--kv-cache-dtype fp8_e4m3", "vllm": "--kv-cache-dtype fp8"}
_LAUNCH: dict[EngineName, str] = {"sglang": "python -m sglang.launch_server --model-path", "vllm": "vllm serve"}
_AUTOMATIC = (
    "with kv_cache_scheme in its config both engines take an FP8 cache by themselves, SGLang not for sparse attention. "
    "A backend that ignores the scales clips there what 1.0 clips: serve with --kv-cache-dtype bfloat16 in such a one"
)


def layers_text(report: KvScaleReport) -> str:
    """Layers of the model, and of its draft where these have a bound."""
    drafts = sum(one.layer >= report.num_layers for one in report.bounds)
    if not drafts:
        return f"{report.num_layers} layers"
    return f"{report.num_layers} and {drafts} draft layer{'s' if drafts > 1 else ''}"


def gain_text(report: KvScaleReport) -> str:
    """Where the chosen scales lose as much as 1.0 does; empty where they gain, or nothing was seen."""
    parts = [part for one in report.layers for part in one.parts]
    if not parts or report.is_unit:
        return ""
    for name in {part.part for part in parts}:
        of_name = [part for part in parts if part.part == name]
        at_unit, at_scale = (sum(getattr(part, at).relative for part in of_name) for at in ("at_unit", "at_scale"))
        if at_scale < (1 - _LEAST_GAIN) * at_unit:
            return ""
    return "these scales gain nothing: an FP8 KV cache loses no more at scale 1.0, which needs none"


def not_written_text(result: KvScaleResult) -> str:
    """Why, what to do instead, and how to have them all the same."""
    if result.report.method is None and result.report.is_useful:  # the reason names what to give
        return f"nothing is written: {result.why_not}"
    forced = "--force" if result.report.method is not None else "--force with --stats FILE or --method unit"
    return (
        f"nothing is written: {result.why_not}; an FP8 KV cache is served without them ({_FP8_DTYPE['sglang']} in "
        f"SGLang, {_FP8_DTYPE['vllm']} in vLLM); {forced} writes them all the same"
    )


def use_lines(result: KvScaleResult, path: Path) -> Iterator[str]:
    """How an engine gets what was written, and the launch line of each that uses it."""
    report, kind = result.report, result.report.kind
    users = dict.fromkeys(row.engine for row in report.rows if row.use is KvUse.USED)
    if kind.spelling == "sglang":
        yield f"SGLang gets it by --quantization-param-path {path} beside {_FP8_DTYPE['sglang']}, if the table says so"
        return
    if not result.into_checkpoint:
        yield (
            "no engine reads this file where it is: --write-to checkpoint makes a copy of an output with it; "
            "any other checkpoint gets it by hand: copy it in, add its tensors to weight_map of the index, and to "
            f"quantization_config of config.json what its metadata has under {MARK}"
        )
    for engine in users:
        checkpoint = path if result.into_checkpoint else "CHECKPOINT"
        yield f"to serve: {_LAUNCH[engine]} {checkpoint} {_FP8_DTYPE[engine]}"


def automatic_text(report: KvScaleReport) -> str:
    """What a config with the scales' section changes, where it matters: something is clipped at 1.0."""
    clips = any(part.at_unit.clipped_fraction for one in report.layers for part in one.parts)
    return _AUTOMATIC if clips and report.kind.spelling == "compressed-tensors" else ""
