"""Shows memory plans as text, as JSON, and as an HTML page."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.cli import memory_documents as documents
from quantkit.cli import render
from quantkit.cli.memory_options import MemoryOptions
from quantkit.cli.memory_page import PAGE_BEGIN, memory_page
from quantkit.cli.memory_request import (
    plan_checked,
    plan_comparison,
    plan_one,
    plan_overview,
    with_context,
)
from quantkit.cli.memory_text import show_check, show_comparison, show_overview, show_plan
from quantkit.cli.page_file import write_page
from quantkit.cli.summary_file import add_summary
from quantkit.errors import ResourceError, UsageError
from quantkit.memory.plan import MemoryPlan, Verdict
from quantkit.memory.resolve import resolve_model


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOutput:
    """Where a plan goes, and whether one that does not fit is an error."""

    html: Path | None
    as_json: bool
    allow_overcommit: bool
    summary: Path | None = None


def show_memory(name: str | None, options: MemoryOptions, output: MemoryOutput, *, check: Path | None) -> None:
    """Plan and show; exit 5 where a plan does not fit, unless that is allowed."""
    compare = options.compare
    if compare is not None and check is not None:
        raise UsageError("--compare and --check do not go together", remedy="leave one of them out")
    model = resolve_model(name)
    if model is None:
        if compare is not None or check is not None or output.html is not None:
            raise UsageError(
                "there is no checkpoint here, and the overview is not compared, checked or drawn",
                remedy="name a MODEL",
            )
        if options.context_at_most is not None:
            raise UsageError("--context-at-most speaks of one model", remedy="name a MODEL, or give --context")
        if options.scheme is not None or options.group_size is not None or options.rest is not None:
            raise UsageError("the overview shows every recipe as published and as INT4", remedy="name a MODEL")
        rows = plan_overview(options)
        document = documents.overview_document(rows)
        add_summary(output.summary, document)
        if output.as_json:
            render.show_json(document)
        else:
            show_overview(rows)
        return
    options, allow = with_context(options, model), output.allow_overcommit
    if compare is not None:
        plans = plan_comparison(options, model, compare)
        document = documents.comparison_document(*plans, allow_overcommit=allow)
        _finish(document, plans, output, lambda: show_comparison(*plans))
    elif check is not None:
        checked = plan_checked(options, model, check)
        document = documents.check_document(checked, allow_overcommit=allow)
        _finish(document, (checked.plan,), output, lambda: show_check(checked))
    else:
        plan = plan_one(options, model)
        document = documents.plan_document(plan, allow_overcommit=allow)
        _finish(document, (plan,), output, lambda: show_plan(plan))


def _finish(
    document: dict[str, Any], plans: Sequence[MemoryPlan], output: MemoryOutput, show: Callable[[], None]
) -> None:
    """Show in the form that was asked for, and leave with the exit code that the plans deserve."""
    if output.html is not None:
        write_page(output.html, memory_page(document), is_ours=PAGE_BEGIN)
    add_summary(output.summary, document)
    if output.as_json:
        render.show_json(document)
    else:
        show()
    for plan in plans:
        if plan.verdict is Verdict.DOES_NOT_FIT:
            render.show_notes("does not fit", [f"{plan.scheme}: {reason}" for reason in plan.reasons])
    if document["status"] == "failed":
        sys.exit(ResourceError.exit_code)
