"""Line charts as SVG, written by hand: no plotting library needed, for light and dark screens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c564b", "#bcbd22")
"""Colours of Okabe and Ito, distinguishable for colour-blind readers, and three more."""

STYLE = """
.chart { font: 13px system-ui, sans-serif; background: #ffffff; }
.chart text { fill: #222222; } .chart .grid { stroke: #d8d8d8; } .chart .axis { stroke: #555555; }
.chart .limit { stroke: #222222; stroke-dasharray: 2 4; } .chart .title { font-size: 15px; font-weight: 600; }
.chart polyline, .chart .sample { fill: none; } .chart .dashed { stroke-dasharray: 7 4; }
.chart .middle { text-anchor: middle; } .chart .end { text-anchor: end; }
@media (prefers-color-scheme: dark) {
 .chart { background: #16181c; } .chart text { fill: #e6e6e6; } .chart .grid { stroke: #3a3d42; }
 .chart .axis { stroke: #a0a0a0; } .chart .limit { stroke: #e6e6e6; }
}
"""

LEFT, RIGHT, TOP, BOTTOM = 58, 16, 56, 52
LETTER_WIDTH = 7.5


class Line(NamedTuple):
    """A named curve; `notes` are shown when one points at its points, which are not drawn without."""

    name: str
    points: Sequence[tuple[float, float]]
    is_dashed: bool = False
    notes: Sequence[str] = ()
    width: float = 2.0


class Limit(NamedTuple):
    """A level that is drawn across the chart."""

    level: float
    name: str


class Chart(NamedTuple):
    """Lines over one pair of axes; `x_names` replaces the round numbers along the horizontal one."""

    title: str
    x_label: str
    lines: Sequence[Line]
    y_label: str = ""
    shows_zero: bool = True
    x_names: Mapping[float, str] | None = None
    limit: Limit | None = None


def charts_svg(charts: Sequence[Chart], *, width: int = 420, height: int = 300) -> str:
    """Draws charts of one size side by side, with a legend for the last; needs no other file."""
    names = [line.name for line in charts[-1].lines]
    across = width * len(charts)
    total = across + 50 + round(LETTER_WIDTH * max(map(len, names)))
    title = escape("; ".join(chart.title for chart in charts))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {total} {height}" role="img">',
        f"<title>{title}</title><style>{STYLE}</style>",
    ]
    for position, chart in enumerate(charts):
        parts += [f'<g transform="translate({width * position} 0)">', *_drawn(chart, width, height), "</g>"]
    for number, line in enumerate(charts[-1].lines):
        y = TOP + 12 + 22 * number
        sample = f'x1="{across + 8}" x2="{across + 30}" y1="{y}" y2="{y}"'
        parts.append(f'<line class="sample{_dashes(line)}" {sample} {_stroke(number, line)}/>')
        parts.append(_text(across + 36, y + 4, line.name))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _drawn(chart: Chart, width: int, height: int) -> list[str]:
    xs = [x for line in chart.lines for x, _ in line.points] or [0.0]
    ys = [y for line in chart.lines for _, y in line.points] or [0.0]
    ys += [0.0] * chart.shows_zero + ([] if chart.limit is None else [chart.limit.level])
    y_ticks, right, bottom = _ticks(min(ys), max(ys)), width - RIGHT, height - BOTTOM
    x_names = chart.x_names or {tick: f"{tick:g}" for tick in _ticks(min(xs), max(xs))}
    first, last = min(*xs, *x_names), max(*xs, *x_names)

    def place(x: float, y: float) -> tuple[float, float]:
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return LEFT + (x - first) / ((last - first) or 1.0) * (right - LEFT), bottom - up * (bottom - TOP)

    def level(y: float, kind: str) -> str:
        return f'<line class="{kind}" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'

    parts = [_text(LEFT, 24, chart.title, "title"), _text(LEFT, TOP - 12, chart.y_label, "middle")]
    for tick in y_ticks:
        _, y = place(first, tick)
        parts += [level(y, "grid"), _text(LEFT - 8, y + 4, f"{tick:g}", "end")]
    for tick, name in x_names.items():
        x, _ = place(tick, y_ticks[0])
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 5}"/>')
        parts.append(_text(x, bottom + 20, name, "middle"))
    parts += [level(bottom, "axis"), _text((LEFT + right) / 2, height - 10, chart.x_label, "middle")]
    if chart.limit is not None:
        _, y = place(first, chart.limit.level)
        parts += [level(y, "limit"), _text(LEFT + 6, y - 6, chart.limit.name)]
    for number, line in enumerate(chart.lines):
        places = [place(*point) for point in line.points]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="{_dashes(line)}" points="{points}" {_stroke(number, line)}/>')
        for (x, y), note in zip(places, line.notes, strict=False):
            point = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_color(number)}">'
            parts.append(f"{point}<title>{escape(note)}</title></circle>")
    return parts


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def _stroke(number: int, line: Line) -> str:
    return f'stroke="{_color(number)}" stroke-width="{line.width:g}"'


def _dashes(line: Line) -> str:
    return " dashed" if line.is_dashed else ""


def _ticks(low: float, high: float) -> list[float]:
    """Returns about five round numbers that enclose both ends.

    >>> _ticks(0, 9.3)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    span = (high - low) or abs(high) or 1.0
    step = 10.0 ** math.floor(math.log10(span / 5))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 6)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(step * number, 10) for number in range(first, max(last, first + 1) + 1)]
