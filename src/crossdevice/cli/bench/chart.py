"""Bandwidth against size: a line for each competitor, and the machine's copy limit."""

from __future__ import annotations

import math
from collections.abc import Sequence

from crossdevice.cli.bench.limit import CopyLimit
from crossdevice.cli.bench.measure import Row
from crossdevice.cli.bench.table import title_of
from crossdevice.cli.bench.workload import GIGABYTE
from crossdevice.cli.svg import Chart, Limit, Line, charts_svg
from crossdevice.plans.rendering import size_text


def svg_of(rows: Sequence[Row], limit: CopyLimit, title: str) -> str:
    """The chart of each row's main figure. Lines of competitors that share one result are dashed."""
    ceiling = rows[0].work.bus_bandwidth_of_copy(limit.bytes_per_second) / GIGABYTE
    sizes = sorted({row.work.size_bytes for row in rows})
    named = sizes[:: -(-len(sizes) // 10)]
    chart = Chart(
        title,
        "size",
        [_line(rows, name) for name in dict.fromkeys(row.competitor for row in rows)],
        y_label="busbw (GB/s)",
        x_names={math.log2(size): size_text(size) for size in named},
        limit=Limit(ceiling, f"copy limit of this machine: {limit}"),
    )
    return charts_svg([chart], width=720, height=540)


def _line(rows: Sequence[Row], name: str) -> Line:
    title, own = title_of(rows, name), [row for row in rows if row.competitor == name]
    return Line(
        title,
        [(math.log2(row.work.size_bytes), row.main.bus_bandwidth) for row in own],
        is_dashed=own[0].main.memory == "shared",
        notes=[
            f"{title}, {size_text(row.work.size_bytes)}: {row.main.bus_bandwidth:.3g} GB/s" for row in own
        ],
    )
