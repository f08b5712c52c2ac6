"""Why a log may not be of the server that was planned: figures far off, another version, options that say otherwise."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from quantkit.engines.parallel import ENGINE_VERSIONS
from quantkit.memory.engine_log import EngineLog
from quantkit.memory.kv_format import KV_DTYPE_WORDS
from quantkit.memory.model import Model
from quantkit.memory.plan import MemoryPlan
from quantkit.memory.rules import RULES
from quantkit.memory.serving import MemoryRequest
from quantkit.memory.split import SIZE_OPTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One figure of a rank. ``planned`` is None where the plan says nothing of it; ``line`` is the log's."""

    name: str
    unit: str
    planned: float | None
    measured: float
    line: int

    @property
    def difference_percent(self) -> float | None:
        """Planned less measured, of the measured."""
        if self.planned is None or not self.measured:
            return None
        return (self.planned - self.measured) / self.measured * 100


# what a log decides: its key, and the field of the request; sizes are those of its ``parallel``
LOGGED_SIZES: Mapping[str, str] = {"tp": "tp", "pp": "pp", "ep": "ep", "dcp": "dcp", "dp": "dp_attention"}
LOGGED_FIELDS: Mapping[str, str] = {
    **LOGGED_SIZES,
    "is_expert_parallel": "ep",
    "fraction": "fraction",
    "context": "context",
    "max_running_requests": "max_running_requests",
    "kv_dtype": "kv_dtype",
    "role": "role",
    "speculation": "with_mtp",
    "is_eager": "is_eager",
}
# figures that a plan of the same server meets, within so many percent, and what differs where it does not
_SAME_SERVER = {
    "KV bytes per token": (3.0, "another model, KV dtype or row layout: see --kv-dtype and --kv-layout"),
    "weights and copies": (10.0, "another model or scheme: name the checkpoint that was served, or give --to"),
    "free before loading": (5.0, "another GPU: give --gpu, or --gpu-gib"),
}
_OPTIONS = {
    **SIZE_OPTIONS,
    "context": "--context",
    "max_running_requests": "--max-running-requests",
    "kv_dtype": "--kv-dtype",
    "role": "--role",
}


def doubts(rows: Sequence[Comparison]) -> tuple[str, ...]:
    """Where the log is hardly of the server that was planned."""
    return tuple(
        f"{row.name}: planned {row.planned:,.2f} {row.unit}, logged {row.measured:,.2f}: {words}"
        for row in rows
        for percent, words in [_SAME_SERVER.get(row.name, (math.inf, ""))]
        if row.planned is not None and abs(row.difference_percent or 0.0) > percent
    )


def doubts_of_start(log: EngineLog, model: Model, plan: MemoryPlan, given: frozenset[str]) -> tuple[str, ...]:
    """Where what the log says of the server's start is not what was planned."""
    return (*_of_version(log), *_of_options(log, plan.request, given), *_of_context(log, model, given))


def _of_version(log: EngineLog) -> Iterator[str]:
    planned = ENGINE_VERSIONS[log.engine]
    if log.version and log.version != planned:
        title = RULES[log.engine].title
        yield f"the log is of {title} {log.version}, planned is {planned}: rules and defaults may differ"


def _of_options(log: EngineLog, request: MemoryRequest, given: frozenset[str]) -> Iterator[str]:
    options = {**_OPTIONS, "fraction": RULES[log.engine].fraction_option}
    for key, field in LOGGED_FIELDS.items():
        if key not in log.values or field not in given:
            continue
        logged, planned = log.values[key], _planned(log, request, key)
        if _comparable(key, logged.value) != planned:
            value = getattr(request.parallel if field in SIZE_OPTIONS else request, field)
            words = f"{key.removeprefix('is_').replace('_', ' ')} {logged.value}"
            yield f"{options[field]} {value} is planned as given; line {logged.line} of the log says {words}"


def _planned(log: EngineLog, request: MemoryRequest, key: str) -> object:
    """In the log's terms."""
    if key == "tp" and log.engine == "vllm":
        return request.parallel.attention_tp
    if key == "is_expert_parallel":
        return request.parallel.ep > 1
    field = LOGGED_FIELDS[key]
    return getattr(request.parallel if field in SIZE_OPTIONS else request, field)


def _comparable(key: str, value: float | int | str) -> object:
    if key == "kv_dtype":
        return KV_DTYPE_WORDS.get(str(value).lower().removeprefix("torch."), (None, None))[0]
    return True if key == "is_expert_parallel" else value


def _of_context(log: EngineLog, model: Model, given: frozenset[str]) -> Iterator[str]:
    context = log.values.get("context")
    if context is None or "context" in given or not model.max_context or int(context.value) <= model.max_context:
        return
    yield (
        f"line {context.line} of the log says a context of {int(context.value):,} tokens, more than the "
        f"{model.max_context:,} that the model is made for: planned with the model's (another model, or one that was "
        "told to go further)"
    )
