"""Markdown of the JSON documents of `memory-plan`: a plan, two side by side, one beside a log, the overview."""

from collections.abc import Mapping
from typing import Any

from quantkit.cli.markdown import bullets, code, escaped, table

Document = Mapping[str, Any]


def memory_summary(document: Document) -> list[str]:
    """Verdicts first; then what every rank holds, and why not or what would help."""
    if "recipes" in document:
        return _overview(document)
    if "plans" in document:
        rows = [[code(name), _number(value)] for name, value in document["difference"].items()]
        return [
            *(line for plan in document["plans"] for line in (*_plan(plan), "")),
            *table(["the second has more, a rank", "difference"], rows),
        ]
    return [*_plan(document), *_check(document)]


def _plan(document: Document) -> list[str]:
    parallel, demand = document["parallel"], document["demand"]
    stages = {rank["stage"]: rank for rank in reversed(document["ranks"])}  # the ranks of a stage are alike
    rows = [
        [
            str(stage),
            *(_number(rank[key]) for key in ("weights_gib", "load_peak_gib", "kv_pool_gib")),
            f"{rank['kv_tokens']:,}",
            *(_number(rank[key]) for key in ("overhead_gib", "free_gib")),
        ]
        for stage, rank in sorted(stages.items())
    ]
    return [
        f"**{escaped(document['verdict'])}**: {code(document['model'])}, {escaped(document['scheme'])}; "
        f"{escaped(document['engine_title'])} {escaped(document['engine_version'])} {code(parallel['flags'])} on "
        f"{parallel['gpus']} x {escaped(document['gpu']['title'])} ({document['gpu']['total_gib']:g} GiB each)",
        "",
        f"Asked for: {demand['concurrency']:,} x {demand['context']:,} tokens; the pool holds "
        f"{document['kv_tokens']:,}, or {document['requests_at_context']:,} such requests",
        *table(["stage", "weights GiB", "load peak", "KV pool", "KV tokens", "overhead", "free"], rows),
        *bullets("Why", document["reasons"]),
        *bullets("What would help, each alone", document["advice"]),
        *bullets("Taken for granted", document["assumptions"]),
    ]


def _check(document: Document) -> list[str]:
    rows = [
        [
            escaped(str(one["name"])),
            _number(one["planned"]),
            _number(one["measured"]),
            _number(one["difference_percent"]),
        ]
        for one in document.get("check", ())
    ]
    return [
        *table(["log", "planned", "measured", "difference %"], rows),
        *bullets("Doubts", document.get("doubts", ())),
    ]


def _overview(document: Document) -> list[str]:
    rows = [
        [code(row["recipe"]), *(_verdict(row[key]) for key in ("published", "int4")), escaped(row["problem"] or "")]
        for row in document["recipes"]
    ]
    return table(["recipe", "as published", "INT4", "problem"], rows, num_left=4)


def _verdict(plan: Document | None) -> str:
    return "" if plan is None else escaped(plan["verdict"])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}"
