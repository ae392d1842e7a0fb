"""The chart of bandwidth against size, and a page of chart and table that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from crossdevice.cli.bench.limit import CopyLimit
from crossdevice.cli.bench.measure import Figure, Row
from crossdevice.cli.bench.table import title_of
from crossdevice.cli.bench.workload import GIGABYTE
from crossdevice.cli.svg import Chart, Limit, Line, charts_svg
from crossdevice.values.quantities import size_text

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
svg { width: 100%; height: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; } pre { overflow-x: auto; }
@media (prefers-color-scheme: dark) { body { background: #16181c; color: #e6e6e6; } }
"""

READING = (
    "busbw is what nccl-tests calls bus bandwidth: size / time, times the factor of the collective; "
    "GB are 10^9 bytes. The dotted line is the busbw at which the work would move its bytes as fast as this "
    "machine copies. Sizes that fit into caches may lie above it, and so may competitors whose results are "
    "one shared buffer (dashed lines, memory “shared”): they write once where the others write once for "
    "each replica."
)

_HEADINGS = (
    *("competitor", "memory", "size", "out-of-place (us)", "busbw", "#wrong"),
    *("in-place (us)", "busbw", "#wrong"),
)


def svg_of(rows: Sequence[Row], limit: CopyLimit, title: str) -> str:
    """The chart of each row's main figure. Lines of competitors that share one result are dashed."""
    ceiling = rows[0].work.bus_bandwidth_of_copy(limit.bytes_per_second) / GIGABYTE
    sizes = sorted({row.work.size_bytes for row in rows})
    chart = Chart(
        title,
        "size",
        [_line(rows, name) for name in dict.fromkeys(row.competitor for row in rows)],
        y_label="busbw (GB/s)",
        x_names={math.log2(size): size_text(size) for size in sizes[:: -(-len(sizes) // 10)]},
        limit=Limit(ceiling, f"copy limit of this machine: busbw {ceiling:.1f} GB/s ({limit.way})"),
    )
    return charts_svg([chart], width=720, height=540)


def _line(rows: Sequence[Row], name: str) -> Line:
    title = title_of(rows, name)
    own = [row for row in rows if row.competitor == name]
    measured = [(row.work.size_bytes, row.main.bus_bandwidth) for row in own]
    return Line(
        title,
        [(math.log2(size), bandwidth) for size, bandwidth in measured],
        is_dashed=own[0].main.memory == "shared",
        notes=[f"{title}, {size_text(size)}: {bandwidth:.3g} GB/s" for size, bandwidth in measured],
    )


def page_of(rows: Sequence[Row], svg: str, title: str, command: str, remarks: Sequence[str]) -> str:
    """`remarks` are the lines about machine and competitors; `command` is what made this page."""
    head = "".join(f"<th>{heading}</th>" for heading in _HEADINGS)
    cells = ["".join(f"<td>{escape(cell)}</td>" for cell in _cells(row)) for row in rows]
    body = "\n".join(f"<tr>{row}</tr>" for row in cells)
    facts = "\n".join(escape(remark) for remark in remarks)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width"/>
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<pre>{escape(command)}</pre>
{svg}
<p>{escape(READING)}</p>
<table>
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table>
<pre>{facts}</pre>
</body>
</html>
"""


def _cells(row: Row) -> list[str]:
    left = [row.competitor, row.main.memory, size_text(row.work.size_bytes)]
    return [*left, *_figure_cells(row.out_of_place), *_figure_cells(row.in_place)]


def _figure_cells(figure: Figure | None) -> list[str]:
    if figure is None:
        return ["N/A", "N/A", "N/A"]
    wrong = "N/A" if figure.wrong is None else str(figure.wrong)
    return [f"{figure.seconds * 1e6:.1f}", f"{figure.bus_bandwidth:.2f}", wrong]
