"""What a run says: facts about the machine, the table as it grows, the footer, and the files."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import crossdevice
from crossdevice.cli.bench import table
from crossdevice.cli.bench.chart import svg_of
from crossdevice.cli.bench.json_record import as_json
from crossdevice.cli.bench.limit import CopyLimit, measured_limit
from crossdevice.cli.bench.measure import Row
from crossdevice.cli.bench.page import page_of
from crossdevice.cli.bench.workload import GIGABYTE, Workload, bytes_of
from crossdevice.kernels.host.fused_pass import selected_kernels
from crossdevice.kernels.host.resources.threads import num_threads
from crossdevice.values.device import host_device


class Report:
    """Prints what is known as soon as it is known, and keeps it for the files."""

    def __init__(self, arguments: argparse.Namespace, command: str, work: Workload, ours: list[str]) -> None:
        self._arguments = arguments
        self._command = command
        self._work = work
        self._ours = ours
        self._remarks: list[str] = []
        self._rows: list[Row] = []
        self._compares = False
        self._limit = CopyLimit(0.0, "")

    def remark(self, line: str) -> None:
        """A line about the machine or a competitor, said once."""
        if line not in self._remarks:
            self._remarks.append(line)
            print(f"# {line}", flush=True)

    def begin(self) -> None:
        """Facts, and the copy limit."""
        given = self._arguments
        self.remark(f"crossdevice {crossdevice.__version__} {given.collective}, {given.precision}")
        self.remark(machine())
        self.remark(
            f"nGpus {given.ngpus} minBytes {bytes_of(given.minbytes)} maxBytes {bytes_of(given.maxbytes)} "
            f"step: {given.stepfactor}(factor) warmup iters: {given.warmup_iters} iters: {given.iters} "
            f"validation: {given.check}"
        )
        self.remark(
            f"Using devices {host_device(0)} ... {host_device(given.ngpus - 1)}, logical, in one memory; "
            f"{given.backend} arrays; sizes in powers of two, GB = 10^9 bytes, times are medians"
        )
        self._limit = measured_limit()
        as_bus = self._work.bus_bandwidth_of_copy(self._limit.bytes_per_second) / GIGABYTE
        self.remark(
            f"copy limit {self._limit}: a busbw of {as_bus:.2f} GB/s if every result has its own memory"
        )

    def open_table(self, *, compares: bool) -> None:
        """The names of the columns."""
        self._compares = compares
        for line in table.column_lines(compares=compares):
            print(line, flush=True)

    def add(self, rows: Sequence[Row]) -> None:
        """The lines of one size."""
        self._rows += rows
        for row in rows:
            print(table.row_line(row, compares=self._compares), flush=True)

    def end(self) -> int:
        """The footer and the files; 1 if a result of ours was wrong."""
        for line in table.comparison_lines(self._rows):
            print(line)
        for line in table.footer_lines(self._rows, self._ours):
            print(line)
        if self._arguments.json is not None:
            self._write_json(self._arguments.json)
        if self._arguments.chart and self._rows:
            self._write_charts(self._arguments.chart)
        return 1 if table.num_wrong(self._rows, self._ours) else 0

    def _write_json(self, path: Path) -> None:
        about = {"command": self._command, "machine": machine(), "crossdevice": crossdevice.__version__}
        config = vars(self._arguments) | about
        written = as_json(self._rows, self._ours, self._limit, config, self._remarks)
        path.write_text(json.dumps(written, indent=1, default=str) + "\n", encoding="utf-8")

    def _write_charts(self, paths: Sequence[Path]) -> None:
        given, work = self._arguments, self._work
        words = [f"{given.collective} over {given.ngpus} devices", work.dtype, table.redop_of(work)]
        title = ", ".join(word for word in words if word != "none")
        svg = svg_of(self._rows, self._limit, title)
        page = page_of(self._rows, svg, title, self._command, self._remarks)
        for path in paths:
            path.write_text(svg if path.suffix == ".svg" else page, encoding="utf-8")


def machine() -> str:
    """Cores, threads, kernels and versions, in one line."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{platform.system()} {platform.machine()}, {cores} of {os.cpu_count()} cores, "
        f"{num_threads()} threads, kernels {selected_kernels()}, Python {platform.python_version()}, "
        f"NumPy {np.__version__}"
    )
