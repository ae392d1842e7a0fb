"""The results as JSON, with the keys of nccl-tests' `-J` and a few more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from crossdevice.cli.bench.limit import CopyLimit
from crossdevice.cli.bench.measure import Figure, Row
from crossdevice.cli.bench.table import average_bus_bandwidth, num_wrong, redop_of
from crossdevice.cli.bench.workload import GIGABYTE


def as_json(
    rows: Sequence[Row],
    ours: Sequence[str],
    limit: CopyLimit,
    config: Mapping[str, Any],
    remarks: Sequence[str],
) -> dict[str, Any]:
    """`config` is what was asked for and what the machine is; times are in microseconds."""
    wrong = num_wrong(rows, ours)
    return {
        "config": dict(config),
        "copy_limit": {"bandwidth": limit.bytes_per_second / GIGABYTE, "way": limit.way},
        "results": [_result(row, limit) for row in rows],
        "out_of_bounds": {"count": wrong, "okay": None if wrong is None else wrong == 0},
        "average_bus_bandwidth": {"bandwidth": average_bus_bandwidth(rows, ours[:1]), "okay": "unchecked"},
        "remarks": list(remarks),
    }


def _result(row: Row, limit: CopyLimit) -> dict[str, Any]:
    work = row.work
    return {
        "competitor": row.competitor,
        "size": work.size_bytes,
        "count": work.count,
        "type": work.dtype,
        "redop": redop_of(work),
        "root": work.root,
        "out_of_place": _cells(row.out_of_place),
        "in_place": _cells(row.in_place),
        "moved_bytes": work.moved_bytes,
        "limit_bus_bw": work.bus_bandwidth_of_copy(limit.bytes_per_second) / GIGABYTE,
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
