"""Tables of a memory page, and how its figures are written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

Json = dict[str, Any]

_DASH = "&ndash;"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A figure of ranks: the keys of its value, and of the band and the words below it where there are any."""

    label: str
    key: str
    unit: str = "GiB"
    band: str | None = None
    words: str | None = None


_WEIGHTS = _Row(label="All weights", key="weights_gib")
_REPLICATED = _Row(label="Replicated weights", key="replicated_gib")
_REST = (
    _Row(label="KV cache of one token", key="kv_bytes_per_token", unit="B", words="kv_formula"),
    _Row(label="KV pool", key="kv_pool_gib", band="kv_pool_band_gib"),
    _Row(label="Tokens in the pool", key="kv_tokens", unit="tokens", band="kv_tokens_band"),
    _Row(label="Requests in the pool", key="requests_at_context", unit="requests"),
    _Row(label="Overhead", key="overhead_gib", band="overhead_band_gib", words="overhead_source"),
    _Row(label="Copies of weights", key="copies_gib"),
    _Row(label="Buffers", key="buffers_gib", band="buffers_band_gib"),
    _Row(label="Peak while loading", key="load_peak_gib"),
    _Row(label="Left free", key="free_gib"),
)


def number(value: float, unit: str, *, has_sign: bool = False) -> str:
    """With its unit; GiB and percent to two places."""
    value = round(value, 2 if unit else 4) + 0  # no minus before a zero
    digits = ".2f" if unit in ("GiB", "%") else ".15g"
    text = f"{value:,{digits}}"
    if has_sign and value > 0:
        text = f"+{text}"
    if value == 1:
        unit = unit.removesuffix("s")
    suffix = f' <span class="unit">{unit}</span>' if unit else ""
    return f'<span class="number">{text.replace("-", "&minus;")}{suffix}</span>'


def short(value: float) -> str:
    """Two places at most, without zeros at the end."""
    return f"{round(value, 2):,.15g}".replace("-", "&minus;")


def weights_table(ranks: Mapping[str, Json]) -> str:
    """Parts of the weights, sharded and replicated, of ranks by their labels; also both together if all are alike."""
    num_columns = 3 if len(ranks) == 1 else 2
    heads, total = list[str](), list[str]()
    for label, rank in ranks.items():
        heads += [f"{label}<br>sharded", f"{label}<br>replicated", f"{label}<br>in all"][:num_columns]
        total += _weight_cells(rank["weights_gib"], rank["replicated_gib"])[:num_columns]
    rows = []
    for part in _parts(list(ranks.values())):
        cells = []
        for rank in ranks.values():  # a stage may lack a part, and a part may be sharded throughout
            sizes = rank["weights_by_part_gib"].get(part), rank["replicated_by_part_gib"].get(part)
            cells += _weight_cells(*sizes)[:num_columns]
        rows.append(_line(part.replace("_", " "), cells))
    rows.append(_line(_WEIGHTS.label, total, is_total=True))
    return _table("Weights of one rank, by part", heads, rows)


def rest_table(ranks: Mapping[str, Json]) -> str:
    """Everything but the parts of the weights, of ranks by their labels."""
    rows = [_line(row.label, [_cell([rank], row) for rank in ranks.values()]) for row in _REST]
    if len(ranks) > 1:
        rows.insert(0, _line(_WEIGHTS.label, [_cell([rank], _WEIGHTS) for rank in ranks.values()], is_total=True))
    return _table("KV cache, overhead and the rest of one rank", list(ranks), rows)


def comparison_table(plans: Sequence[Json], heads: Sequence[str], difference: Mapping[str, float]) -> str:
    """Plans side by side; what ``difference`` does not have is reckoned as it is, on the rank that holds the least."""
    first, last = _least_rank(plans[0]), _least_rank(plans[-1])

    def compared(row: _Row, *, is_total: bool = False) -> str:
        change = difference[row.key] if row.key in difference else last[row.key] - first[row.key]
        cells = [_cell(plan["ranks"], row) for plan in plans]
        return _line(row.label, [*cells, number(change, row.unit, has_sign=True)], is_total=is_total)

    rows = [compared(_WEIGHTS, is_total=True)]
    for part in _parts([rank for plan in plans for rank in plan["ranks"]]):
        cells = [_part_cell(plan["ranks"], part) for plan in plans]
        change = last["weights_by_part_gib"].get(part, 0.0) - first["weights_by_part_gib"].get(part, 0.0)
        rows.append(_line(part.replace("_", " "), [*cells, number(change, "GiB", has_sign=True)]))
    rows += [compared(row) for row in (_REPLICATED, *_REST)]
    caption = "The plans, and B minus A on the rank where fewest tokens fit"
    return _table(caption, [*heads, "B minus A"], rows)


def check_table(rows: Sequence[Json]) -> str:
    """Figures of a plan beside those of a log."""
    lines = []
    for row in rows:
        unit = escape(row["unit"])
        planned, percent = row["planned"], row["difference_percent"]
        cells = [
            _DASH if planned is None else number(planned, unit),
            number(row["measured"], unit),
            _DASH if percent is None else number(percent, "%", has_sign=True),
            str(row["line"]),
        ]
        lines.append(_line(row["name"], cells))
    return _table("Planned and measured", ["planned", "measured", "difference", "line of the log"], lines)


def _parts(ranks: Sequence[Json]) -> list[str]:
    return list(dict.fromkeys(part for rank in ranks for part in rank["weights_by_part_gib"]))


def _weight_cells(gib: float | None, replicated_gib: float | None) -> list[str]:
    """Sharded, replicated and in all."""
    if gib is None:
        return [_DASH, _DASH, _DASH]
    if replicated_gib is None:
        return [number(gib, "GiB"), _DASH, number(gib, "GiB")]
    return [number(gib - replicated_gib, "GiB"), number(replicated_gib, "GiB"), number(gib, "GiB")]


def _part_cell(ranks: Sequence[Json], part: str) -> str:
    sizes = [rank["weights_by_part_gib"][part] for rank in ranks if part in rank["weights_by_part_gib"]]
    return _span(sizes, "GiB") if sizes else _DASH


def _cell(ranks: Sequence[Json], row: _Row) -> str:
    """What the ranks say, from the least to the greatest where they differ; below it band and words."""
    notes = []
    if row.band is not None:
        bands = [rank[row.band] for rank in ranks]
        low, high = min(band[0] for band in bands), max(band[1] for band in bands)
        notes.append(f"band {number(low, row.unit)} to {number(high, row.unit)}")
    if row.words is not None:
        notes += [escape(words) for words in dict.fromkeys(rank[row.words] for rank in ranks)]
    return _span([rank[row.key] for rank in ranks], row.unit) + "".join(f'<p class="note">{note}</p>' for note in notes)


def _span(values: Sequence[float], unit: str) -> str:
    ends = dict.fromkeys((min(values), max(values)))
    return " to ".join(number(end, unit) for end in ends)


def _line(label: str, cells: Sequence[str], *, is_total: bool = False) -> str:
    css = ' class="total"' if is_total else ""
    tds = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr{css}><th scope="row">{escape(label)}</th>{tds}</tr>'


def _table(caption: str, heads: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f'<th scope="col">{label}</th>' for label in heads)
    return f"""<div class="scroll" role="group" tabindex="0" aria-label="{caption}"><table><caption>{caption}</caption>
<thead><tr><td></td>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>
"""


def _least_rank(document: Json) -> Json:
    """The rank whose pool holds the fewest tokens."""
    least: Json = min(document["ranks"], key=lambda rank: rank["kv_tokens"])
    return least
