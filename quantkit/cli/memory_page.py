"""A memory plan, or several compared, as one HTML page: no script, nothing loaded, the same text every time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

Json = Mapping[str, Any]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_ENGINES = {"sglang": "SGLang", "vllm": "vLLM"}
_SIGNS = {"fits": "M3 9l4 5 8-10", "tight": "M9 2v9M9 14v2", "does not fit": "M4 4l10 10M14 4L4 14"}  # beside the words
_NUM_SHADES, _BAR_Y, _BAR_PX = 8, 40, 60
_CHART_WIDTHS = (280, 400, 520, 680, 840, 1100)  # px from which a label appears: the style sheet has a rule for each
_LETTER_PX, _LABEL_MARGIN_PX = 7.4, 12
_TICK_STEPS, _MOST_TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000), 8
_NOTHING_GIB = 0.005
_SIZES = {"tp": "TP", "ep": "EP", "pp": "PP", "dp_attention": "DP attention", "dcp": "DCP"}
_SWATCH = '<svg width="14" height="14" aria-hidden="true"><rect class="part" width="14" height="14"/></svg>'


@dataclass(frozen=True, slots=True)
class _Row:
    """Of a table: its name, the key of its value in a rank, the unit, and the keys of what is said below it."""

    label: str
    key: str
    unit: str = "GiB"
    notes: tuple[str, ...] = ()


_WEIGHTS, _SAME = _Row("All weights", "weights_gib"), _Row("Replicated weights", "replicated_gib")
_POOL = _Row("KV pool", "kv_pool_gib", notes=("kv_pool_band_gib",))
_TOKENS = _Row("Tokens in the pool", "kv_tokens", "tokens", ("kv_tokens_band",))
_REQUESTS = _Row("Requests at full context", "requests_at_context", "requests")
_REST = (
    _Row("KV cache of one token", "kv_bytes_per_token", "B", ("kv_formula",)),
    *(_POOL, _TOKENS, _REQUESTS),
    _Row("Overhead", "overhead_gib", notes=("overhead_band_gib", "overhead_source")),
    _Row("Copies of weights", "copies_gib"),
    _Row("Peak while loading", "load_peak_gib"),
    _Row("Left free", "free_gib"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """``prefix``: of headings, where plans are compared. ``groups``: by a label, ranks that differ in number only."""

    prefix: str
    document: Json
    groups: Mapping[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """Common to all bars. ``end_gib``: their right edge; ``shades``: of weights, by the segment's name."""

    end_gib: float
    shades: Mapping[str, int]

    def percent(self, gib: float) -> str:
        return f"{100 * gib / self.end_gib:.4f}%"

    def css(self, segment: Json) -> str:
        return f"weights s{self.shades[segment['name']]}" if segment["kind"] == "weights" else escape(segment["kind"])


def memory_page(document: Json) -> str:
    """The page of a memory-plan document, whether it is one plan or has ``plans`` to compare."""
    several = "plans" in document
    plans = [
        _Plan(prefix=f"Plan {chr(ord('A') + index)}: " if several else "", document=one, groups=_groups(one))
        for index, one in enumerate(document["plans"] if several else [document])
    ]
    title = " and ".join(dict.fromkeys(plan.document["model"] for plan in plans))
    scale, compared = _scale(plans), ""
    if several:
        title += f": {len(plans)} plans compared"
        columns = {plan.prefix.rstrip(": "): list(plan.groups.values()) for plan in plans}
        caption = "The plans, and B minus A on the rank where fewest tokens fit"
        rows = [_WEIGHTS, *_part_rows(plans), _SAME, *_REST]
        compared = _table(caption, columns, rows, document.get("difference", {}))
    else:
        title += f" on {document['parallel']['gpus']} x {document['gpu']['title']}"
    charts = "".join(_chart(plan, label, rank, scale) for plan in plans for label, rank in plan.groups.items())
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<title>Memory plan of {escape(title)}</title><style>
{files("quantkit.cli").joinpath("memory_page.css").read_text(encoding="utf-8")}</style></head>
<body><main><header><p class="eyebrow">Memory plan</p><h1>{escape(title)}</h1><p class="note">Predicted for one rank
(one GPU), before anything is loaded. GiB means 2<sup>30</sup> bytes.</p></header>
<div class="columns">{"".join(map(_summary, plans))}</div>
<section><h2>Memory of a GPU</h2>{charts}</section>
{compared and f"<section><h2>Compared</h2>{compared}</section>"}
<div class="columns">{"".join(map(_details, plans))}</div>
<footer><p>{escape(f"quantkit {document['version']}, {document['command']}, status {document['status']}")}.
GiB: 2<sup>30</sup> = 1,073,741,824 bytes. B: bytes.</p></footer></main></body></html>
"""


def _groups(plan: Json) -> dict[str, Json]:
    """Ranks that are equal but for their number, by a label: ranks 0-3, 6."""
    alike: dict[str, list[Json]] = {}
    for rank in plan["ranks"]:
        parts = {f"part {part}": gib for part, gib in rank["weights_by_part_gib"].items()}
        whole = {"kv_formula": plan["kv"]["formula"], **rank, **parts}
        alike.setdefault(repr({**whole, "rank": None}), []).append(whole)
    labels = {}
    for ranks in alike.values():
        numbers = sorted(rank["rank"] for rank in ranks)
        ends = zip(*([n for n in numbers if n + step not in numbers] for step in (-1, 1)), strict=True)
        runs = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ends)
        labels[f"rank{'s' * (len(numbers) > 1)} {runs}"] = ranks[0]
    return labels


def _scale(plans: Sequence[_Plan]) -> _Scale:
    segments = [rank["segments"] for plan in plans for rank in plan.groups.values()]
    names = dict.fromkeys(one["name"] for bar in segments for one in bar if one["kind"] == "weights")
    ends = [plan.document["gpu"]["total_gib"] for plan in plans]
    ends += [sum(segment["gib"] for segment in bar) for bar in segments]
    shades = {name: min(index, _NUM_SHADES - 1) for index, name in enumerate(names)}
    return _Scale(end_gib=max(ends), shades=shades)


def _summary(plan: _Plan) -> str:
    """Verdict, the figures that decide, why, what to do, and what was asked."""
    one, verdict = plan.document, plan.document["verdict"]
    gpu, budget, kv, demand = one["gpu"], one["budget"], one["kv"], one["demand"]
    total, context = f"{_short(gpu['total_gib'])} GiB", f"{demand['context']:,} tokens"
    label, worst = min(plan.groups.items(), key=lambda group: group[1]["kv_tokens"])
    asked = f"{demand['tokens']:,} tokens asked for" if demand["tokens"] else "nothing asked for"
    notes = {
        _WEIGHTS: f"of {total} on the GPU",
        _POOL: f"{_short(worst['kv_bytes_per_token'])} B a token",
        _TOKENS: asked,
        _REQUESTS: f"{context} each",
    }
    heads = {row: f"<dt>{row.label}</dt><dd>{_number(worst[row.key], row.unit)}</dd>" for row in notes}
    tiles = "".join(f"<div>{heads[row]}<dd>{note}</dd></div>" for row, note in notes.items())
    engine = f"{_ENGINES.get(one['engine'], one['engine'])} {one['engine_version']}"
    sizes = ", ".join(f"{name} {one['parallel'][key]}" for key, name in _SIZES.items())
    where = f"{engine} on {one['parallel']['gpus']} x {gpu['title']}; {sizes}"
    whose = "the default" if budget["is_default_fraction"] else "as given"
    settings = {
        "Model": f"{one['model']}, family {one['family']}; MTP layer {'loaded' if one['with_mtp'] else 'left out'}",
        "Weights from": one["weights_from"],
        "GPU": f"{gpu['title']} ({gpu['name']}): {total}, {_short(gpu['free_before_load_gib'])} GiB free before load",
        "Budget": f"{budget['fraction_option']} {budget['fraction']:g} ({whose}): {budget['rule']}",
        "Role": one.get("role", ""),
        "Flags": one["parallel"].get("flags", ""),
        "KV cache": f"{kv['dtype']}, {kv['layout']}; chosen by {kv['chosen_by']}",
        "Demand": f"context {context}, concurrency {demand['concurrency']:,}: {asked}",
    }
    terms = "".join(f"<dt>{term}</dt><dd>{escape(text)}</dd>" for term, text in settings.items() if text)
    return f"""<section><h2>{plan.prefix}{escape(one["scheme"])}</h2>
<p class="note">{escape(where)}</p>
<p class="verdict {escape(verdict.replace(" ", "-"))}"><svg width="18" height="18" aria-hidden="true">
<path d="{_SIGNS.get(verdict, "")}"/></svg><span class="unseen">Verdict: </span>{escape(verdict)}</p>
<dl class="tiles">{tiles}</dl><p class="note">{f"Of {label}, where fewest tokens fit." * (len(plan.groups) > 1)}</p>
<div class="split"><div>{_list("Reasons", one["reasons"])}{_list("Advice", one["advice"])}</div>
<div><h3>Settings</h3><dl class="settings">{terms}</dl></div></div></section>
"""


def _chart(plan: _Plan, label: str, rank: Json, scale: _Scale) -> str:
    """The bar of a rank with its scale, and its legend."""
    total, limit = plan.document["gpu"]["total_gib"], rank.get("limit_gib", plan.document["budget"].get("limit_gib"))
    bars, names, legend, spoken, start = [], [], [], [], 0.0
    for segment in rank["segments"]:
        name, gib, css = escape(segment["name"].replace("_", " ")), segment["gib"], scale.css(segment)
        end, size, thin = start + gib, f"{_short(gib)} GiB", " thin" * (gib < scale.end_gib / 100)
        spoken.append(f"{name} {size}")
        legend.append(f'<li class="{css}">{_SWATCH}<span>{name}</span> {_number(gib, "GiB")}</li>')
        place = f'x="{scale.percent(start)}" y="{_BAR_Y}" width="{scale.percent(gib)}" height="{_BAR_PX}"'
        tip = f"<title>{name}: {size}, {100 * gib / total:.1f}% of the GPU</title>"
        bars.append(f'<g class="{css}">{tip}<rect class="part{thin}" {place}/></g>')
        last = min(end, total) if start < total else end  # the part that is not hatched has the name
        needed_px = max(len(name), len(size)) * _LETTER_PX + _LABEL_MARGIN_PX
        least = next((px for px in _CHART_WIDTHS if px * (last - start) / scale.end_gib >= needed_px), None)
        x, y = f'x="{scale.percent((start + last) / 2)}"', _BAR_Y + _BAR_PX // 2
        text = f'<text {x} y="{y - 4}">{name}</text><text {x} y="{y + 15}">{size}</text>'
        names += [f'<g class="name {css} from-{least}">{text}</g>'] if least else []
        start = end
    marks = {"total": (total, f"GPU memory {_short(total)} GiB", 12)}
    marks |= {} if limit is None else {"limit": (limit, f"static limit {_short(limit)} GiB", 30)}
    spoken += [text for _, text, _ in marks.values()]
    excess = ""
    if start - total > _NOTHING_GIB:
        excess = f"{_short(start)} GiB needed: {_short(start - total)} GiB more than the GPU has"
        spoken.append(excess)
        window = f'x="{scale.percent(total)}" y="{_BAR_Y}" width="{scale.percent(start - total)}" height="{_BAR_PX}"'
        # a bar-high line, dashed and slanted: a pattern would need a reference
        line = f'<line x2="4000" y1="{_BAR_PX / 2}" y2="{_BAR_PX / 2}" stroke-width="{_BAR_PX}"/>'
        line = f'<g transform="skewX(-30)">{line}</g><rect width="100%" height="100%"/>'
        bars.append(f'<svg class="beyond" {window}>{line}</svg>')
    drawn = "".join([*bars, *_ticks(scale), *(_mark(css, *mark, scale) for css, mark in marks.items()), *names])
    where = f"{plan.document['scheme']}; stage {rank['stage']}, layers {rank['layers'][0]} to {rank['layers'][1] - 1}"
    return f"""<figure><figcaption><h3>{plan.prefix}{label}</h3><p class="note">{escape(where)}</p>
{excess and f'<p class="excess">{excess}</p>'}</figcaption>
<div class="chart"><svg role="img" aria-label="Memory of {label}: {", ".join(spoken)}" width="100%" height="126">
{drawn}</svg></div><ul class="legend">{"".join(legend)}</ul></figure>
"""


def _mark(css: str, gib: float, text: str, y: int, scale: _Scale) -> str:
    """A line across the bar with words above it, on the side that has room."""
    x, side = scale.percent(gib), 'class="start" dx="6"' if gib < 0.4 * scale.end_gib else 'class="end" dx="-6"'
    line = f'<line x1="{x}" x2="{x}" y1="{y - 11}" y2="{_BAR_Y + _BAR_PX + 6}"/>'
    return f'<g class="mark {css}">{line}<text x="{x}" y="{y}" {side}>{text}</text></g>'


def _ticks(scale: _Scale) -> list[str]:
    step, y = next((step for step in _TICK_STEPS if scale.end_gib / step <= _MOST_TICKS), 10_000), _BAR_Y + _BAR_PX
    ticks = []
    for gib in range(0, int(scale.end_gib) + 1, step):
        x, odd = scale.percent(gib), " odd" * (gib // step % 2)
        side = "start" if gib == 0 else "end" if gib > 0.97 * scale.end_gib else "middle"
        text = f'<text x="{x}" y="{y + 20}" class="{side}">{gib} GiB</text>'
        ticks.append(f'<g class="tick{odd}"><line x1="{x}" x2="{x}" y1="{y}" y2="{y + 6}"/>{text}</g>')
    return ticks


def _details(plan: _Plan) -> str:
    """The tables of one plan, and what it assumes."""
    is_alone, columns = len(plan.groups) == 1, dict[str, list[Json]]()
    for label, rank in plan.groups.items():
        same = {f"part {part}": gib for part, gib in rank["replicated_by_part_gib"].items()}
        same[_WEIGHTS.key] = rank["replicated_gib"]
        cut = {key: gib - same.get(key, 0) for key, gib in rank.items() if key.startswith("part ") or key in same}
        columns |= {f"{label}<br>sharded": [cut], f"{label}<br>replicated": [same]}
        columns |= {f"{label}<br>in all": [rank]} if is_alone else {}
    weights = _table("Weights of one rank, by part", columns, [*_part_rows([plan]), _WEIGHTS])
    columns = {label: [rank] for label, rank in plan.groups.items()}
    rest = _table("KV cache, overhead and the rest of one rank", columns, _REST if is_alone else [_WEIGHTS, *_REST])
    return f"""<section><h2>{plan.prefix}details</h2><div{' class="split"' * is_alone}>{weights}{rest}</div>
{_list("Assumptions", plan.document["assumptions"])}</section>
"""


def _part_rows(plans: Sequence[_Plan]) -> list[_Row]:
    ranks = [rank for plan in plans for rank in plan.groups.values()]
    parts = dict.fromkeys(part for rank in ranks for part in rank["weights_by_part_gib"])
    return [_Row(part.replace("_", " "), f"part {part}") for part in parts]


def _table(caption: str, columns: Mapping[str, Sequence[Json]], rows: Sequence[_Row], last: Json | None = None) -> str:
    """One column for each set of ranks; ``last``: the difference, reckoned where it does not have a row."""
    lines = []
    for row in rows:
        cells = [_cell(ranks, row) for ranks in columns.values()]
        if last is not None:
            change, ends = last.get(row.key), [_values(ranks, row.key) for ranks in columns.values()]
            if change is None and all(len(end) == 1 for end in ends):
                change = ends[-1][0] - ends[0][0]
            cells.append("&ndash;" if change is None else _number(change, row.unit, "+"))
        tds = "".join(f"<td>{cell}</td>" for cell in cells)
        lines.append(f'<tr{" class=total" * (row is _WEIGHTS)}><th scope="row">{escape(row.label)}</th>{tds}</tr>')
    head = "".join(f'<th scope="col">{label}</th>' for label in [*columns, *["B minus A"] * (last is not None)])
    return f"""<div class="scroll" role="group" tabindex="0" aria-label="{caption}"><table><caption>{caption}</caption>
<thead><tr><td></td>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>
"""


def _cell(ranks: Sequence[Json], row: _Row) -> str:
    """What the ranks say, from the least to the greatest where they differ; below it bands and words."""
    values = _values(ranks, row.key)
    text = " to ".join(_number(value, row.unit) for value in sorted({*values[:1], *values[-1:]})) or "&ndash;"
    for found in (_values(ranks, key) for key in row.notes):
        words = [escape(one) for one in found if isinstance(one, str)]
        ends = sorted(end for one in found if not isinstance(one, str) for end in one)
        words += [f"band {_number(ends[0], row.unit)} to {_number(ends[-1], row.unit)}"] if ends else []
        text += "".join(f'<p class="note">{one}</p>' for one in words)
    return text


def _values(ranks: Sequence[Json], key: str) -> list[Any]:
    """Those that differ, in order."""
    values = [rank[key] for rank in ranks if rank.get(key) is not None]
    return sorted(value for index, value in enumerate(values) if value not in values[:index])


def _number(value: float, unit: str, sign: str = "") -> str:
    """With its unit; GiB to two places."""
    value = round(value, 2) + 0
    text = f"{value:{sign if value else ''},{'.2f' if unit == 'GiB' else '.15g'}}"
    unit = unit.rstrip("s") if value == 1 else unit
    return f'<span class="number">{text.replace("-", "&minus;")} <span class="unit">{unit}</span></span>'


def _short(value: float) -> str:  # without zeros at the end
    return f"{round(value, 2):,.15g}".replace("-", "&minus;")


def _list(title: str, texts: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return items and f"<h3>{title}</h3><ul>{items}</ul>"
