"""Charts as SVG: bars and lines, without another library."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Final, Literal

WIDTH: Final = 720
_LEFT: Final = 210
_RIGHT: Final = 90
_BAR: Final = 22
_GAP: Final = 6
_LINES_HEIGHT: Final = 260
_LIBRARIES: Final = {
    "distribax": "#3f51b5",
    "JAX": "#12805c",
    "TensorFlow": "#e8710a",
    "torch": "#c5221f",
}
"""A library has the same colour in all charts; anything else takes the next of the others."""
_OTHERS: Final = ("#8e24aa", "#00838f", "#3f51b5", "#e8710a", "#c5221f", "#5f6368")
_MARGIN: Final = 8
_SPACE: Final = 16
_STROKE: Final = 'stroke="currentColor"'
_TEXT: Final = 'font-family="sans-serif" font-size="12" fill="currentColor"'


@dataclass(frozen=True)
class Point:
    """A value with its quartiles, at a place of the axis."""

    x: float
    value: float
    low: float
    high: float


@dataclass
class Series:
    """Values of one thing: a bar has one, a line several."""

    name: str
    points: list[Point] = field(default_factory=list)


@dataclass
class Chart:
    """A picture of some figures.

    Attributes:
        title: What it shows.
        unit: Of the values.
        kind: "bars", one for each series, or "lines" over an axis.
        x_label: What the axis of lines means.
        series: What is drawn.
        is_log: Whether both axes of lines are logarithmic.
        is_in_bytes: Whether the axis of lines counts bytes.
    """

    title: str
    unit: str
    kind: Literal["bars", "lines"]
    x_label: str = ""
    series: list[Series] = field(default_factory=list)
    is_log: bool = False
    is_in_bytes: bool = False


def draw(charts: Sequence[Chart]) -> str:
    """Returns one SVG picture with the charts below each other."""
    parts: list[str] = []
    top = 0.0
    for chart in charts:
        drawn, height = _draw(chart)
        parts.append(f'<g transform="translate(0 {top:.0f})">{drawn}</g>')
        top += height + _SPACE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{-_MARGIN} 0 {WIDTH} {top:.0f}" '
        f'width="{WIDTH}" height="{top:.0f}" role="img">\n'
        # Dark pages: what is drawn in the colour of the text follows them.
        "<style>svg { color: #202124; background: transparent } "
        "@media (prefers-color-scheme: dark) { svg { color: #e8eaed } }</style>\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def get_height(charts: Sequence[Chart]) -> int:
    """Returns how high the picture of the charts is; it is `WIDTH` wide."""
    return round(sum(_draw(chart)[1] + _SPACE for chart in charts))


def _draw(chart: Chart) -> tuple[str, float]:
    return _draw_bars(chart) if chart.kind == "bars" else _draw_lines(chart)


def format_value(value: float) -> str:
    """Returns a number with three digits that count, in thousands and millions if it is large."""
    for limit, suffix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def format_bytes(size: float) -> str:
    """Returns a number of bytes, in KiB, MiB or GiB if it is large."""
    for limit, suffix in ((1 << 30, " GiB"), (1 << 20, " MiB"), (1 << 10, " KiB")):
        if size >= limit:
            return f"{size / limit:.3g}{suffix}"
    return f"{size:.3g} B"


def _draw_bars(chart: Chart) -> tuple[str, float]:
    bars = [(series.name, series.points[0]) for series in chart.series if series.points]
    largest = max((point.high for _, point in bars), default=1.0) or 1.0
    scale = (WIDTH - _LEFT - _RIGHT) / largest
    parts = [_write_title(chart)]
    colours = _choose_colours([name for name, _ in bars])
    for index, (name, point) in enumerate(bars):
        top = 34 + index * (_BAR + _GAP)
        middle = top + _BAR / 2
        end, low, high = (_LEFT + each * scale for each in (point.value, point.low, point.high))
        colour = colours[index]
        box = f'x="{_LEFT}" y="{top}" width="{end - _LEFT:.1f}" height="{_BAR}"'
        parts.append(_write_text(name, _LEFT - 8, middle + 4, "end"))
        parts.append(f'<rect {box} fill="{colour}" rx="2"/>')
        parts.append(f'<path d="M{low:.1f} {middle}H{high:.1f}" {_STROKE} stroke-width="1.5"/>')
        parts.append(_write_text(format_value(point.value), max(high, end) + 6, middle + 4))
    return "".join(parts), 34.0 + len(bars) * (_BAR + _GAP)


def _draw_lines(chart: Chart) -> tuple[str, float]:
    points = [point for series in chart.series for point in series.points]
    left, right, bottom = 70, WIDTH - 190, 34 + _LINES_HEIGHT
    values = [point.value for point in points] + ([] if chart.is_log else [0.0])
    place_x = _make_scale([point.x for point in points], left, right, chart.is_log)
    place_y = _make_scale(values, bottom, 40, chart.is_log)
    parts = [_write_title(chart), f'<path d="M{left} 40V{bottom}H{right}" fill="none" {_STROKE}/>']
    parts.append(_write_text(chart.x_label, (left + right) / 2, bottom + 36, "middle"))
    for x in sorted({point.x for point in points}):
        label = format_bytes(x) if chart.is_in_bytes else format_value(x)
        parts.append(_write_text(label, place_x(x), bottom + 18, "middle"))
    for value in _choose_ticks(values, chart.is_log):
        y = place_y(value)
        parts.append(_write_text(format_value(value), left - 8, y + 4, "end"))
        parts.append(f'<path d="M{left} {y:.1f}H{right}" {_STROKE} stroke-opacity="0.15"/>')
    colours = _choose_colours([series.name for series in chart.series])
    for index, (series, colour) in enumerate(zip(chart.series, colours, strict=True)):
        places = [(place_x(point.x), place_y(point.value)) for point in series.points]
        route = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        line = f'fill="none" stroke="{colour}" stroke-width="2"'
        parts.append(f'<polyline points="{route}" {line}/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        box = f'x="{right + 12}" y="{44 + index * 20}" width="12" height="12"'
        parts.append(f'<rect {box} fill="{colour}"/>')
        parts.append(_write_text(series.name, right + 30, 54 + index * 20))
    return "".join(parts), bottom + 44.0


def _choose_colours(names: Sequence[str]) -> list[str]:
    others = itertools.cycle(_OTHERS)
    libraries = [
        next((colour for library, colour in _LIBRARIES.items() if library in name), None)
        for name in names
    ]
    return [colour or next(others) for colour in libraries]


def _write_text(text: str, x: float, y: float, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {_TEXT}>{escape(text)}</text>'


def _write_title(chart: Chart) -> str:
    title = f"{chart.title} ({chart.unit})"
    return f'<text x="0" y="18" {_TEXT} font-weight="bold">{escape(title)}</text>'


def _make_scale(
    values: Sequence[float], start: float, end: float, is_log: bool
) -> Callable[[float], float]:
    """Returns a function that places a value between two ends of an axis."""
    measure = _log10 if is_log else float
    low = min(map(measure, values), default=0.0)
    high = max(map(measure, values), default=1.0)

    def place(value: float) -> float:
        share = (measure(value) - low) / (high - low) if high > low else 0.5
        return start + share * (end - start)

    return place


def _log10(value: float) -> float:
    return math.log10(max(value, 1e-30))


def _choose_ticks(values: Sequence[float], is_log: bool) -> list[float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    if is_log:
        powers = range(math.ceil(_log10(low)), math.floor(_log10(high)) + 1)
        return [10.0**power for power in powers]
    step = 10 ** math.floor(math.log10(high or 1.0))
    while high / step > 6:
        step *= 2
    return [index * step for index in range(int(high / step) + 1)]
