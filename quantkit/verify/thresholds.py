"""Is the relative error of every quantized weight at the level that INT4 has?

On Gaussian weights the search gives 0.082, 0.091 and 0.098 in groups of 32, 64 and 128. A wrong scale, a wrong
packing or raw codes taken for weights show as 0.3 to thousands.
"""

from collections.abc import Iterable, Iterator

from quantkit.integrity.weight_errors import ClassError, WeightError
from quantkit.recipe import Recipe
from quantkit.verify.report import Finding

MAX_RELATIVE_ERROR = {32: 0.16, 64: 0.18, 128: 0.20}
MORE_BY_METHOD = {"search": 1.0, "gptq": 2.0, "awq": 1.0}
"""GPTQ gives up closeness of weights whose inputs are small, for outputs that are closer."""
WARN_ABOVE_MEDIAN = 1.3


def check_errors(errors: Iterable[WeightError], classes: Iterable[ClassError], recipe: Recipe) -> Iterator[Finding]:
    """An error for each weight above the threshold, a warning above 1.3 times the median of its class.

    Not the latter of GPTQ, whose errors follow the inputs of each module.
    """
    group_size = recipe.group_size
    threshold = MAX_RELATIVE_ERROR[group_size] * MORE_BY_METHOD[recipe.method]
    medians = {one.role: one.median for one in classes}
    for error in errors:
        if not error.relative <= threshold:
            yield Finding(
                check="relative error",
                message=f"relative error {error.relative:.4f} is above {threshold} (group {group_size})",
                tensor=error.name,
                remedy="its scale or its values are not what INT4 can hold; look at this tensor in the source",
            )
        elif recipe.method != "gptq" and error.relative > WARN_ABOVE_MEDIAN * medians[error.role] > 0:
            yield Finding(
                check="relative error",
                message=f"relative error {error.relative:.4f} is above {WARN_ABOVE_MEDIAN} times the median of "
                f"{error.role} ({medians[error.role]:.4f})",
                is_error=False,
                tensor=error.name,
            )
