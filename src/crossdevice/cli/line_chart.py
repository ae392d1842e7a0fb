"""Line charts as SVG, written by hand: no plotting library needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

COLORS = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df", "#bf8700", "#0a7ea4", "#6e7781")

WIDTH, HEIGHT = 420, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 34, 44


class Line(NamedTuple):
    """A named curve."""

    name: str
    points: Sequence[tuple[float, float]]


class Panel(NamedTuple):
    """One chart: its title, what its horizontal axis counts, its lines, and whether it shows zero."""

    title: str
    x_label: str
    lines: Sequence[Line]
    shows_zero: bool = True


def charts_svg(panels: Sequence[Panel]) -> str:
    """Charts side by side, as one self-contained SVG picture."""
    width = WIDTH * len(panels)
    drawn = "".join(
        f'<g transform="translate({WIDTH * position} 0)">{_panel(panel)}</g>'
        for position, panel in enumerate(panels)
    )
    title = escape("; ".join(panel.title for panel in panels))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" '
        f'viewBox="0 0 {width} {HEIGHT}" font-family="sans-serif" font-size="12" role="img">'
        f'<title>{title}</title><rect width="100%" height="100%" fill="white"/>{drawn}</svg>\n'
    )


def _panel(panel: Panel) -> str:
    xs = [x for line in panel.lines for x, _ in line.points] or [0.0]
    ys = [y for line in panel.lines for _, y in line.points] or [0.0]
    x_ticks, y_ticks = _ticks(min(xs), max(xs)), _ticks(min([0.0, *ys] if panel.shows_zero else ys), max(ys))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<text x="{WIDTH / 2}" y="20" text-anchor="middle" font-weight="bold">{escape(panel.title)}</text>'
    ]
    for tick in y_ticks:
        _, y = place(x_ticks[0], tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in x_ticks:
        x, _ = place(tick, y_ticks[0])
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{tick:g}</text>')
    parts.append(
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(panel.x_label)}</text>'
    )
    for number, line in enumerate(panel.lines):
        color = COLORS[number % len(COLORS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line.points))
        # Dashes, so that lines that lie on each other are both seen.
        dashes = f' stroke-dasharray="{4 + 2 * number}"' if number else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>')
        height = HEIGHT - BOTTOM - 8 - 15 * (len(panel.lines) - 1 - number)
        place_of_name = f'x="{WIDTH - RIGHT - 4}" y="{height}" text-anchor="end"'
        parts.append(f'<text {place_of_name} fill="{color}">{escape(line.name)}</text>')
    return "".join(parts)


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers that enclose both ends.

    >>> _ticks(0, 9.3)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    span = (high - low) or abs(high) or 1.0
    step = 10.0 ** math.floor(math.log10(span / 5))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 6)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(step * number, 10) for number in range(first, max(last, first + 1) + 1)]
