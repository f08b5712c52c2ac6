"""Whether GPTQ had tokens enough: more of them than its weights have columns, for every expert."""

from pathlib import Path

from quantkit.calibrated.modules import chosen_shapes
from quantkit.calibrated.needs import calibration_needs
from quantkit.gptq.factor import PRIOR_TOKENS
from quantkit.gptq.stream import expert_tokens
from quantkit.module_names import expert_of
from quantkit.plan.plan import Plan


def few_tokens(plan: Plan, num_tokens: int, directory: Path) -> tuple[str, ...]:
    """Warnings. ``directory``: of the words, and of what their experts saw."""
    calibration = plan.recipe.calibration
    assert calibration is not None
    (needs,) = calibration_needs(plan, streaming=calibration.streaming)
    wanted = needs.wanted_tokens or 0
    found = []
    if num_tokens < wanted:
        told = f"{num_tokens:,} tokens are few: --method {plan.recipe.method} wants {wanted:,} of this model"
        found.append(f"{told}, and fits its codes to those that it has")
    shapes = chosen_shapes(plan)
    width = max((num_cols for name, (_, num_cols) in shapes.items() if expert_of(name)), default=0)
    seen = expert_tokens(directory)
    few, median = [count for count in seen if count < width], sorted(seen)[len(seen) // 2] if seen else 0
    if few:
        found.append(
            f"{len(few):,} of {len(seen):,} experts saw fewer than {width:,} tokens (channels of their widest "
            f"input; {few.count(0):,} none, the median of all {median:,}): they lean on what their "
            f"whole layer sees, as if {PRIOR_TOKENS} of its tokens had chosen each, too"
        )
    return tuple(found)
