"""The output of a run: facts about the machine, the growing table, the footer, and the files."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from typing import Any

import numpy as np

import crossdevice
from crossdevice.cli.arguments import size_in_bytes
from crossdevice.cli.bench import tables
from crossdevice.cli.bench.calibration import measured_limit
from crossdevice.cli.bench.measure import Figure, Row
from crossdevice.cli.bench.tables import page_of, svg_of
from crossdevice.cli.bench.workload import GIGABYTE, Workload
from crossdevice.kernels.host.fused_pass import selected_kernels
from crossdevice.kernels.host.resources.threads import num_threads
from crossdevice.values.device import host_device


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
        for line in tables.column_lines(compares=compares):
            print(line, flush=True)

    def add(self, rows: Sequence[Row]) -> None:
        """Prints the rows of one size."""
        self._rows += rows
        for row in rows:
            print(tables.row_line(row, compares=self._compares), flush=True)

    def end(self) -> int:
        """Prints the footer and writes the files; returns 1 if a result of ours was wrong."""
        given, work = self._arguments, self._work
        for line in (*tables.comparison_lines(self._rows), *tables.footer_lines(self._rows, self._ours)):
            print(line)
        if given.json is not None:
            given.json.write_text(json.dumps(self._record(), indent=1, default=str) + "\n", encoding="utf-8")
        if given.chart and self._rows:
            words = [f"{given.collective} over {given.ngpus} devices", work.dtype, tables.redop_of(work)]
            title = ", ".join(word for word in words if word != "none")
            svg = svg_of(self._rows, self._limit, title)
            page = page_of(self._rows, svg, title, self._command, self._remarks)
            for path in given.chart:
                path.write_text(svg if path.suffix == ".svg" else page, encoding="utf-8")
        return 1 if tables.num_wrong(self._rows, self._ours) else 0

    def _record(self) -> dict[str, Any]:
        """Returns the results with the keys of nccl-tests' `-J` and a few more; times are in microseconds."""
        about = {"command": self._command, "machine": machine(), "crossdevice": crossdevice.__version__}
        wrong = tables.num_wrong(self._rows, self._ours)
        average = tables.average_bus_bandwidth(self._rows, self._ours[:1])
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
            "redop": tables.redop_of(work),
            "root": work.root,
            "out_of_place": _cells(row.out_of_place),
            "in_place": _cells(row.in_place),
            "moved_bytes": work.moved_bytes,
            "limit_bus_bw": work.bus_bandwidth_of_copy(self._limit.bytes_per_second) / GIGABYTE,
        }


def _cells(figure: Figure | None) -> dict[str, Any] | None:
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
        f"{platform.system()} {platform.machine()}, {cores} of {os.cpu_count()} cores, "
        f"{num_threads()} threads, kernels {selected_kernels()}, Python {platform.python_version()}, "
        f"NumPy {np.__version__}"
    )
