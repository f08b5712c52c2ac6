"""What a launch adds: how many GPUs share a checkpoint, which backend moves tokens, which flags it needs."""

from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.engines.parallel import EngineName, Parallel
from quantkit.engines.schemes import Scheme, Section, expert_kind
from quantkit.engines.sglang import fuses_shared_experts
from quantkit.engines.tensor_parallel import Storage, split_verdict
from quantkit.engines.verdicts import ModuleVerdict, Outcome
from quantkit.families.config_values import Config, integer
from quantkit.families.family import Family

BACKENDS = ("none", "deepep", "mooncake", "nixl", "mori", "pplx")
NO_FUSION = "--disable-shared-experts-fusion"
_MARLIN_ROWS = 64  # of gate and up together, which repacking needs whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """``parallel`` is None where it is not known yet; ``backend``: what carries tokens between ranks of experts;
    ``flags``: of the server, as far as they matter here.
    """

    engine: EngineName
    parallel: Parallel | None = None
    backend: str = "none"
    flags: tuple[str, ...] = ()


def launch_verdicts(
    family: Family, config: Config, section: Section, experts: Scheme | None, launch: Launch
) -> Iterator[ModuleVerdict]:
    """``experts``: what the routed experts are stored as, None where the config does not quantize them."""
    if launch.parallel is not None:
        yield from _split_verdicts(family, config, section, experts, launch.engine, launch.parallel)
    if launch.engine == "sglang" and experts is not None:  # else both kinds of expert are plain, and fuse well
        yield from _fusion_verdicts(family, config, section, launch)
    if launch.backend != "none":
        yield from _backend_verdicts(section, experts, launch)


def _split_verdicts(
    family: Family,
    config: Config,
    section: Section,
    experts: Scheme | None,
    engine: EngineName,
    parallel: Parallel,
) -> Iterator[ModuleVerdict]:
    if experts is not None and experts.is_int4 and engine == "sglang":
        found = _floored(family, config, experts, parallel)
        if found is not None:
            yield found
            return
    verdict = split_verdict(
        family=family,
        config=config,
        parallel=parallel,
        storage=_storage(section, experts),
        engine=engine,
    )
    if verdict.status != "ok":
        outcome = Outcome.REFUSED if verdict.status == "refused" else Outcome.UNKNOWN
        remedy = "choose another --tp or --ep; quantkit plan lists the legal sizes"
        yield ModuleVerdict(module=f"TP {parallel.tp}", outcome=outcome, message=verdict.reason, remedy=remedy)


def _floored(family: Family, config: Config, experts: Scheme, parallel: Parallel) -> ModuleVerdict | None:
    """SGLang floors the number of groups of a rank, on both sides of the copy: what does not divide still loads."""
    width, group = family.moe_width(config), experts.group_size
    ways = parallel.tp // parallel.ep if parallel.tp % parallel.ep == 0 else 0
    if not width or group is None or not ways or width % ways or (width // ways) % group == 0:
        return None
    columns = width // ways
    where = f"down_proj has {width} / {ways} = {columns} columns per rank"
    if 2 * columns % _MARLIN_ROWS:
        outcome, what = Outcome.REFUSED, f"repacking stops: 2 * {columns} rows are not whole tiles of {_MARLIN_ROWS}"
    elif columns // group <= 1:
        outcome, what = Outcome.SILENT, f"a rank reads its columns as one group, and their scales are of {group}"
    else:
        outcome, what = Outcome.REFUSED, f"the first forward pass stops: {columns} is no multiple of {group}"
    remedy = f"--ep-size {parallel.tp} deals whole experts out, or convert with a --group-size that divides {columns}"
    return ModuleVerdict(module=f"TP {parallel.tp}", outcome=outcome, message=f"{where}: {what}", remedy=remedy)


def _storage(section: Section, experts: Scheme | None) -> Storage:
    blocks = [scheme.block for scheme in section.schemes if scheme.block is not None]
    has_native = section.has_native_linears or section.method == "w4afp8"
    group_size = 128 if section.method == "w4afp8" else None
    if experts is not None and not experts.is_float:
        group_size = experts.group_size
    return Storage(
        group_size=group_size,
        kind=expert_kind(section, experts),
        expert_block=experts.block[0] if experts is not None and experts.block is not None else None,
        rest_block=128 if has_native else blocks[0][0] if blocks else None,
    )


def _fusion_verdicts(family: Family, config: Config, section: Section, launch: Launch) -> Iterator[ModuleVerdict]:
    text = family.text_config(config)
    num_shared = integer(text, "n_shared_experts", 0)
    fuses = fuses_shared_experts(
        family.name,
        family.num_experts(config),
        num_shared,
        section,
        ep=1 if launch.parallel is None else launch.parallel.ep,
    )
    if fuses and launch.backend == "none" and NO_FUSION not in launch.flags:
        yield ModuleVerdict(
            module="mlp.shared_experts",
            outcome=Outcome.FLAG,
            message="the shared expert is taken for one more routed one, whose tensors have other names: it is dropped "
            "in silence",
            remedy=f"start the server with {NO_FUSION}",
        )


def _backend_verdicts(section: Section, experts: Scheme | None, launch: Launch) -> Iterator[ModuleVerdict]:
    """Only FP8 blocks, BF16 and w4afp8 have a kernel there, in SGLang; vLLM's are not stated here."""
    if launch.engine == "vllm":
        message = f"what vLLM does with {launch.backend} is not stated here"
        yield ModuleVerdict(module="mlp.experts", outcome=Outcome.UNKNOWN, message=message)
    if launch.engine == "sglang" and experts is not None and experts.is_int4 and section.method != "w4afp8":
        yield ModuleVerdict(
            module="mlp.experts",
            outcome=Outcome.REFUSED,
            scheme=str(experts),
            message=f"{launch.backend} builds and loads, and the first forward pass ends with an assertion",
            remedy="leave the backend out and use --ep-size, or convert with --format w4afp8",
        )
