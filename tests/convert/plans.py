"""Plans of directories, as the command line makes them."""

from pathlib import Path
from typing import Any

from quantkit.plan.make import make_plan
from quantkit.plan.plan import Plan
from quantkit.recipe import override
from quantkit.sources import resolve_source


def plan_of(source: Path, *, allow_incomplete: bool = False, **changes: Any) -> Plan:
    resolved = resolve_source(str(source))
    recipe = override(resolved.recipe, **changes)
    return make_plan(recipe, resolved.family, resolved.checkpoint, allow_incomplete=allow_incomplete)
