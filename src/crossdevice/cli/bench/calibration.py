"""The speed of this machine: how fast it copies, and its topology as measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crossdevice.algorithms.direct_all_reduce import DirectAllReduce
from crossdevice.cli.bench.workload import GIGABYTE
from crossdevice.cli.terminal import write_file
from crossdevice.costs.timing import fused_pass_duration
from crossdevice.costs.topology import read_topology
from crossdevice.kernels.host.fused_pass import fused_batch
from crossdevice.kernels.host.resources.threads import num_threads, run_together
from crossdevice.values.distributed import PerReplica
from crossdevice.values.quantities import counted, size_text
from crossdevice.values.recipe import Recipe
from crossdevice.values.reduce_op import ReduceOp

LIMIT_BYTES = 128 << 20
"""Bytes that are copied to measure the limit: several times the largest caches."""

PIECE_BYTES = 1 << 20

ROUNDS = 7

Copy = Callable[[], None]
Arrays = Sequence[NDArray[Any]]


class CopyLimit(NamedTuple):
    """Bytes read and written per second, and how they were copied."""

    bytes_per_second: float
    way: str

    def __str__(self) -> str:
        return f"{self.bytes_per_second / GIGABYTE:.1f} GB/s read + written ({self.way})"


def seconds_of(copy: Copy) -> float:
    """Measures the seconds of one copy."""
    begin = time.perf_counter()
    copy()
    return time.perf_counter() - begin


def plain_copy(sources: Arrays, targets: Arrays) -> Copy:
    """Copies with the C library, on as many threads as a pass may use."""
    pieces = [
        (source[start : start + step], target[start : start + step])
        for source, target in zip(sources, targets, strict=True)
        for step in [max(1, PIECE_BYTES // source.itemsize)]
        for start in range(0, source.size, step)
    ]

    def run() -> None:
        left = iter(pieces)

        def work() -> None:
            for source, target in left:  # one iterator for all threads: each piece is taken once
                np.copyto(target, source)

        run_together(work, num_threads())

    return run


def streamed_copy(sources: Arrays, targets: Arrays) -> Copy:
    """Runs a fused pass of one input and one output; past the caches' size it writes around them."""
    tasks = [
        ((source.view(np.uint8).view(np.float32),), (target.view(np.uint8).view(np.float32),))
        for source, target in zip(sources, targets, strict=True)
    ]
    recipe = Recipe(ReduceOp.SUM, "fast")
    return lambda: fused_batch(tasks, recipe)


def measured_limit() -> CopyLimit:
    """Measures this machine's current copy limit."""
    size = LIMIT_BYTES // 4
    source, target = np.ones(size, np.float32), np.zeros(size, np.float32)
    copies = {way: ready([source], [target]) for way, ready in WAYS.items()}
    rounds = [{way: seconds_of(copy) for way, copy in copies.items()} for _ in range(ROUNDS + 1)]
    # The first round warms up.
    medians = {way: statistics.median(seconds[way] for seconds in rounds[1:]) for way in copies}
    fastest = min(medians, key=medians.__getitem__)
    return CopyLimit(2 * source.nbytes / medians[fastest], fastest)


WAYS = {"memcpy": plain_copy, "non-temporal stores": streamed_copy}
"""Every way of copying flat arrays."""


MIB = 1 << 20
SIZES = (MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB)

TURNS = 7
TURN_SECONDS = 0.05
TURN_CALLS = 5
"""Sizes take turns, so that a noisy moment does not fall on one of them alone."""

QUANTILE = 0.25
"""The lower quartile of all calls of a size: other work on a machine only makes calls slower."""

BUSY_SPREAD = 1.5
"""Upper quartile / lower quartile of a size's calls: above, too many of them were interrupted."""

FIT_STEPS = 20

MICROSECOND = 1e-6


class Fit(NamedTuple):
    """The time of a call, and the bytes per second that a pass reads and writes."""

    call_seconds: float
    bytes_per_second: float


def calibrate(path: Path, num_devices: int, *, turns: int = TURNS, shrink: int = 1) -> int:
    """Writes the topology of this host and prints its predictions next to measurements made now."""
    sizes = [size // shrink for size in SIZES]
    # Where arrays lie can make a pass twice as slow, so the check has the arrays of the fit.
    arrays = {size: (_arrays(num_devices, size), _arrays(num_devices, size)) for size in sizes}
    calls = _timed_calls(arrays, turns)
    # The first turn warms up; the others are dealt out, so that a change of load falls on both.
    to_fit, to_check = (_quantiles(calls, QUANTILE, slice(start, None, 2)) for start in (1, 2))
    moved = [2 * num_devices * size for size in to_fit]
    write_file(path, _file(fit(moved, list(to_fit.values()))))
    topology = read_topology(path, num_devices)
    print(f"# all-reduce on {counted(num_devices, 'device')} of this host, written to {path}")
    print("# measured: calls that the fit has not seen, lower quartile of each size")
    print(f"{'size':>9} {'measured':>12} {'predicted':>12}  us")
    for size, seconds in to_check.items():
        predicted = fused_pass_duration(num_devices, num_devices, size, topology).seconds
        times = f"{seconds / MICROSECOND:12.1f} {predicted / MICROSECOND:12.1f}"
        print(f"{size_text(size):>9} {times}  {predicted / seconds - 1:+.0%}")
    spread = spread_of(calls)
    if spread > BUSY_SPREAD:
        print(f"# calls of one size differ by a factor of {spread:.1f}: calibrate again on a quiet machine")
    return 0


def fit(moved_bytes: Sequence[int], seconds: Sequence[float]) -> Fit:
    """Fits the line that minimizes the squares of log(predicted / measured).

    So a prediction of half the time is as wrong as one of twice the time, and errors have no side.

    >>> fit([1000, 2000, 4000], [3.0, 5.0, 9.0])
    Fit(call_seconds=1.0, bytes_per_second=500.0)
    """
    x, t = np.array(moved_bytes, np.float64), np.array(seconds)
    proportional = Fit(0.0, float(np.exp(np.mean(np.log(x / t)))))
    call, slope = 0.0, 1 / proportional.bytes_per_second
    for _ in range(FIT_STEPS):  # Gauss-Newton
        line = call + slope * x
        step, *_ = np.linalg.lstsq(np.stack([1 / line, x / line], axis=1), np.log(t / line), rcond=None)
        call, slope = call + float(step[0]), slope + float(step[1])
        if call < 0 or slope <= 0:  # noise: no call takes less than nothing
            return proportional
    return Fit(round(call, 12), 1 / slope)


def _timed_calls(
    arrays: Mapping[int, tuple[PerReplica, PerReplica]], turns: int
) -> dict[int, list[list[float]]]:
    """Times all-reduces of each size into given memory, in alternation."""
    ops = DirectAllReduce()
    calls: dict[int, list[list[float]]] = {size: [] for size in arrays}
    for _ in range(2 * turns + 1):
        for size, (value, out) in arrays.items():
            seconds: list[float] = []
            while len(seconds) < TURN_CALLS or sum(seconds) < TURN_SECONDS:
                started = time.perf_counter()
                ops.reduce("sum", value, value, out=out)
                seconds.append(time.perf_counter() - started)
            calls[size].append(seconds)
    return calls


def _quantiles(
    calls: Mapping[int, Sequence[Sequence[float]]], quantile: float, turns: slice
) -> dict[int, float]:
    return {size: float(np.quantile(np.concatenate(found[turns]), quantile)) for size, found in calls.items()}


def spread_of(calls: Mapping[int, Sequence[Sequence[float]]]) -> float:
    """Returns the largest ratio of upper to lower quartile over all sizes."""
    low, high = (_quantiles(calls, quantile, slice(1, None)) for quantile in (QUANTILE, 1 - QUANTILE))
    return max(high[size] / low[size] for size in calls)


def _arrays(num_devices: int, num_bytes: int) -> PerReplica:
    return PerReplica([np.full(num_bytes // 4, number, np.float32) for number in range(num_devices)])


def _file(found: Fit) -> str:
    speed = found.bytes_per_second / GIGABYTE
    return f"""like = "host"
name = "this_host"
summary = "this host, as measured: logical devices that share its memory"
sources = ["crossdevice bench --calibrate"]

[links]
kind = "memory"
gigabytes_per_second = {speed:.4g}
latency_microseconds = 1
message_microseconds = 0.5

[memory]
gigabytes_per_second = {speed:.4g}
step_microseconds = {found.call_seconds / MICROSECOND:.4g}
"""
