"""Whether it fits, as expected and at the worst end of every band, and why."""

import math
from collections.abc import Sequence

from quantkit.memory.budget import GIB
from quantkit.memory.engine_rules import EngineRules
from quantkit.memory.plan import StagePlan, Tokens, Verdict
from quantkit.memory.serving import Serving

Finding = tuple[Verdict, str]
_NOTHING_ASKED = "nothing was asked for (--context says what must fit)"


def judge(
    serving: Serving, stages: Sequence[StagePlan], num_tokens: Tokens, rules: EngineRules
) -> tuple[Verdict, tuple[str, ...]]:
    """The worst finding decides; its likes are the reasons, or what fits is."""
    remedy = _fraction_remedy(serving, stages, rules)
    found_on: dict[Finding, list[int]] = {}
    for stage in stages:
        for finding in _stage_findings(serving, stage, rules, remedy):
            found_on.setdefault(finding, []).append(stage.stage.index)
    findings = [
        (verdict, f"{_stages(indices)}: {text}" if len(stages) > 1 else text)
        for (verdict, text), indices in found_on.items()
    ]
    if all(stage.budget.pool.mid > 0 for stage in stages):
        findings += _demand_findings(serving, stages, num_tokens, remedy, rules)
    findings += _start_findings(serving, stages, rules)
    findings += ((Verdict.TIGHT, text) for text in rules.doubts(serving))
    worst = max((verdict for verdict, _ in findings), key=lambda verdict: verdict.severity, default=Verdict.FITS)
    reasons = tuple(dict.fromkeys(text for verdict, text in findings if verdict is worst))
    return worst, reasons or (_what_fits(serving, num_tokens),)


def _stages(indices: Sequence[int]) -> str:
    """In words, runs of them from the first to the last; ``indices`` rise."""
    found = set(indices)
    firsts = [one for one in indices if one - 1 not in found]
    lasts = [one for one in indices if one + 1 not in found]
    runs = (str(first) if first == last else f"{first}-{last}" for first, last in zip(firsts, lasts, strict=True))
    return f"{'stage' if len(indices) == 1 else 'stages'} {', '.join(runs)}"


def _fraction_remedy(serving: Serving, stages: Sequence[StagePlan], rules: EngineRules) -> str:
    """The fraction from which every stage holds what is asked for, in words; nothing where no fraction does."""
    fractions = [_smallest_fraction(serving, stage, rules.page_tokens(serving)) for stage in stages]
    if None in fractions or any(stage.budget.scales_fraction for stage in stages):
        return ""
    smallest = max(fraction for fraction in fractions if fraction is not None)
    return f"; from {rules.fraction_option} {smallest:.3f} on it holds"


def _smallest_fraction(serving: Serving, stage: StagePlan, page_tokens: int) -> float | None:
    needed_tokens = -(-serving.demand.tokens // page_tokens) * page_tokens
    needed_gib = needed_tokens * float(stage.cell.num_bytes) / GIB
    budget = stage.budget
    # what weights and pool may take grows with the fraction, all else stays
    missing_gib = needed_gib - budget.pool.mid
    fraction = math.ceil((budget.fraction + missing_gib / budget.whole_gib) * 1000) / 1000
    return fraction if 0 < fraction <= budget.largest_fraction else None


def _stage_findings(serving: Serving, stage: StagePlan, rules: EngineRules, remedy: str) -> list[Finding]:
    budget, gpu = stage.budget, serving.gpu
    option = rules.fraction_option
    found: list[Finding] = []
    peak_gib = gpu.free_before_load_gib
    if stage.load_peak_gib > peak_gib:
        found.append(
            (
                Verdict.DOES_NOT_FIT,
                f"loading takes {stage.load_peak_gib:.2f} GiB, {stage.load_peak_gib - peak_gib:.2f} GiB more "
                f"than the {peak_gib:.2f} GiB that are free before it",
            )
        )
    loaded_gib = budget.limit_gib - budget.pool.mid
    text = (
        f"weights and what comes with them take {loaded_gib:.2f} GiB of the {budget.limit_gib:.2f} GiB that "
        f"{option} {budget.fraction:.3f} gives them and the KV pool"
    )
    if budget.pool.mid <= 0:
        found.append((Verdict.DOES_NOT_FIT, f"{text}: {-budget.pool.mid:.2f} GiB too much{remedy}"))
    elif budget.pool.low <= 0:
        found.append((Verdict.TIGHT, f"{text}, and at worst {-budget.pool.low:.2f} GiB too much"))
    if budget.spare_gib is not None:
        text = (
            f"overhead is expected to take {budget.overhead.mid:.2f} GiB, at worst {budget.overhead.high:.2f}, "
            f"of the {budget.spare_gib:.2f} GiB that {option} {budget.fraction:.3f} leaves it"
        )
        if budget.overhead.mid > budget.spare_gib:
            found.append((Verdict.DOES_NOT_FIT, text))
        elif budget.overhead.high > budget.spare_gib:
            found.append((Verdict.TIGHT, text))
    return found


def _demand_findings(
    serving: Serving, stages: Sequence[StagePlan], num_tokens: Tokens, remedy: str, rules: EngineRules
) -> list[Finding]:
    wanted, (low, mid, _) = serving.demand.tokens, num_tokens
    if not wanted:
        return _start_demand_findings(serving.demand.context, num_tokens)
    if low >= wanted:
        return []
    cell_gib = max(float(stage.cell.num_bytes) for stage in stages) / GIB
    if serving.request.asks_for_nothing:
        what = f"{_NOTHING_ASKED}; {rules.title} wants {_requests(serving)} = {wanted:,} tokens on every rank to start"
    else:
        what = f"{_requests(serving)} = {wanted:,} tokens are asked for on every rank"
    if mid < wanted:
        missing = wanted - mid
        refusal = f", and {rules.title} does not start below one request" if rules.refuses_below_one_request else ""
        text = f"{what}, the pool holds {mid:,}: {missing:,} ({missing * cell_gib:.2f} GiB) too few{refusal}{remedy}"
        return [(Verdict.DOES_NOT_FIT, text)]
    return [(Verdict.TIGHT, f"{what}, the pool is expected to hold {mid:,}, at worst {low:,}")]


def _start_demand_findings(context: int, num_tokens: Tokens) -> list[Finding]:
    """Nothing was asked for, and the engine starts with any pool: one below a request of the model's context is tight,
    never a failure."""
    low, mid, _ = num_tokens
    if low >= context:
        return []
    worst = "" if mid < context else f", at worst {low:,}"
    text = (
        f"{_NOTHING_ASKED}; the server starts, and its pool holds {mid:,} tokens{worst}: less than one request of the "
        f"model's {context:,}"
    )
    return [(Verdict.TIGHT, text)]


def _start_findings(serving: Serving, stages: Sequence[StagePlan], rules: EngineRules) -> list[Finding]:
    """A share that is not free where the fraction is one of the whole GPU."""
    budget, gpu = stages[0].budget, serving.gpu
    if budget.spare_gib is not None or budget.limit_gib <= gpu.free_before_load_gib:
        return []
    text = (
        f"{rules.title} refuses to start: {rules.fraction_option} {budget.fraction:g} asks for {budget.limit_gib:.2f} "
        f"GiB, {gpu.free_before_load_gib:.2f} GiB are free"
    )
    return [(Verdict.DOES_NOT_FIT, text)]


def _what_fits(serving: Serving, num_tokens: Tokens) -> str:
    low, mid, high = num_tokens
    demand = serving.demand
    if serving.request.asks_for_nothing:
        asked = _NOTHING_ASKED
    else:
        asked = f"{_requests(serving)} = {demand.tokens:,} are asked for"
    band = "" if low == high else f" ({low:,} to {high:,})"
    return f"the pool of every rank holds {mid:,} tokens{band}; {asked}"


def _requests(serving: Serving) -> str:
    request, demand, replicas = serving.request, serving.demand, serving.parallel.dp_attention
    of_all = f" (of {demand.concurrency} over {replicas} replicas)" if replicas > 1 else ""
    whose = ""
    if request.context is None and request.concurrency is not None:
        whose = " (the model's full context: --context was not given)"
    return f"{demand.per_replica}{of_all} x {demand.context:,}{whose}"
