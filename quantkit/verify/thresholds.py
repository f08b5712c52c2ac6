"""Is the relative error of every quantized weight at the level that INT4 has?

On Gaussian weights the search gives 0.082, 0.091 and 0.098 in groups of 32, 64 and 128. A wrong scale, a wrong
packing or raw codes taken for weights show as 0.3 to thousands.

A search that importance weights gives up plain error for weighed error. On Gaussian weights it gives 0.084, 0.092 and
0.100 where moments are log-normal with a sigma of 1, 0.095, 0.100 and 0.128 with 4, and 0.114, 0.116 and 0.137 where
one channel of each group has it all: 1.4 times as much at most, of Student t (5) and Laplace weights, too.
"""

from collections.abc import Iterable, Iterator

from quantkit.integrity.weight_errors import ClassError, WeightError
from quantkit.recipe import Recipe
from quantkit.verify.report import Finding

MAX_RELATIVE_ERROR = {32: 0.16, 64: 0.18, 128: 0.20}
MORE_BY_METHOD = {"search": 1.0, "gptq": 2.0, "awq": 1.0}
"""GPTQ gives up closeness of weights whose inputs are small, for outputs that are closer."""
WARN_ABOVE_MEDIAN = 1.3
IMPORTANCE_FACTOR = 1.4  # by which the threshold is wider for a weighted search


def check_errors(
    errors: Iterable[WeightError], classes: Iterable[ClassError], recipe: Recipe, *, has_importance: bool = False
) -> Iterator[Finding]:
    """An error for each weight above the threshold, a warning above 1.3 times the median of its class.

    Not the latter of GPTQ, whose errors follow the inputs of each module.
    """
    group_size = recipe.group_size
    more = max(MORE_BY_METHOD[recipe.method], IMPORTANCE_FACTOR if has_importance else 1)
    threshold = round(MAX_RELATIVE_ERROR[group_size] * more, 3)
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
