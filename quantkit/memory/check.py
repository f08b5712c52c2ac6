"""A plan against an engine's start-up log: what the log decides, and planned, measured, difference."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NoReturn

from quantkit.engines.parallel import MOST_GPUS, Parallel
from quantkit.errors import SourceError, UsageError
from quantkit.memory.budget import GIB
from quantkit.memory.doubts import LOGGED_FIELDS, LOGGED_SIZES, Comparison
from quantkit.memory.engine_log import EngineLog
from quantkit.memory.engine_log_lines import KEYS
from quantkit.memory.gpus import DEFAULT_GPU, Gpu, gpu_named
from quantkit.memory.kv_format import KV_DTYPE_WORDS, POOL_ROLES, KvDtype, KvLayout
from quantkit.memory.make import make_memory_plan
from quantkit.memory.model import Model
from quantkit.memory.plan import MemoryPlan
from quantkit.memory.rules import RULES
from quantkit.memory.serving import MemoryRequest


def plan_of_log(log: EngineLog, model: Model, request: MemoryRequest, given: frozenset[str]) -> MemoryPlan:
    """The plan of the server that wrote the log, as far as ``given`` leaves it open: see ``request_of_log``.

    Raises SourceError where what the log says does not go with the model, UsageError where it does and the options do
    not.
    """
    try:
        return make_memory_plan(model, _possible(log, model, request, given))
    except UsageError as error:
        if _goes_with(log, model):
            raise
        raise SourceError(
            f"with what this log says of the server: {error.message}",
            file=log.file,
            remedy="name the model that was served, or the option that the log has wrong",
        ) from error


def _possible(log: EngineLog, model: Model, request: MemoryRequest, given: frozenset[str]) -> MemoryRequest:
    """``request_of_log`` without what the model does not have."""
    found = request_of_log(log, request, given)
    if not request.with_mtp and not model.num_mtp_layers:  # it speculates with another model
        found = replace(found, with_mtp=False, logged=found.logged - {"with_mtp"})
    if "context" not in given and found.context and model.max_context and found.context > model.max_context:
        # it serves another model, or one that was told to go further
        found = replace(found, context=None, logged=found.logged - {"context"})
    return found


def _goes_with(log: EngineLog, model: Model) -> bool:
    """Whether what the log says of the server can be planned, without any option."""
    plain = MemoryRequest(gpu=gpu_named(DEFAULT_GPU))
    try:
        make_memory_plan(model, _possible(log, model, plain, frozenset()), with_advice=False)
    except UsageError:
        return False
    return True


def request_of_log(log: EngineLog, request: MemoryRequest, given: frozenset[str]) -> MemoryRequest:
    """The request with what the log says of the server; the fields that are ``given`` stay.

    Raises SourceError, with the line, for what no server can have been started with.
    """
    values = {
        key: log.values[key].value for key, field in LOGGED_FIELDS.items() if key in log.values and field not in given
    }
    for key, value in values.items():
        largest = KEYS[key].largest
        if largest is not None and not 0 < float(value) <= largest:
            _fail(log, key, f"{key} {value} is not possible", "pass the log as the server wrote it")
    if "engine" in given and request.engine != log.engine:
        raise UsageError(f"the log is {log.engine}'s, --engine says {request.engine}", remedy="leave --engine out")
    found = replace(request, engine=log.engine, parallel=_logged_sizes(log, values, request.parallel))
    logged = {LOGGED_FIELDS[key] for key in values} - {"max_running_requests", "kv_dtype"}
    if "fraction" in values:
        found = replace(found, fraction=float(values["fraction"]))
    if "context" in values:
        found = replace(found, context=int(values["context"]))
    # the number is a replica's where the server chose it, and the server's where it was told
    is_told = "max_running_requests" in values and found.parallel.dp_attention == 1
    if is_told and RULES[log.engine].takes_max_running_requests:
        found = replace(found, max_running_requests=int(values["max_running_requests"]))
        logged.add("max_running_requests")
    if "kv_dtype" in values:
        dtype, layout = _logged_kv_dtype(log)
        taken = {"kv_dtype": dtype, "kv_layout": None if found.kv_layout else layout}
        logged |= {field for field, value in taken.items() if value is not None}
        found = replace(found, kv_dtype=dtype, kv_layout=found.kv_layout or layout)
    return replace(
        found,
        role=next((role for role in POOL_ROLES if role == values.get("role")), found.role),
        with_mtp=found.with_mtp or _has_draft_layer(str(values.get("speculation", ""))),
        is_eager=found.is_eager or "is_eager" in values,
        logged=frozenset(logged),
    )


def _logged_sizes(log: EngineLog, values: Mapping[str, float | int | str], parallel: Parallel) -> Parallel:
    logged = {size: int(values[key]) for key, size in LOGGED_SIZES.items() if key in values}
    if log.engine == "vllm" and "tp" in logged:  # its tensor parallel size is that of one replica
        replicas = logged.get("dp_attention", parallel.dp_attention)
        if logged["tp"] * replicas > MOST_GPUS:
            _fail(
                log,
                "tp",
                f"tp {logged['tp']} of {replicas} replicas is not possible",
                "pass the log as the server wrote it",
            )
        logged["tp"] *= replicas
    found = replace(parallel, **logged)
    # vLLM deals experts out to all ranks, however many the command line makes of them
    return replace(found, ep=found.tp) if "is_expert_parallel" in values else found


def _logged_kv_dtype(log: EngineLog) -> tuple[KvDtype | None, KvLayout | None]:
    name = str(log.values["kv_dtype"].value).lower().removeprefix("torch.")
    if name not in KV_DTYPE_WORDS:
        _fail(log, "kv_dtype", f"the KV dtype {name} is none that is planned", "give --kv-dtype bf16 or fp8")
    return KV_DTYPE_WORDS[name]


def _fail(log: EngineLog, key: str, message: str, remedy: str) -> NoReturn:
    raise SourceError(f"line {log.values[key].line}: {message}", file=log.file, remedy=remedy)


def _has_draft_layer(speculation: str) -> bool:
    """Whether a way of speculation runs the model's own MTP layer, as far as its name tells."""
    return bool(speculation) and not any(word in speculation.lower() for word in ("ngram", "suffix", "standalone"))


def model_of_log(log: EngineLog) -> str:
    """What the server calls the model that it serves; nothing where the log does not say."""
    return str(log.values["model"].value) if "model" in log.values else ""


def compare_with_log(plan: MemoryPlan, log: EngineLog) -> tuple[Comparison, ...]:
    """Every figure that the log has, by the stage that has the least room."""
    return tuple(
        Comparison(
            name=name, unit=unit, planned=planned, measured=float(log.values[key].value), line=log.values[key].line
        )
        for key, name, unit, planned in _planned(plan)
        if key in log.values
    ) + tuple(_derived(plan, log))


def _planned(plan: MemoryPlan) -> Iterator[tuple[str, str, str, float | None]]:
    stage = plan.tightest
    gpu: Gpu = plan.request.gpu
    yield "weights_gib", "weights and copies", "GiB", stage.weights_gib + stage.copies_gib
    yield "free_before_load_gib", "free before loading", "GiB", gpu.free_before_load_gib
    yield "free_after_load_gib", "free after loading", "GiB", gpu.free_before_load_gib - stage.loaded.mid
    yield "kv_pool_gib", "KV pool", "GiB", stage.budget.pool.mid
    yield "kv_tokens", "KV tokens", "tokens", plan.num_tokens.mid / _rows_per_token(plan)
    yield "fraction", "fraction", "", stage.budget.fraction
    yield "graph_gib", "CUDA graphs", "GiB", None


def _rows_per_token(plan: MemoryPlan) -> int:
    """A row of a rank stands for several tokens with DCP; engines log the one or the other."""
    return plan.request.parallel.dcp if RULES[plan.request.engine].logs_local_rows else 1


def _derived(plan: MemoryPlan, log: EngineLog) -> Iterator[Comparison]:
    if "kv_pool_gib" not in log.values or not log.values.get("kv_tokens"):
        return
    pool, tokens = log.values["kv_pool_gib"], log.values["kv_tokens"]
    if not float(tokens.value):
        return
    stage = plan.tightest
    yield Comparison(
        name="KV bytes per token",
        unit="B",
        planned=float(stage.cell.num_bytes) * _rows_per_token(plan),
        measured=float(pool.value) * GIB / float(tokens.value),
        line=tokens.line,
    )
