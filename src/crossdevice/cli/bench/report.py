"""The output of a run: facts about the machine, the growing table, the footer, and the files."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

import crossdevice
from crossdevice.cli.bench.calibration import CopyLimit, measured_limit
from crossdevice.cli.bench.measure import Figure, Row
from crossdevice.cli.bench.workload import GIGABYTE, Workload
from crossdevice.cli.svg import Chart, Limit, Line, charts_svg
from crossdevice.cli.terminal import size_in_bytes, write_file
from crossdevice.kernels.host.fused_pass import selected_kernels
from crossdevice.kernels.host.resources.threads import num_threads
from crossdevice.values.device import host_device
from crossdevice.values.quantities import counted, size_text

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


class Report:
    """Output that is printed as soon as it is known, and kept for the files."""

    def __init__(self, arguments: argparse.Namespace, command: str, work: Workload, ours: list[str]) -> None:
        self._arguments = arguments
        self._command = command
        self._work = work
        self._ours = ours
        self._remarks: list[str] = []
        self._rows: list[Row] = []
        self._compares = False

    def remark(self, line: str) -> None:
        """Prints a line about the machine or a competitor, once."""
        if line not in self._remarks:
            self._remarks.append(line)
            print(f"# {line}", flush=True)

    def begin(self) -> None:
        """Facts, and the copy limit."""
        given = self._arguments
        self.remark(f"crossdevice {crossdevice.__version__} {given.collective}, {given.precision}")
        self.remark(machine())
        self.remark(
            f"nGpus {given.ngpus} minBytes {size_in_bytes(given.minbytes)} "
            f"maxBytes {size_in_bytes(given.maxbytes)} "
            f"step: {given.stepfactor}(factor) warmup iters: {given.warmup_iters} iters: {given.iters} "
            f"validation: {given.check}"
        )
        self.remark(
            f"Using devices {host_device(0)} ... {host_device(given.ngpus - 1)}, logical, in one memory; "
            f"{given.backend} arrays; sizes in powers of two, GB = 10^9 bytes, times are medians"
        )
        self._limit = measured_limit()
        bus = self._work.bus_bandwidth_of_copy(self._limit.bytes_per_second) / GIGABYTE
        self.remark(f"copy limit {self._limit}: a busbw of {bus:.2f} GB/s if every result has its own memory")

    def open_table(self, *, compares: bool) -> None:
        """Prints the column headers."""
        self._compares = compares
        for line in column_lines(compares=compares):
            print(line, flush=True)

    def add(self, rows: Sequence[Row]) -> None:
        """Prints the rows of one size."""
        self._rows += rows
        for row in rows:
            print(row_line(row, compares=self._compares), flush=True)

    def end(self) -> int:
        """Prints the footer and writes the files; returns 1 if a result of ours was wrong."""
        given, work = self._arguments, self._work
        for line in (*comparison_lines(self._rows), *footer_lines(self._rows, self._ours)):
            print(line)
        if given.json is not None:
            write_file(given.json, json.dumps(self._record(), indent=1, default=str) + "\n")
        if given.chart and self._rows:
            words = [f"{given.collective} over {counted(given.ngpus, 'device')}", work.dtype, redop_of(work)]
            title = ", ".join(word for word in words if word != "none")
            svg = svg_of(self._rows, self._limit, title)
            page = page_of(self._rows, svg, title, self._command, self._remarks)
            for path in given.chart:
                write_file(path, svg if path.suffix == ".svg" else page)
        return 1 if num_wrong(self._rows, self._ours) else 0

    def _record(self) -> dict[str, Any]:
        """Returns the results with the keys of nccl-tests' `-J` and a few more; times are in microseconds."""
        about = {"command": self._command, "machine": machine(), "crossdevice": crossdevice.__version__}
        wrong = num_wrong(self._rows, self._ours)
        average = average_bus_bandwidth(self._rows, self._ours[:1])
        return {
            "config": vars(self._arguments) | about,
            "copy_limit": {"bandwidth": self._limit.bytes_per_second / GIGABYTE, "way": self._limit.way},
            "results": [self._result(row) for row in self._rows],
            "out_of_bounds": {"count": wrong, "okay": None if wrong is None else wrong == 0},
            "average_bus_bandwidth": {"bandwidth": average, "okay": "unchecked"},
            "remarks": self._remarks,
        }

    def _result(self, row: Row) -> dict[str, Any]:
        work = row.work
        return {
            "competitor": row.competitor,
            "size": work.size_bytes,
            "count": work.count,
            "type": work.dtype,
            "redop": redop_of(work),
            "root": work.root,
            "out_of_place": _recorded(row.out_of_place),
            "in_place": _recorded(row.in_place),
            "moved_bytes": work.moved_bytes,
            "limit_bus_bw": work.bus_bandwidth_of_copy(self._limit.bytes_per_second) / GIGABYTE,
        }


def _recorded(figure: Figure | None) -> dict[str, Any] | None:
    if figure is None:
        return None
    return {
        "time": figure.seconds * 1e6,
        "alg_bw": figure.algorithm_bandwidth,
        "bus_bw": figure.bus_bandwidth,
        "nwrong": figure.wrong,
        "memory": figure.memory,
        "results": figure.place,
    }


def machine() -> str:
    """Cores, threads, kernels and versions, in one line."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{platform.system()} {platform.machine()}, {cores} of {counted(os.cpu_count() or 1, 'core')}, "
        f"{counted(num_threads(), 'thread')}, kernels {selected_kernels()}, Python "
        f"{platform.python_version()}, NumPy {np.__version__}"
    )
