"""Charts of a memory page: the bar of a rank's memory, its scale and its legend, as inline SVG."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count

from quantkit.cli.memory_page_tables import Json, number, short

_NUM_SHADES, _BAR_Y, _BAR_PX, _CHART_PX = 8, 40, 60, 126
_CHART_WIDTHS = (280, 400, 520, 680, 840, 1100)  # px from which a label appears: the style sheet has a rule for each
_LETTER_PX, _LABEL_MARGIN_PX = 7.4, 12
_TICK_STEPS, _MOST_TICKS = (1, 2, 5), 8
_NOTHING_GIB = 0.005
_THIN_SHARE = 0.01  # of the scale: without an outline, which would cover it
_SWATCH = '<svg width="14" height="14" aria-hidden="true"><rect class="part" width="14" height="14"/></svg>'


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Common to all bars. ``end_gib``: their right edge; ``shades``: of weights, by the segment's name."""

    end_gib: float
    shades: Mapping[str, int]

    def percent(self, gib: float) -> str:
        """A place or a width on the chart."""
        return f"{100 * gib / self.end_gib:.4f}%"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """A stretch of a bar. ``name`` and ``css`` are escaped."""

    name: str
    css: str
    start_gib: float
    gib: float

    @property
    def end_gib(self) -> float:
        return self.start_gib + self.gib

    @property
    def size(self) -> str:
        return f"{short(self.gib)} GiB"


def scale_of(plans: Sequence[Json]) -> Scale:
    """As long as the largest GPU or the longest bar."""
    bars = [rank["segments"] for plan in plans for rank in plan["ranks"]]
    ends = [plan["gpu"]["total_gib"] for plan in plans]
    ends += [sum(segment["gib"] for segment in bar) for bar in bars]
    names = dict.fromkeys(segment["name"] for bar in bars for segment in bar if segment["kind"] == "weights")
    shades = {name: min(index, _NUM_SHADES - 1) for index, name in enumerate(names)}
    return Scale(end_gib=max(ends), shades=shades)


def chart(plan: Json, rank: Json, label: str, heading: str, scale: Scale) -> str:
    """The figure of a rank; ``label`` says which ranks are like it."""
    total, limit = plan["gpu"]["total_gib"], plan["budget"]["limit_gib"]
    segments = _segments(rank, scale)
    needed = segments[-1].end_gib
    total_text, limit_text = f"GPU memory {short(total)} GiB", f"static limit {short(limit)} GiB"
    spoken = [f"{segment.name} {segment.size}" for segment in segments] + [total_text, limit_text]
    drawn = [_rectangle(segment, total, scale) for segment in segments]
    excess = ""
    if needed - total > _NOTHING_GIB:
        text = f"{short(needed)} GiB needed: {short(needed - total)} GiB more than the GPU has"
        spoken.append(text)
        drawn.append(_hatching(total, needed, scale))
        excess = f'<p class="excess">{text}</p>'
    drawn += _ticks(scale)
    drawn += [_mark("total", total, total_text, 12, scale), _mark("limit", limit, limit_text, 30, scale)]
    drawn += [_name(segment, total, scale) for segment in segments]
    first, end = rank["layers"]
    where = escape(f"{plan['scheme']}; stage {rank['stage']}, layers {first} to {end - 1}")
    return f"""<figure><figcaption><h3>{heading}</h3><p class="note">{where}</p>{excess}</figcaption>
<div class="chart">
<svg role="img" aria-label="Memory of {label}: {", ".join(spoken)}" width="100%" height="{_CHART_PX}">
{"".join(drawn)}</svg></div><ul class="legend">{"".join(map(_legend_entry, segments))}</ul></figure>
"""


def _segments(rank: Json, scale: Scale) -> list[_Segment]:
    placed, start = [], 0.0
    for segment in rank["segments"]:
        is_weights = segment["kind"] == "weights"
        css = f"weights s{scale.shades[segment['name']]}" if is_weights else escape(segment["kind"])
        name = escape(segment["name"].replace("_", " "))
        placed.append(_Segment(name=name, css=css, start_gib=start, gib=segment["gib"]))
        start += segment["gib"]
    return placed


def _rectangle(segment: _Segment, total_gib: float, scale: Scale) -> str:
    is_thin = segment.gib < _THIN_SHARE * scale.end_gib
    css = "part thin" if is_thin else "part"
    tip = f"{segment.name}: {segment.size}, {100 * segment.gib / total_gib:.1f}% of the GPU"
    place = _bar_place(segment.start_gib, segment.gib, scale)
    return f'<g class="{segment.css}"><title>{tip}</title><rect class="{css}" {place}/></g>'


def _bar_place(start_gib: float, gib: float, scale: Scale) -> str:
    return f'x="{scale.percent(start_gib)}" y="{_BAR_Y}" width="{scale.percent(gib)}" height="{_BAR_PX}"'


def _hatching(total_gib: float, needed_gib: float, scale: Scale) -> str:
    """Over what the GPU does not have: a bar-high line, dashed and slanted, as a pattern would need a reference."""
    place = _bar_place(total_gib, needed_gib - total_gib, scale)
    middle = _BAR_PX / 2
    line = f'<line x2="4000" y1="{middle}" y2="{middle}" stroke-width="{_BAR_PX}"/>'
    frame = '<rect width="100%" height="100%"/>'
    return f'<svg class="beyond" {place}><g transform="skewX(-30)">{line}</g>{frame}</svg>'


def _name(segment: _Segment, total_gib: float, scale: Scale) -> str:
    """Name and size in the part that is not hatched, from the chart's width on at which they have room."""
    start, end = segment.start_gib, segment.end_gib
    if start < total_gib < end:
        end = total_gib
    needed_px = max(len(segment.name), len(segment.size)) * _LETTER_PX + _LABEL_MARGIN_PX
    share = (end - start) / scale.end_gib
    widths = [px for px in _CHART_WIDTHS if px * share >= needed_px]
    if not widths:
        return ""
    x, middle = scale.percent((start + end) / 2), _BAR_Y + _BAR_PX // 2
    lines = f'<text x="{x}" y="{middle - 4}">{segment.name}</text><text x="{x}" y="{middle + 15}">{segment.size}</text>'
    return f'<g class="name {segment.css} from-{widths[0]}">{lines}</g>'


def _mark(css: str, gib: float, text: str, y: int, scale: Scale) -> str:
    """A line across the bar; its words stand beside its end, or on it where a narrow chart has room on neither side."""
    x, share, top = scale.percent(gib), gib / scale.end_gib, y - 11
    if share < 0.4:
        side = 'class="start" dx="6"'
    elif share > 0.6:
        side = 'class="end" dx="-6"'
    else:
        side, top = 'class="middle"', y + 4
    line = f'<line x1="{x}" x2="{x}" y1="{top}" y2="{_BAR_Y + _BAR_PX + 6}"/>'
    return f'<g class="mark {css}">{line}<text x="{x}" y="{y}" {side}>{text}</text></g>'


def _ticks(scale: Scale) -> list[str]:
    steps = (step * 10**power for power in count() for step in _TICK_STEPS)
    step, y = next(step for step in steps if scale.end_gib / step <= _MOST_TICKS), _BAR_Y + _BAR_PX
    ticks = []
    for index, gib in enumerate(range(0, int(scale.end_gib) + 1, step)):
        x, side = scale.percent(gib), "middle"
        if gib == 0:
            side = "start"
        elif gib > 0.97 * scale.end_gib:
            side = "end"
        css = "tick odd" if index % 2 else "tick"
        text = f'<text x="{x}" y="{y + 20}" class="{side}">{gib:,} GiB</text>'
        ticks.append(f'<g class="{css}"><line x1="{x}" x2="{x}" y1="{y}" y2="{y + 6}"/>{text}</g>')
    return ticks


def _legend_entry(segment: _Segment) -> str:
    return f'<li class="{segment.css}">{_SWATCH}<span>{segment.name}</span> {number(segment.gib, "GiB")}</li>'
