"""From options to memory plans: one, two to compare, or one for every recipe."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.cli.memory_options import MemoryOptions
from quantkit.engines.parallel import DEFAULT_ENGINE, ENGINES, EngineName, Parallel
from quantkit.errors import QuantkitError, UsageError
from quantkit.memory.check import compare_with_log, model_of_log, plan_of_log
from quantkit.memory.doubts import Comparison, doubts, doubts_of_start
from quantkit.memory.engine_log import read_engine_log
from quantkit.memory.gpus import DEFAULT_GPU, gpu_named
from quantkit.memory.kv_format import KV_DTYPE_WORDS, POOL_ROLES, KvDtype, KvLayout
from quantkit.memory.make import check_fraction, make_memory_plan
from quantkit.memory.model import Model
from quantkit.memory.plan import MemoryPlan
from quantkit.memory.resolve import recipe_model
from quantkit.memory.rules import RULES
from quantkit.memory.scheme import FORMATS, GROUP_SIZES, RESTS, Format, Scheme
from quantkit.memory.serving import MemoryRequest
from quantkit.memory.split import check_sizes
from quantkit.recipe_files import recipe_summaries
from quantkit.registry import one_of

_MOST = 10**9  # tokens, requests


@dataclass(frozen=True, kw_only=True)
class OverviewRow:
    """A recipe with its plans as published and as INT4; ``problem`` where it cannot be served so."""

    recipe: str
    published: MemoryPlan | None
    int4: MemoryPlan | None
    problem: str = ""


def with_context(options: MemoryOptions, model: Model) -> MemoryOptions:
    """``context_at_most`` turned into the context that it means for this model."""
    most = options.context_at_most
    if most is None:
        return options
    if options.context is not None:
        raise UsageError("--context and --context-at-most say the same thing", remedy="leave one of them out")
    check_options(options)
    return replace(options, context=min(most, model.max_context or most))


def request_of(options: MemoryOptions, model: Model, scheme: str | None) -> MemoryRequest:
    """A request; ``scheme`` is one word of --scheme or --compare. Raises UsageError for words that are not known."""
    check_options(options)
    engine = engine_of(options)
    kv_dtype, kv_layout = _kv_of(options)
    return MemoryRequest(
        gpu=gpu_named(options.gpu or DEFAULT_GPU, total_gib=options.gpu_gib),
        engine=engine,
        parallel=parallel_of(options),
        scheme=scheme_of_words(options, model, scheme),
        fraction=fraction_of(options, engine),
        kv_dtype=kv_dtype,
        kv_layout=kv_layout,
        role=next(role for role in POOL_ROLES if role == (options.role or "both")),
        with_mtp=options.with_mtp,
        is_eager=options.enforce_eager,
        context=options.context,
        concurrency=options.concurrency,
        max_running_requests=options.max_running_requests,
    )


def engine_of(options: MemoryOptions) -> EngineName:
    """As asked for, or the default; the word has been checked."""
    return next(name for name in ENGINES if name == (options.engine or DEFAULT_ENGINE))


def fraction_of(options: MemoryOptions, engine: EngineName) -> float | None:
    """By the name that the engine has for it."""
    return {
        "--mem-fraction-static": options.mem_fraction_static,
        "--gpu-memory-utilization": options.gpu_memory_utilization,
    }[RULES[engine].fraction_option]


def _kv_of(options: MemoryOptions) -> tuple[KvDtype | None, KvLayout | None]:
    """A dtype's word may tell the layout too."""
    dtype, layout = (None, None) if options.kv_dtype is None else KV_DTYPE_WORDS[options.kv_dtype]
    given = None if options.kv_layout is None else KvLayout(options.kv_layout)
    if layout is not None and given not in (None, layout):
        raise UsageError(
            f"--kv-dtype {options.kv_dtype} has {layout} rows, --kv-layout says {given}",
            remedy="leave --kv-layout out",
        )
    return dtype, given or layout


def parallel_of(options: MemoryOptions) -> Parallel:
    """The sizes that were given, and the defaults of the others."""
    names = ("tp", "ep", "pp", "dp_attention", "dcp")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return Parallel(**given)


def scheme_of_words(options: MemoryOptions, model: Model, word: str | None) -> Scheme | None:
    """None: as the model is stored."""
    if word is None:
        if options.group_size is not None or options.rest is not None:
            raise UsageError("--group-size and --rest speak of INT4", remedy="add --to int4")
        return None
    experts: Format = next(name for name in FORMATS if name == word)
    if experts != "int4":
        if options.group_size is not None or options.rest is not None:
            raise UsageError(f"--group-size and --rest speak of INT4, not of {word}", remedy="leave them out")
        return Scheme(experts=experts, rest="fp8" if experts == "fp8" else "bf16")
    own = model.scheme
    rest = options.rest or (own.rest if own.experts == "int4" else "bf16")
    group_size = options.group_size or own.group_size or model.int4_group_size
    return Scheme(experts="int4", rest=next(one for one in RESTS if one == rest), group_size=group_size)


def plan_one(options: MemoryOptions, model: Model) -> MemoryPlan:
    """The plan that the options ask for."""
    return make_memory_plan(model, request_of(options, model, options.scheme))


def plan_comparison(options: MemoryOptions, model: Model, words: str) -> tuple[MemoryPlan, MemoryPlan]:
    """Two plans that differ in their scheme."""
    schemes = [word.strip().lower() for word in words.split(",")]
    if len(schemes) != 2 or not set(schemes) <= set(FORMATS):
        raise UsageError(f"--compare {words!r} is no pair of schemes", remedy=f"give two of {', '.join(FORMATS)}")
    if schemes[0] == schemes[1]:
        raise UsageError(f"--compare {words} compares a scheme with itself", remedy="give two that differ")
    if options.scheme is not None:
        raise UsageError("--compare and --scheme say the same thing", remedy="leave one of them out")
    # --group-size and --rest speak of the INT4 side
    plain = replace(options, group_size=None, rest=None) if "int4" in schemes else options
    first, second = (
        make_memory_plan(model, request_of(options if scheme == "int4" else plain, model, scheme)) for scheme in schemes
    )
    return first, second


@dataclass(frozen=True, kw_only=True)
class CheckedPlan:
    """The plan of the server that wrote a log, and both side by side; ``log_model``: the name that it logged.

    ``doubts``: why the log may be of another server.
    """

    plan: MemoryPlan
    log_model: str
    rows: tuple[Comparison, ...]
    doubts: tuple[str, ...]


def plan_checked(options: MemoryOptions, model: Model, log_path: Path) -> CheckedPlan:
    """The log tells what the options leave open: engine, sizes, fraction, context, KV dtype, role, speculation."""
    log = read_engine_log(log_path)
    names = ("tp", "ep", "pp", "dp_attention", "dcp", "engine", "role", "kv_dtype", "context", "max_running_requests")
    given = {name for name in names if getattr(options, name) is not None}
    if options.mem_fraction_static is not None or options.gpu_memory_utilization is not None:
        given.add("fraction")
    request = request_of(replace(options, engine=options.engine or log.engine), model, options.scheme)
    plan = plan_of_log(log, model, request, frozenset(given))
    rows = compare_with_log(plan, log)
    return CheckedPlan(
        plan=plan,
        log_model=model_of_log(log),
        rows=rows,
        doubts=(*doubts_of_start(log, model, plan, frozenset(given)), *doubts(rows)),
    )


def plan_overview(options: MemoryOptions) -> tuple[OverviewRow, ...]:
    """Every shipped recipe, as published and as INT4."""
    rows = []
    check_options(options)  # mistakes are the user's and not a recipe's
    gpu_named(options.gpu or DEFAULT_GPU, total_gib=options.gpu_gib)
    check_sizes(parallel_of(options))
    for summary in recipe_summaries():
        model = recipe_model(summary.name)
        plans: dict[str, MemoryPlan | None] = {"published": None, "int4": None}
        problem = ""
        for key, scheme in (("published", None), ("int4", "int4")):
            words = replace(options, scheme=scheme) if scheme else replace(options, group_size=None, rest=None)
            try:
                plans[key] = make_memory_plan(model, request_of(words, model, scheme), with_advice=False)
            except QuantkitError as error:  # shown in its row
                problem = error.message
        rows.append(OverviewRow(recipe=summary.name, published=plans["published"], int4=plans["int4"], problem=problem))
    return tuple(rows)


def check_options(options: MemoryOptions) -> None:
    """Raise UsageError for words and counts that are none, and for options of another engine."""
    known: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
        "--scheme": (options.scheme, FORMATS),
        "--rest": (options.rest, RESTS),
        "--engine": (options.engine, ENGINES),
        "--role": (options.role, POOL_ROLES),
        "--kv-dtype": (options.kv_dtype, tuple(KV_DTYPE_WORDS)),
        "--kv-layout": (options.kv_layout, tuple(KvLayout)),
        "--group-size": (options.group_size, GROUP_SIZES),
    }
    for option, (value, words) in known.items():
        if value is not None:
            one_of(option, value, words)
    counts = {
        "--context": options.context,
        "--context-at-most": options.context_at_most,
        "--concurrency": options.concurrency,
        "--max-running-requests": options.max_running_requests,
    }
    for option, count in counts.items():
        if count is not None and not 1 <= count <= _MOST:
            raise UsageError(
                f"{option} {count if count < 10**12 else f'{count:.3g}'} is no count",
                remedy=f"give a number from 1 to {_MOST:,}",
            )
    engine = engine_of(options)
    if options.role not in (None, "both") and not RULES[engine].has_pool_roles:
        raise UsageError(f"--role is not known for {engine}", remedy="leave --role out")
    for other in ENGINES:
        if other != engine and fraction_of(options, other) is not None:
            raise UsageError(f"{RULES[other].fraction_option} is an option of {other}", remedy=f"add --engine {other}")
    check_fraction(engine, fraction_of(options, engine))
    if options.max_running_requests is not None and not RULES[engine].takes_max_running_requests:
        taker = next(name for name in ENGINES if RULES[name].takes_max_running_requests)
        raise UsageError(f"--max-running-requests is an option of {taker}", remedy=f"add --engine {taker}")
