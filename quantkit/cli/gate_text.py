"""What `quantkit gate` says of its document, in words that terminal and summary share."""

from collections.abc import Mapping
from typing import Any

from quantkit.gate.pairs import key_name

Document = Mapping[str, Any]
NUM_LEFT = 2  # columns of words


def columns(document: Document) -> list[str]:
    """Of the table; ``needed`` is the number of questions."""
    numbers = ["questions", "baseline", "candidate", "change", _interval_title(document), "lost", "gained", "McNemar p"]
    return ["task", "metric", *numbers, "needed", "drop"]


def rows(document: Document) -> list[list[str]]:
    """A row for each task and filter and, of several, one for the mean."""
    tasks = [[key_name((one["task"], one["filter"])), one["metric"], *_cells(one)] for one in document["tasks"]]
    return tasks if len(tasks) == 1 else [*tasks, [_mean_name(document), "", *_cells(document["overall"])]]


def verdict_text(document: Document) -> str:
    """What was asked, and the answer."""
    criterion, overall = document["criterion"], document["overall"]
    limit = f"{criterion['max_drop']:g} points"
    answer = "passes" if document["status"] == "ok" else "does not pass"
    if criterion["of"] == "each task":
        bad = [one for one in document["tasks"] if one["verdict"] != "within"]
        judged = f"{len(document['tasks']) - len(bad)} of {len(document['tasks'])} tasks are within {limit}"
    else:
        bound = f"at most {overall['drop_bound']:.2f} ({100 * criterion['confidence']:g}%, one-sided)"
        observed = f"drop {0.0 - overall['change']:.2f} points, {bound}"
        judged = f"{_mean_name(document)}: {observed}; {_judged(document, limit)}"
    return f"{judged}: {answer}"


def _judged(document: Document, limit: str) -> str:
    """What of the drop is within, or beyond."""
    verdict = document["overall"]["verdict"]
    if document["criterion"]["judged"] == "observed drop":
        return f"the observed drop {'is within' if verdict == 'within' else 'exceeds'} {limit}"
    if verdict == "within":
        return f"the upper bound is within {limit}"
    if verdict == "not shown":
        return f"a drop within {limit} is not shown, as the upper bound is beyond"
    least = 0.0 - document["overall"]["interval"][1]
    return f"the drop exceeds {limit}: the lower bound, {least:.2f}, does"


def needed_text(document: Document) -> str:
    """How many questions it would take to show it of the mean; nothing where that is shown or not asked."""
    overall, criterion = document["overall"], document["criterion"]
    needed = overall["questions_needed"]
    if document["status"] == "ok" or criterion["of"] == "each task":
        return ""
    if needed["even_chance"] is None:
        return "no number of questions would show that nothing is lost, where nothing is gained either"
    proportions = " (every task grown alike)" if len(document["tasks"]) > 1 else ""
    observed = (
        "none would do" if needed["at_observed"] is None else f"{needed['at_observed']:,} would have an even chance"
    )
    return (
        f"to show a drop within {criterion['max_drop']:g} takes {needed['even_chance']:,} questions{proportions} for "
        f"an even chance where nothing is lost in truth, {needed['likely']:,} for "
        f"{100 * document['bootstrap']['power']:g}%; were the observed {0.0 - overall['change']:.2f} true, {observed}"
    )


def method_lines(document: Document) -> list[str]:
    """How the columns were found."""
    bootstrap, criterion = document["bootstrap"], document["criterion"]
    return [
        f"interval: paired bootstrap, {bootstrap['num_resamples']:,} resamples of the questions of each task, with "
        f"{bootstrap['added_pairs']:g} flips added; its lower end is the bound of the drop",
        "lost, gained: worse and better than before; McNemar p: exact, two-sided",
        f"needed: questions for an even chance to show a drop within {criterion['max_drop']:g} where nothing is lost, "
        f"n with z sqrt(rate n + {bootstrap['added_pairs']:g}) / n = margin, about rate (z / margin)^2, at the rate "
        f"of flips seen and z = {bootstrap['z']:.3f}",
    ]


def _interval_title(document: Document) -> str:
    return f"{100 * (2 * document['criterion']['confidence'] - 1):.4g}% interval"


def _mean_name(document: Document) -> str:
    tasks = {one["task"] for one in document["tasks"]}
    if len(document["tasks"]) == 1:
        (only,) = document["tasks"]
        return key_name((only["task"], only["filter"]))
    if document["criterion"]["mean_over"] == "questions":
        return "all questions"
    return f"mean of {len(tasks)} tasks" if len(tasks) > 1 else f"{tasks.pop()}, mean of its filters"


def _cells(one: Document) -> list[str]:
    low, high = one["interval"]
    p, needed = one["mcnemar_p"], one["questions_needed"]["even_chance"]
    return [
        f"{one['num_questions']:,}",
        f"{one['baseline']:.2f}",
        f"{one['candidate']:.2f}",
        f"{one['change']:+.2f}",
        f"{low:+.2f} to {high:+.2f}",
        f"{one['num_lost']:,}",
        f"{one['num_gained']:,}",
        "-" if p is None else f"{p:.3g}",
        "-" if needed is None else f"{needed:,}",
        one["verdict"],
    ]
