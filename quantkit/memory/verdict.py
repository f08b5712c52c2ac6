"""Whether it fits, as expected and at the worst end of every band, and why."""

import math
from collections.abc import Sequence

from quantkit.memory.budget import FRACTION_OPTIONS
from quantkit.memory.plan import GIB, StagePlan, Verdict
from quantkit.memory.stages import Serving

_LARGEST_PAGE = 64
_RANK = {Verdict.FITS: 0, Verdict.TIGHT: 1, Verdict.DOES_NOT_FIT: 2}
Finding = tuple[Verdict, str]


def judge(
    serving: Serving, stages: Sequence[StagePlan], num_tokens: tuple[int, int, int]
) -> tuple[Verdict, tuple[str, ...]]:
    """The worst finding decides; its likes are the reasons, or what fits is."""
    remedy = _fraction_remedy(serving, stages)
    findings = [finding for stage in stages for finding in _stage_findings(serving, stage, len(stages) > 1, remedy)]
    if all(stage.budget.pool.mid > 0 for stage in stages):
        findings += _demand_findings(serving, stages, num_tokens, remedy)
    findings += _start_findings(serving)
    worst = max((verdict for verdict, _ in findings), key=_RANK.__getitem__, default=Verdict.FITS)
    reasons = tuple(dict.fromkeys(text for verdict, text in findings if verdict is worst))
    return worst, reasons or (_what_fits(serving, num_tokens),)


def _fraction_remedy(serving: Serving, stages: Sequence[StagePlan]) -> str:
    """The fraction from which every stage holds what is asked for, in words; nothing where no fraction does."""
    fractions = [_smallest_fraction(serving, stage) for stage in stages]
    if None in fractions or serving.request.gpu.architecture.is_amd:  # AMD's kernels scale what is given
        return ""
    smallest = max(fraction for fraction in fractions if fraction is not None)
    return f"; from {FRACTION_OPTIONS[serving.request.engine]} {smallest:.3f} on it holds"


def _smallest_fraction(serving: Serving, stage: StagePlan) -> float | None:
    needed_tokens = -(-serving.demand.tokens // _LARGEST_PAGE) * _LARGEST_PAGE
    needed_gib = needed_tokens * float(stage.cell.num_bytes) / GIB
    gpu = serving.request.gpu
    whole_gib = gpu.free_before_load_gib if serving.request.engine == "sglang" else gpu.total_gib
    budget = stage.budget
    # what weights and pool may take grows with the fraction, all else stays
    missing_gib = needed_gib - budget.pool.mid
    fraction = math.ceil((budget.fraction + missing_gib / whole_gib) * 1000) / 1000
    if serving.request.engine == "sglang":
        limit = 1 - budget.overhead.mid / whole_gib
    else:
        limit = gpu.free_before_load_gib / gpu.total_gib
    return fraction if 0 < fraction <= limit else None


def _stage_findings(serving: Serving, stage: StagePlan, has_stages: bool, remedy: str) -> list[Finding]:
    budget, gpu = stage.budget, serving.request.gpu
    where = f"stage {stage.stage.index}: " if has_stages else ""
    option = FRACTION_OPTIONS[serving.request.engine]
    found: list[Finding] = []
    peak_gib = gpu.free_before_load_gib
    if stage.load_peak_gib > peak_gib:
        found.append(
            (
                Verdict.DOES_NOT_FIT,
                f"{where}loading takes {stage.load_peak_gib:.2f} GiB, {stage.load_peak_gib - peak_gib:.2f} GiB more "
                f"than the {peak_gib:.2f} GiB that are free before it",
            )
        )
    loaded_gib = budget.limit_gib - budget.pool.mid
    text = (
        f"{where}weights and what comes with them take {loaded_gib:.2f} GiB of the {budget.limit_gib:.2f} GiB that "
        f"{option} {budget.fraction:.3f} gives them and the KV pool"
    )
    if budget.pool.mid <= 0:
        found.append((Verdict.DOES_NOT_FIT, f"{text}: {-budget.pool.mid:.2f} GiB too much{remedy}"))
    elif budget.pool.low <= 0:
        found.append((Verdict.TIGHT, f"{text}, and at worst {-budget.pool.low:.2f} GiB too much"))
    if budget.spare_gib is not None:
        text = (
            f"{where}overhead is expected to take {budget.overhead.mid:.2f} GiB, at worst {budget.overhead.high:.2f}, "
            f"of the {budget.spare_gib:.2f} GiB that {option} {budget.fraction:.3f} leaves it"
        )
        if budget.overhead.mid > budget.spare_gib:
            found.append((Verdict.DOES_NOT_FIT, text))
        elif budget.overhead.high > budget.spare_gib:
            found.append((Verdict.TIGHT, text))
    return found


def _demand_findings(
    serving: Serving, stages: Sequence[StagePlan], num_tokens: tuple[int, int, int], remedy: str
) -> list[Finding]:
    wanted, (low, mid, _) = serving.demand.tokens, num_tokens
    if not wanted and mid < serving.demand.context:
        text = (
            f"not one request of the model's {serving.demand.context:,} tokens fits: the longest has {mid:,} "
            "(--context says what is to be served)"
        )
        return [(Verdict.TIGHT, text)]
    if low >= wanted:
        return []
    cell_gib = max(float(stage.cell.num_bytes) for stage in stages) / GIB
    what = f"{_requests(serving)} = {wanted:,} tokens are asked for on every rank"
    if mid < wanted:
        missing = wanted - mid
        refusal = ", and vLLM does not start below one request" if serving.request.engine == "vllm" else ""
        text = f"{what}, the pool holds {mid:,}: {missing:,} ({missing * cell_gib:.2f} GiB) too few{refusal}{remedy}"
        return [(Verdict.DOES_NOT_FIT, text)]
    return [(Verdict.TIGHT, f"{what}, the pool is expected to hold {mid:,}, at worst {low:,}")]


def _start_findings(serving: Serving) -> list[Finding]:
    gpu, request = serving.request.gpu, serving.request
    if request.engine != "vllm" or request.fraction is None:
        return []
    requested_gib = gpu.total_gib * request.fraction
    if requested_gib <= gpu.free_before_load_gib:
        return []
    return [
        (
            Verdict.DOES_NOT_FIT,
            f"vLLM refuses to start: --gpu-memory-utilization {request.fraction:g} asks for {requested_gib:.2f} GiB, "
            f"{gpu.free_before_load_gib:.2f} GiB are free",
        )
    ]


def _what_fits(serving: Serving, num_tokens: tuple[int, int, int]) -> str:
    low, mid, high = num_tokens
    demand = serving.demand
    band = "" if low == high else f" ({low:,} to {high:,})"
    text = f"the pool of every rank holds {mid:,} tokens{band}"
    if demand.tokens:
        return f"{text}; {_requests(serving)} = {demand.tokens:,} are asked for"
    return text


def _requests(serving: Serving) -> str:
    demand, replicas = serving.demand, serving.request.parallel.dp_attention
    of_all = f" (of {demand.concurrency} over {replicas} replicas)" if replicas > 1 else ""
    return f"{demand.per_replica}{of_all} x {demand.context:,}"
