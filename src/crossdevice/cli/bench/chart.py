"""Bandwidth against size as an SVG: a line for each competitor, and the machine's copy limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from crossdevice.cli.bench.limit import CopyLimit
from crossdevice.cli.bench.measure import Row
from crossdevice.cli.bench.table import size_text, title_of
from crossdevice.cli.bench.work import GIGABYTE

WIDTH, HEIGHT = 1080, 540
LEFT, RIGHT, TOP, BOTTOM = 70, 370, 56, 60

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c564b", "#bcbd22")
"""Okabe and Ito's, which people who do not see all colours can tell apart, and three more."""

STYLE = """
.bench { font: 13px system-ui, sans-serif; background: #ffffff; }
.bench text { fill: #222222; } .bench .grid { stroke: #d8d8d8; } .bench .axis { stroke: #555555; }
.bench .limit { stroke: #222222; stroke-dasharray: 2 4; } .bench .title { font-size: 16px; font-weight: 600; }
.bench polyline { fill: none; stroke-width: 2; }
@media (prefers-color-scheme: dark) {
 .bench { background: #16181c; } .bench text { fill: #e6e6e6; } .bench .grid { stroke: #3a3d42; }
 .bench .axis { stroke: #a0a0a0; } .bench .limit { stroke: #e6e6e6; }
}
"""


class _Scale(NamedTuple):
    """From sizes (logarithmic) and bandwidths (linear) to places in the picture."""

    smallest: int
    largest: int
    top: float

    def x(self, size: int) -> float:
        span = math.log2(self.largest / self.smallest) or 1.0
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log2(size / self.smallest) / span

    def y(self, bandwidth: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * bandwidth / self.top


def svg_of(rows: Sequence[Row], limit: CopyLimit, title: str) -> str:
    """The chart of each row's main figure. Lines of competitors that share one result are dashed."""
    sizes = sorted({row.work.size_bytes for row in rows})
    ceiling = rows[0].work.bus_bandwidth_of_copy(limit.bytes_per_second) / GIGABYTE
    highest = max(ceiling, *(row.main.bus_bandwidth for row in rows))
    step = _step(highest)
    scale = _Scale(sizes[0], sizes[-1], step * math.ceil(highest * 1.02 / step))
    names = list(dict.fromkeys(row.competitor for row in rows))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="bench" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<text class="title" x="{LEFT}" y="28">{escape(title)}</text>',
        *_grid(scale, sizes, step),
        *_limit(scale, ceiling, limit),
    ]
    for number, name in enumerate(names):
        parts += _line(scale, [row for row in rows if row.competitor == name], number, title_of(rows, name))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _grid(scale: _Scale, sizes: Sequence[int], step: float) -> list[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for number in range(round(scale.top / step) + 1):
        y = scale.y(number * step)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{number * step:g}</text>')
    stride = -(-len(sizes) // 10)
    for size in sizes[::stride]:
        x = scale.x(size)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 5}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{size_text(size)}</text>')
    middle = (LEFT + right) / 2
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 14}" text-anchor="middle">size</text>')
    parts.append(f'<text x="{LEFT}" y="{TOP - 10}" text-anchor="middle">busbw (GB/s)</text>')
    return parts


def _limit(scale: _Scale, ceiling: float, limit: CopyLimit) -> list[str]:
    y = scale.y(ceiling)
    return [
        f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>',
        f'<text x="{LEFT + 6}" y="{y - 6:.1f}">copy limit of this machine: {escape(str(limit))}</text>',
    ]


def _line(scale: _Scale, rows: Sequence[Row], number: int, title: str) -> list[str]:
    color = COLORS[number % len(COLORS)]
    dashes = ' stroke-dasharray="7 4"' if rows[0].main.memory == "shared" else ""
    places = [(scale.x(row.work.size_bytes), scale.y(row.main.bus_bandwidth)) for row in rows]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [f'<polyline points="{points}" stroke="{color}"{dashes}/>']
    for (x, y), row in zip(places, rows, strict=True):
        note = f"{title}, {size_text(row.work.size_bytes)}: {row.main.bus_bandwidth:.3g} GB/s"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"><title>{escape(note)}</title></circle>'
        )
    y = TOP + 12 + 22 * number
    x = WIDTH - RIGHT + 16
    parts.append(f'<polyline points="{x},{y} {x + 22},{y}" stroke="{color}"{dashes}/>')
    parts.append(f'<text x="{x + 28}" y="{y + 4}">{escape(title)}</text>')
    return parts


def _step(highest: float) -> float:
    """1, 2 or 5 times a power of ten, for four to ten lines."""
    power = 10.0 ** math.floor(math.log10(highest / 4))
    return next(power * digit for digit in (1, 2, 5, 10) if highest / (power * digit) <= 10)
