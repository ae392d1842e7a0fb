"""The copy speed of this machine: an upper bound for everything that reads and writes memory.

Two ways of copying are tried, each with as many threads as a pass may use: the C library's, and
non-temporal stores, which do not read what they are about to overwrite. The faster one is the limit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crossdevice.cli.bench.workload import GIGABYTE
from crossdevice.kernels.host.fused_pass import fused_batch
from crossdevice.kernels.host.resources.threads import num_threads, run_together
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
    """The C library's copy, by as many threads as a pass may use."""
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
    """A fused pass of one input and one output, which past the caches' size writes around them."""
    tasks = [
        ((source.view(np.uint8).view(np.float32),), (target.view(np.uint8).view(np.float32),))
        for source, target in zip(sources, targets, strict=True)
    ]
    recipe = Recipe(ReduceOp.SUM, "fast")
    return lambda: fused_batch(tasks, recipe)


def measured_limit() -> CopyLimit:
    """The copy limit of this machine, now."""
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
