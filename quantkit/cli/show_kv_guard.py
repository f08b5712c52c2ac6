"""Shows dumped pools, incidents and self-tests as JSON or as lines. Imports nothing that needs torch."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.cli import render
from quantkit.cli.document import head
from quantkit.kv_guard.explain import explanation, found_faults
from quantkit.kv_guard.names import one_line

if TYPE_CHECKING:
    from quantkit.kv_guard.dump import Dump
    from quantkit.kv_guard.dump_report import DumpReport
    from quantkit.kv_guard.simulation.report import SelfTestReport

_MOST_ROWS = 50


def show_dump(path: Path, dump: "Dump", report: "DumpReport", *, as_json: bool) -> None:
    """What the pool holds, and every page that is not what its row was granted."""
    if as_json:
        document = {
            **head("kv-guard", "ok" if report.is_sound else "failed"),
            "action": "inspect",
            "dump": str(path),
            "pool": asdict(dump.identity),
            **report.document(),
        }
        render.show_json(document)
        return
    identity = dump.identity
    what = one_line(f"pool {identity.pool} of {identity.model}, {identity.layout}")
    render.show_line(f"{path}: {what}")
    states = f"{report.num_held:,} held, {report.num_shared:,} shared, {report.num_free:,} free"
    checked = f"{report.num_checked:,} checked for {len(dump.step.rows):,} requests"
    render.show_line(f"{dump.size.num_pages:,} pages: {states}; {checked}")
    rows = [
        [one_line(one.request or ""), str(one.evidence.index), str(one.evidence.page), str(one.fault)]
        for one in report.violations[:_MOST_ROWS]
    ]
    render.show_table("not what was granted", ["request", "logical page", "page", "fault"], rows)
    render.show_notes("warning", _beyond(len(report.violations)))
    if report.torn:
        render.show_notes("quantkit", [f"tags that contradict themselves: pages {_listed(report.torn)}"])
    if report.spoiled:
        told = "written, or to be written, by somebody who does not hold them"
        render.show_notes("warning", [f"{told}: pages {_listed(report.spoiled)}"])
    if report.stray:
        render.show_notes("note", [f"held, and expected by no row: pages {_listed(report.stray)}"])
    wrong = _counted(len({one.evidence.page for one in report.violations}), "page")
    render.show_line("sound" if report.is_sound else f"not sound: {wrong}, {_counted(len(report.torn), 'tag')}")


def show_incidents(path: Path, incidents: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    """A sentence for each fault in each step, and how often each fault came."""
    found = found_faults(incidents)
    requests = {one["request"] for one in incidents if one["request"] is not None}
    if as_json:
        document = {
            **head("kv-guard"),
            "action": "explain",
            "file": str(path),
            "faults": dict(sorted(Counter(one["fault"] for one in incidents).items())),
            "counts": {"lines": len(incidents), "faults": len(found), "requests": len(requests)},
            "incidents": [{**one, "explanation": explanation(one)} for one in incidents],
        }
        render.show_json(document)
        return
    for one in found:
        render.show_line(one.text)
    times = Counter(one.incident["fault"] for one in found)
    render.show_table("faults", ["fault", "times"], [[fault, str(count)] for fault, count in times.most_common()])
    counts = [_counted(len(incidents), "line"), _counted(len(found), "fault"), _counted(len(requests), "request")]
    render.show_line(", ".join(counts))


def show_selftest(report: "SelfTestReport", *, content: str, as_json: bool) -> None:
    """A line for each kind, and what was named or read without one."""
    if as_json:
        document = {
            **head("kv-guard", "ok" if report.is_good else "failed"),
            "action": "selftest",
            "content": content,
            **report.document(),
        }
        render.show_json(document)
        return
    rows = []
    for count in report.kinds:
        figures = [str(number) for number in (count.injected, count.caught, count.missed)]
        rows.append([count.name, *figures, count.seen_first])
    render.show_table("faults", ["what happens", "injected", "caught", "missed", "seen first"], rows)
    render.show_line(
        f"{report.checks:,} page checks in {report.steps:,} steps, {report.clean_checks:,} without a fault"
    )
    wrong = [*report.false_positives, *report.leaks]
    render.show_notes("warning", [*wrong[:_MOST_ROWS], *_beyond(len(wrong))])
    missed = sum(count.missed for count in report.kinds)
    if silent := [count.name for count in report.kinds if not count.injected]:
        render.show_notes("warning", [f"kinds that did not happen: {'; '.join(silent)}; give more --faults"])
    positives = _counted(len(report.false_positives), "false positive")
    leaks = _counted(len(report.leaks), "leak")
    render.show_line(f"{'PASSED' if report.is_good else 'FAILED'}: {missed} missed, {positives}, {leaks}")


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _listed(pages: Sequence[int]) -> str:
    shown = ", ".join(map(str, pages[:10]))
    return shown if len(pages) <= 10 else f"{shown} and {len(pages) - 10} more"


def _beyond(count: int) -> list[str]:
    return [f"{count - _MOST_ROWS} more are in --json"] if count > _MOST_ROWS else []
