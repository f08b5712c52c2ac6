"""Charts of an evaluation's page as inline SVG: places in percent of the width, heights in pixels, no script."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import count

from quantkit.machine import bytes_text

NUM_SERIES = 8  # that the style sheet tells apart, by colour and dashes
_PLOT_PX, _TOP_PX, _AXIS_PX = 220, 22, 26
_ROW_PX, _BAR_PX, _WORDS_PX = 54, 12, 20
_INSET = 6.0  # percent of the width at both ends of a line
_MOST_MARKS, _MOST_TICKS = 40, 8
_STEPS = (1, 2, 2.5, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line of a chart. ``values`` by layer, where there is one."""

    name: str
    values: Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A row of one or two bars: ``values`` of source and output, or of one, with their words."""

    name: str
    values: tuple[float, ...]
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """Upward from ``low``, or logarithmic. ``ticks``: all above the base line."""

    low: float
    high: float
    ticks: tuple[float, ...]
    is_logarithmic: bool = False

    @staticmethod
    def linear(largest: float) -> "_Axis":
        """From 0 on, with three to five ticks."""
        if largest <= 0:
            return _Axis(low=0.0, high=1.0, ticks=(1.0,))
        power = math.floor(math.log10(largest / 5))
        steps = (step * 10.0 ** (power + more) for more in count() for step in _STEPS)
        step = next(one for one in steps if largest / one <= 5)
        num_ticks = math.ceil(largest / step - 1e-9)
        return _Axis(low=0.0, high=step * num_ticks, ticks=tuple(step * (index + 1) for index in range(num_ticks)))

    @staticmethod
    def logarithmic(values: Sequence[float]) -> "_Axis":
        """Whole decades around what is above 0."""
        first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        last = max(last, first + 1)
        ticks = tuple(10.0**power for power in range(first + 1, last + 1))
        return _Axis(low=10.0**first, high=10.0**last, ticks=ticks, is_logarithmic=True)

    def share(self, value: float) -> float:
        """Of the height, from below."""
        if self.is_logarithmic:
            return math.log10(value / self.low) / math.log10(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def y(self, value: float) -> float:
        return _TOP_PX + _PLOT_PX * (1 - self.share(value))

    @property
    def grid(self) -> str:
        """A line at every tick, and the base line where it is not 0."""
        return "".join(_gridline(self.y(value)) for value in self._marked)

    @property
    def labels(self) -> str:
        """The values of these lines: drawn last, above what reaches so far to the left."""
        return "".join(_grid_label(value, self.y(value)) for value in self._marked)

    @property
    def _marked(self) -> Sequence[float]:
        return [self.low, *self.ticks] if self.is_logarithmic else self.ticks


def line_chart(
    title: str, note: str, series: Sequence[Series], layers: Sequence[int], *, is_logarithmic: bool = False
) -> str:
    """Relative errors by layer, one scale for all; on a logarithmic one what is 0 has no place."""
    if is_logarithmic:
        series = [replace(one, values={at: value for at, value in one.values.items() if value > 0}) for one in series]
    values = [value for one in series for value in one.values.values()]
    axis = _Axis.logarithmic(values) if is_logarithmic and values else _Axis.linear(max(values, default=0.0))
    x_of = {layer: _x(index, len(layers)) for index, layer in enumerate(layers)}
    lines = "".join(_line(number, one, x_of, axis) for number, one in enumerate(series))
    legend = "".join(
        f'<li class="c{number}"><svg width="28" height="12" aria-hidden="true"><line x1="0" x2="28" y1="6" y2="6"/>'
        f'<circle cx="14" cy="6" r="3.5"/></svg><span>{escape(one.name)}</span></li>'
        for number, one in enumerate(series)
    )
    spoken = "; ".join(f"{escape(one.name)} {_range_text(one)}" for one in series)
    return _figure(
        title,
        note,
        f"{title}: {spoken}",
        _TOP_PX + _PLOT_PX + _AXIS_PX,
        f"{axis.grid}{_layer_ticks(layers, x_of)}{lines}{axis.labels}",
        f'<ul class="legend lines">{legend}</ul>',
    )


def histogram_chart(title: str, note: str, edges: Sequence[float], counts: Sequence[int]) -> str:
    """Counts between logarithmic edges."""
    axis = _Axis.linear(float(max(counts, default=0)))
    width = (100 - 2 * _INSET) / max(len(counts), 1)  # percent: at the left stand the numbers of the axis
    bars, ticks = [], []
    for index, number in enumerate(counts):
        height = _PLOT_PX * axis.share(number)
        tip = f"{edges[index]:.2g} to {edges[index + 1]:.2g}: {number:,} predictions"
        bars.append(
            f'<g class="c0"><title>{tip}</title><rect class="part" x="{_INSET + index * width:.3f}%" '
            f'y="{_TOP_PX + _PLOT_PX - height:.2f}" width="{width:.3f}%" height="{height:.2f}"/></g>'
        )
    for index, edge in enumerate(edges):
        power = round(math.log10(edge))
        if math.isclose(edge, 10.0**power, rel_tol=1e-6):
            ticks.append(
                _tick(_INSET + index * width, f'10<tspan dy="-5">{_signed(power)}</tspan>', is_odd=power % 2 != 0)
            )
    spoken = f"{title}: {sum(counts):,} predictions"
    if counts:
        spoken += f" from {edges[0]:.2g} to {edges[-1]:.2g}"
    height = _TOP_PX + _PLOT_PX + _AXIS_PX
    return _figure(
        title, note, spoken, height, f"{axis.grid}{''.join(bars)}{_baseline()}{''.join(ticks)}{axis.labels}", ""
    )


def bar_chart(title: str, note: str, bars: Sequence[Bar], keys: Sequence[str]) -> str:
    """Rows of bars on one scale from zero; ``keys``: what the bars of a row are, where they are two."""
    longest = max((value for bar in bars for value in bar.values), default=0.0) or 1.0
    drawn, y = [], 0
    for bar in bars:
        words = escape(" / ".join(bar.words))
        drawn.append(
            f'<text class="start" x="0" y="{y + 15}">{escape(bar.name)}</text>'
            f'<text class="end value" x="100%" y="{y + 15}">{words}</text>'
        )
        for number, value in enumerate(bar.values):
            tip = escape(f"{bar.name}{f', {keys[number]}' if keys else ''}: {bar.words[number]}")
            drawn.append(
                f'<g class="c{number}"><title>{tip}</title><rect class="part" x="0" '
                f'y="{y + _WORDS_PX + 2 + number * _BAR_PX}" width="{100 * value / longest:.3f}%" '
                f'height="{_BAR_PX - 1}"/></g>'
            )
        y += _ROW_PX - (0 if len(bar.values) > 1 else _BAR_PX)
    legend = "".join(
        f'<li class="c{number}"><svg width="14" height="14" aria-hidden="true"><rect class="part" width="14" '
        f'height="14"/></svg><span>{escape(key)}</span></li>'
        for number, key in enumerate(keys)
    )
    spoken = "; ".join(f"{escape(bar.name)} {escape(' / '.join(bar.words))}" for bar in bars)
    below = f'<ul class="legend">{legend}</ul>' if keys else ""
    return _figure(title, note, f"{title}: {spoken}", max(y, 1), "".join(drawn), below)


def size_bar(name: str, source_bytes: int, output_bytes: int) -> Bar:
    """A row of the chart of sizes."""
    sizes = (source_bytes, output_bytes)
    return Bar(name=name, values=tuple(map(float, sizes)), words=tuple(map(bytes_text, sizes)))


def _figure(title: str, note: str, spoken: str, height: int, drawing: str, below: str) -> str:
    return f"""<figure><figcaption><h3>{escape(title)}</h3><p class="note">{escape(note)}</p></figcaption>
<div class="chart"><svg role="img" aria-label="{spoken}" width="100%" height="{height}">{drawing}</svg></div>{below}
</figure>
"""


def _x(index: int, num_places: int) -> float:
    return 50.0 if num_places == 1 else _INSET + (100 - 2 * _INSET) * index / (num_places - 1)


def _gridline(y: float) -> str:
    return f'<g class="grid"><line x1="0" x2="100%" y1="{y:.2f}" y2="{y:.2f}"/></g>'


def _grid_label(value: float, y: float) -> str:
    return f'<g class="grid"><text x="0" y="{y - 4:.2f}">{value:,.12g}</text></g>'


def _baseline() -> str:
    y = _TOP_PX + _PLOT_PX
    return f'<g class="grid base"><line x1="0" x2="100%" y1="{y}" y2="{y}"/></g>'


def _layer_ticks(layers: Sequence[int], x_of: Mapping[int, float]) -> str:
    steps = (step * 10**power for power in count() for step in (1, 2, 5))
    step = next(one for one in steps if len(layers) / one <= _MOST_TICKS)
    shown = [layer for layer in layers if layer % step == 0]
    return _baseline() + "".join(_tick(x_of[one], str(one), is_odd=index % 2 == 1) for index, one in enumerate(shown))


def _tick(x: float, text: str, *, is_odd: bool) -> str:
    side = "start" if x < 1 else "end" if x > 99 else "middle"
    y = _TOP_PX + _PLOT_PX
    return (
        f'<g class="{"tick odd" if is_odd else "tick"}"><line x1="{x:.3f}%" x2="{x:.3f}%" y1="{y}" y2="{y + 5}"/>'
        f'<text class="{side}" x="{x:.3f}%" y="{y + 20}">{text}</text></g>'
    )


def _line(number: int, series: Series, x_of: Mapping[int, float], axis: _Axis) -> str:
    """Its places are joined by a drawing that is stretched, its marks are round."""
    places = [(x_of[layer], value, layer) for layer, value in series.values.items()]
    points = " ".join(f"{x:.3f},{100 * (1 - axis.share(value)):.3f}" for x, value, _ in places)
    joined = (
        f'<svg x="0" y="{_TOP_PX}" width="100%" height="{_PLOT_PX}" viewBox="0 0 100 100" preserveAspectRatio="none">'
        f'<polyline points="{points}"/></svg>'
    )
    radius = 4 if len(x_of) <= _MOST_MARKS else 2.5
    marks = "".join(
        f'<circle cx="{x:.3f}%" cy="{axis.y(value):.2f}" r="{radius}"><title>{escape(series.name)}, layer {layer}: '
        f"{value:.5f}</title></circle>"
        for x, value, layer in places
    )
    return f'<g class="c{number}">{joined}{marks}</g>'


def _range_text(series: Series) -> str:
    if not series.values:
        return "nowhere"
    return f"{min(series.values.values()):.5f} to {max(series.values.values()):.5f}"


def _signed(power: int) -> str:
    return f"&minus;{-power}" if power < 0 else str(power)
