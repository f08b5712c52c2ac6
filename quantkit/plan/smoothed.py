"""AWQ moves numbers between the rows of ``up_proj`` and the columns of ``down_proj``: which weights it changes.

No other module notices: the gate's output is multiplied with that of up, and goes through down. Between norms and what
follows them AWQ would change the router's input as well, and norms that stay; so that is left out.
"""

from collections.abc import MutableSequence
from dataclasses import replace

from quantkit.codecs.int4_group import Int4Group
from quantkit.errors import RecipeError
from quantkit.plan.mtp import is_in
from quantkit.plan.plan import Action, Job
from quantkit.recipe import Recipe

UP, DOWN = "up_proj", "down_proj"


def mark_smoothed(jobs: MutableSequence[Job], recipe: Recipe, drafts: range) -> None:
    """The weights that AWQ changes, outside ``drafts``, which are not run.

    Raises RecipeError where one of a pair is not INT4, and where there is none.
    """
    if recipe.method != "awq":
        return
    by_module = {job.weight.module: index for index, job in enumerate(jobs) if job.action == Action.INT4}
    num_pairs = 0
    for module, index in by_module.items():
        parent, _, leaf = module.rpartition(".")
        if leaf not in (UP, DOWN) or is_in(drafts, module):
            continue
        if f"{parent}.{DOWN if leaf == UP else UP}" not in by_module:
            raise RecipeError(
                f"--method awq changes {UP} and {DOWN} together, and the other one is not INT4",
                tensor=module,
                remedy="make both INT4 or none with --targets and --ignore, or choose another --method",
            )
        scheme = jobs[index].scheme
        assert scheme is not None
        jobs[index] = jobs[index]._replace(scheme=_smoothed(scheme, leaf))
        num_pairs += leaf == UP
    if not num_pairs:
        raise RecipeError(
            f"--method awq needs {UP} and {DOWN} that become INT4, and there are none",
            remedy="choose --method gptq, or other --targets",
        )


def _smoothed(scheme: Int4Group, leaf: str) -> Int4Group:
    return replace(scheme, smoothed="rows" if leaf == UP else "columns")
