"""Rows as people read them: the text table, the chart of bandwidths, and a page that needs nothing else."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from html import escape

from crossdevice.cli.bench.calibration import CopyLimit
from crossdevice.cli.bench.measure import Figure, Row
from crossdevice.cli.bench.workload import GIGABYTE, Workload
from crossdevice.cli.svg import Chart, Limit, Line, charts_svg
from crossdevice.values.quantities import size_text

_LEFT = "{:>12}  {:>12}  {:>8}  {:>6}  {:>6}"
_GROUP = "  {:>9}  {:>6}  {:>6}  {:>6}"
_NAMES = "  {:>6}  {:>9}  {}"
_GROUP_WIDTH = len(_GROUP.format("", "", "", ""))


def column_lines(*, compares: bool) -> list[str]:
    """Returns the columns and their units; with competitors, two more columns name the row's owner."""
    names = _NAMES.format("memory", "precision", "competitor") if compares else ""
    above = _LEFT.format(*[""] * 5) + f"{'out-of-place':^{_GROUP_WIDTH}}{'in-place':^{_GROUP_WIDTH}}"
    group = _GROUP.format("time", "algbw", "busbw", "#wrong")
    units = _GROUP.format("(us)", "(GB/s)", "(GB/s)", "")
    return [
        f"#{above[1:]}".rstrip(),
        f"#{_LEFT.format('size', 'count', 'type', 'redop', 'root')[1:]}{group}{group}{names}".rstrip(),
        f"#{_LEFT.format('(B)', '(elements)', '', '', '')[1:]}{units}{units}".rstrip(),
    ]


def row_line(row: Row, *, compares: bool) -> str:
    """Returns one competitor's row for one size."""
    work = row.work
    left = _LEFT.format(work.size_bytes, work.count, work.dtype, redop_of(work), work.root)
    names = _NAMES.format(row.main.memory, row.precision, row.competitor) if compares else ""
    return f"{left}{_group(row.out_of_place)}{_group(row.in_place)}{names}"


def footer_lines(rows: Sequence[Row], ours: Sequence[str]) -> list[str]:
    """Returns wrong values and average bandwidth: ours first, as in nccl-tests, then every competitor's."""
    wrong = num_wrong(rows, ours)
    verdict = "unchecked" if wrong is None else f"{wrong} {'OK' if wrong == 0 else 'FAILED'}"
    names = list(dict.fromkeys(row.competitor for row in rows))
    lines = [f"# {'Out of bounds values':<20} : {verdict}"]
    lines.append(f"# {'Avg bus bandwidth':<20} : {average_bus_bandwidth(rows, ours[:1]):.6g}")
    if len(names) > 1:
        width = max(map(len, names))
        for name in names:
            found = num_wrong(rows, [name])
            count = "unchecked" if found is None else f"{found} wrong"
            lines.append(f"#   {name:<{width}} {average_bus_bandwidth(rows, [name]):>9.4g} GB/s  {count}")
    return lines


def comparison_lines(rows: Sequence[Row]) -> list[str]:
    """Compares each competitor's time with the first one's, size by size."""
    names = list(dict.fromkeys(row.competitor for row in rows))
    if len(names) < 2:
        return []
    first, *others = names
    sizes = list(dict.fromkeys(row.work.size_bytes for row in rows))
    seconds = {(row.competitor, row.work.size_bytes): row.main.seconds for row in rows}
    width = max(len(title_of(rows, name)) for name in others)
    lines = [f"# Time / time of {title_of(rows, first)}; above 1 is slower than that"]
    lines.append(f"#   {'':<{width}}" + "".join(f"  {size_text(size):>9}" for size in sizes))
    for name in others:
        cells = [_ratio(seconds.get((name, size)), seconds.get((first, size))) for size in sizes]
        lines.append(f"#   {title_of(rows, name):<{width}}" + "".join(f"  {cell:>9}" for cell in cells))
    return lines


def title_of(rows: Sequence[Row], name: str) -> str:
    """Returns a competitor's name with the memory and destinations of its results."""
    figure = next(row.main for row in rows if row.competitor == name)
    where = {"given": "", "fresh": ", new results", "in_place": ", in place"}[figure.place]
    return f"{name} ({figure.memory}{where})"


def num_wrong(rows: Sequence[Row], names: Sequence[str]) -> int | None:
    """Counts the wrong values of these competitors; None if they were not checked."""
    figures = [figure for row in rows if row.competitor in names for figure in row.figures]
    if any(figure.wrong is None for figure in figures):
        return None
    return sum(figure.wrong or 0 for figure in figures)


def average_bus_bandwidth(rows: Sequence[Row], names: Sequence[str]) -> float:
    """Returns the mean of all busbw of these competitors over all sizes, as in nccl-tests."""
    found = [figure.bus_bandwidth for row in rows if row.competitor in names for figure in row.figures]
    return statistics.fmean(found) if found else 0.0


def redop_of(work: Workload) -> str:
    """Returns the `redop` column."""
    return work.op.lower() if work.reduces else "none"


def _group(figure: Figure | None) -> str:
    if figure is None:
        return _GROUP.format(*["N/A"] * 4)
    numbers = (figure.seconds * 1e6, figure.algorithm_bandwidth, figure.bus_bandwidth)
    wrong = "N/A" if figure.wrong is None else figure.wrong
    return _GROUP.format(*(f"{number:.2f}" for number in numbers), wrong)


def _ratio(seconds: float | None, first: float | None) -> str:
    return "N/A" if seconds is None or first is None else f"{seconds / first:.2f}x"


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
    """Draws the chart of each row's main figure. Lines of competitors with one shared result are dashed."""
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
    """Writes the page; `remarks` are about machine and competitors; `command` is what made the page."""
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
