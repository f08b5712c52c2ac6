"""A memory plan, or several compared, as one HTML page: no script, nothing loaded, the same text every time."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from quantkit.cli.memory_page_chart import chart, scale_of
from quantkit.cli.memory_page_tables import (
    Json,
    check_table,
    comparison_table,
    number,
    rest_table,
    short,
    weights_table,
)
from quantkit.cli.page_file import page_begin, style

PAGE_BEGIN = page_begin("Memory plan of ")
_SIGNS = {"fits": "M3 9l4 5 8-10", "tight": "M9 2v9M9 14v2", "does not fit": "M4 4l10 10M14 4L4 14"}  # beside the words
_SIZES = {"tp": "TP", "ep": "EP", "pp": "PP", "dp_attention": "DP attention", "dcp": "DCP"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """``name``: Plan A, Plan B where plans are compared, else empty. ``groups``: ranks that are alike, by a label."""

    name: str
    document: Json
    groups: Mapping[str, Json]

    def heading(self, text: str) -> str:
        """After the name; ``text`` is escaped."""
        return f"{self.name}: {text}" if self.name else text


def memory_page(document: Json) -> str:
    """The page of a memory-plan document: of one plan, also with a log beside it, or of ``plans`` to compare."""
    is_comparison = "plans" in document
    documents = document["plans"] if is_comparison else [document]
    plans = []
    for index, one in enumerate(documents):
        name = f"Plan {chr(ord('A') + index)}" if is_comparison else ""
        plans.append(_Plan(name=name, document=one, groups=_groups(one["ranks"])))
    title = " and ".join(dict.fromkeys(one["model"] for one in documents))
    compared = checked = ""
    if is_comparison:
        title += f": {len(plans)} plans compared"
        table = comparison_table(documents, [plan.name for plan in plans], document["difference"])
        compared = f"<section><h2>Compared</h2>{table}</section>"
    else:
        title += f" on {document['parallel']['gpus']} x {document['gpu']['title']}"
    if "check" in document:
        checked = _against_the_log(document)
    return f"""{PAGE_BEGIN}{escape(title)}</title><style>
{style("memory_page.css")}</style></head>
<body><main><header><p class="eyebrow">Memory plan</p><h1>{escape(title)}</h1><p class="note">Predicted for one rank
(one GPU), before anything is loaded. GiB means 2<sup>30</sup> bytes.</p></header>
<div class="columns">{"".join(map(_summary, plans))}</div>
<section><h2>Memory of a GPU</h2>{_charts(plans)}</section>
{compared}{checked}
<div class="columns">{"".join(map(_details, plans))}</div>
<footer><p>{escape(f"quantkit {document['version']}, {document['command']}, status {document['status']}")}.
GiB: 2<sup>30</sup> = 1,073,741,824 bytes. B: bytes.</p></footer></main></body></html>
"""


def _groups(ranks: Sequence[Json]) -> dict[str, Json]:
    """The first of every group of ranks that differ in their number only, by a label: ranks 0-3, 6."""
    alike: dict[str, list[Json]] = {}
    for rank in ranks:
        alike.setdefault(json.dumps({**rank, "rank": None}), []).append(rank)
    groups = {}
    for group in alike.values():
        numbers = sorted(rank["rank"] for rank in group)
        firsts = [one for one in numbers if one - 1 not in numbers]
        lasts = [one for one in numbers if one + 1 not in numbers]
        runs = [str(first) if first == last else f"{first}-{last}" for first, last in zip(firsts, lasts, strict=True)]
        word = "rank" if len(group) == 1 else "ranks"
        groups[f"{word} {', '.join(runs)}"] = group[0]
    return groups


def _summary(plan: _Plan) -> str:
    """Verdict, the figures that decide, why, what to do, and what was asked."""
    document, verdict = plan.document, plan.document["verdict"]
    sizes = ", ".join(f"{name} {document['parallel'][key]}" for key, name in _SIZES.items())
    where = f"{_engine(document)} on {document['parallel']['gpus']} x {document['gpu']['title']}; {sizes}"
    settings = "".join(f"<dt>{term}</dt><dd>{escape(text)}</dd>" for term, text in _settings(document).items())
    return f"""<section><h2>{plan.heading(escape(document["scheme"]))}</h2>
<p class="note">{escape(where)}</p>
<p class="verdict {escape(verdict.replace(" ", "-"))}"><svg width="18" height="18" aria-hidden="true">
<path d="{_SIGNS.get(verdict, "")}"/></svg><span class="unseen">Verdict: </span>{escape(verdict)}</p>
{_tiles(plan)}
<div class="split"><div>{_list("Reasons", document["reasons"])}{_list("Advice", document["advice"])}</div>
<div><h3>Settings</h3><dl class="settings">{settings}</dl></div></div></section>
"""


def _tiles(plan: _Plan) -> str:
    """Figures of the rank where fewest tokens fit, and the requests of the whole server."""
    document = plan.document
    label, least = min(plan.groups.items(), key=lambda group: group[1]["kv_tokens"])
    each = f"{document['demand']['context']:,} tokens each"
    asked, requests = _asked(document), each
    if document["parallel"]["dp_attention"] > 1:
        asked = f"of each attention replica; {asked}"
        requests = f"of the whole server, {each}"
    tiles = [
        (
            "All weights",
            number(least["weights_gib"], "GiB"),
            f"of {short(document['gpu']['total_gib'])} GiB on the GPU",
        ),
        ("KV pool", number(least["kv_pool_gib"], "GiB"), f"{short(least['kv_bytes_per_token'])} B a token"),
        ("Tokens in the pool", number(document["kv_tokens"], "tokens"), asked),
        ("Requests at full context", number(document["requests_at_context"], "requests"), requests),
    ]
    boxes = "".join(f"<div><dt>{name}</dt><dd>{value}</dd><dd>{note}</dd></div>" for name, value, note in tiles)
    whose = f'<p class="note">Of {label}, where fewest tokens fit.</p>' if len(plan.groups) > 1 else ""
    return f'<dl class="tiles">{boxes}</dl>{whose}'


def _settings(document: Json) -> dict[str, str]:
    """What was asked for, by its name."""
    gpu, budget, kv, demand = document["gpu"], document["budget"], document["kv"], document["demand"]
    mtp = "loaded" if document["with_mtp"] else "left out"
    given = "as logged" if budget["fraction_from"] == "log" else "as given"
    whose = "the default" if budget["is_default_fraction"] else given
    free = f"{short(gpu['free_before_load_gib'])} GiB free before load"
    concurrency = f"concurrency {demand['concurrency']:,}"
    if document["parallel"]["dp_attention"] > 1:
        concurrency += f" in all, {demand['per_replica']:,} on each attention replica"
    return {
        "Model": f"{document['model']}, family {document['family']}; MTP layer {mtp}",
        "Weights from": document["weights_from"],
        "GPU": f"{gpu['title']} ({gpu['name']}): {short(gpu['total_gib'])} GiB, {free}",
        "Budget": f"{budget['fraction_option']} {budget['fraction']:g} ({whose}): {budget['rule']}",
        "Role": "prefill and decode" if document["role"] == "both" else document["role"],
        "Flags": document["launch_flags"],
        "KV cache": f"{kv['dtype']}, {kv['layout']}; chosen by {kv['chosen_by']}",
        "Demand": f"context {demand['context']:,} tokens, {concurrency}: {_asked(document)}",
    }


def _engine(document: Json) -> str:
    return f"{document['engine_title']} {document['engine_version']}"


def _asked(document: Json) -> str:
    tokens = document["demand"]["tokens"]
    return f"{tokens:,} tokens asked for" if tokens else "nothing asked for"


def _charts(plans: Sequence[_Plan]) -> str:
    scale = scale_of([plan.document for plan in plans])
    figures = []
    for plan in plans:
        for label, rank in plan.groups.items():
            figures.append(chart(plan.document, rank, label, plan.heading(label), scale))
    return "".join(figures)


def _against_the_log(document: Json) -> str:
    """What ``--check`` adds."""
    note = "Planned for the rank where fewest tokens fit. Difference: planned less measured, of the measured."
    if document["log_model"]:
        note = f"The log names the model {document['log_model']}. {note}"
    table = check_table(document["check"])
    return f"""<section><h2>Against the log</h2><p class="note">{escape(note)}</p>{table}
{_list("Doubts", document["doubts"])}</section>
"""


def _details(plan: _Plan) -> str:
    """The tables of one plan, and what it assumes."""
    css = ' class="split"' if len(plan.groups) == 1 else ""
    tables = weights_table(plan.groups) + rest_table(plan.groups)
    return f"""<section><h2>{plan.heading("details")}</h2><div{css}>{tables}</div>
{_list("Assumptions", plan.document["assumptions"])}</section>
"""


def _list(title: str, texts: Sequence[str]) -> str:
    if not texts:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<h3>{title}</h3><ul>{items}</ul>"
