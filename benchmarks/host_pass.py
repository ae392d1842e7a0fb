"""Measures the fused host pass against the copy limit of this machine, in one process, interleaved.

    python benchmarks/host_pass.py [--rounds 15] [--threads 2] [--small]

The limit moves the same bytes as an all-reduce in which every replica gets memory of its own: N * S
read and N * S written, by a plain copy with the same threads, with non-temporal stores or with the C
library's memcpy, whichever is faster. Every figure is the median, over the rounds, of limit / time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from crossdevice.kernels.host.fused_pass import fused_batch, fused_pass, selected_kernels
from crossdevice.kernels.host.resources.pool import result_pool
from crossdevice.kernels.host.resources.threads import num_threads, run_together, set_num_threads
from crossdevice.values.quantities import time_text
from crossdevice.values.recipe import Recipe
from crossdevice.values.reduce_op import ReduceOp

REPLICAS = 8
MIB = 1 << 20
COPY = Recipe(ReduceOp.SUM, "fast")
FAST, ACCURATE, EXACT = (Recipe(ReduceOp.SUM, precision) for precision in ("fast", "accurate", "exact"))
MEAN = Recipe(ReduceOp.SUM, "accurate", divisor=REPLICAS)

Work = Callable[[], None]


def resnet50_sizes() -> list[int]:
    """Elements of the 161 gradients of ResNet-50, in the order of its layers.

    >>> sizes = resnet50_sizes()
    >>> len(sizes), sum(sizes)
    (161, 25557032)
    """
    sizes = [7 * 7 * 3 * 64, 64, 64]
    width_in = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions = [width_in * width, 9 * width * width, 4 * width * width]
            outputs = [width, width, 4 * width]
            if block == 0:
                convolutions.append(width_in * 4 * width)
                outputs.append(4 * width)
            for weights, channels in zip(convolutions, outputs, strict=True):
                sizes += [weights, channels, channels]
            width_in = 4 * width
    return [*sizes, 2048 * 1000, 1000]


def replicas_of(size: int, dtype: Any, random: np.random.Generator) -> list[np.ndarray]:
    return [random.standard_normal(size, dtype=np.float32).astype(dtype) for _ in range(REPLICAS)]


def aligned(size: int, dtype: Any) -> np.ndarray:
    """Memory as a caller who cares would bring it: whole lines, on a page."""
    item_bytes = np.dtype(dtype).itemsize
    raw = np.ones(size * item_bytes + 4096, np.uint8)
    start = -raw.ctypes.data % 4096
    return raw[start : start + size * item_bytes].view(dtype)


def plain_copy(sources: list[np.ndarray], targets: list[np.ndarray]) -> Work:
    """The C library's copy, by as many threads as a pass may use."""
    step = 1 << 18
    pieces = [
        (source[start : start + step], target[start : start + step])
        for source, target in zip(sources, targets, strict=True)
        for start in range(0, source.size, step)
    ]

    def run() -> None:
        left = iter(pieces)

        def work() -> None:
            # next() of one list iterator is atomic under the interpreter's lock.
            for source, target in left:
                np.copyto(target, source)

        run_together(work, num_threads())

    return run


def streamed_copy(sources: list[np.ndarray], targets: list[np.ndarray]) -> Work:
    tasks = [((source,), (target,)) for source, target in zip(sources, targets, strict=True)]
    return lambda: fused_batch(tasks, COPY)


def pass_into_new(inputs: list[np.ndarray], recipe: Recipe) -> Work:
    def run() -> None:
        results = [result_pool.empty(inputs[0].size, inputs[0].dtype) for _ in inputs]
        fused_pass(inputs, results, recipe)

    return run


def medians(works: dict[str, Work], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(2):
        for work in works.values():
            work()
    for _ in range(rounds):
        for name, work in works.items():
            begin = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - begin)
    return times


class Report:
    """Prints ratios beside their floors and aims, and remembers what missed its floor."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.missed: list[str] = []

    def of_limit(
        self, title: str, works: dict[str, tuple[Work, float, float]], limits: dict[str, Work]
    ) -> None:
        times = medians({**limits, **{name: work for name, (work, _, _) in works.items()}}, self.rounds)
        limit_name = min(limits, key=lambda name: statistics.median(times[name]))
        limit = times[limit_name]
        print(f"{title}: limit ({limit_name}) {time_text(statistics.median(limit))}")
        for name, (_, floor, aim) in works.items():
            ratio = statistics.median(a / b for a, b in zip(limit, times[name], strict=True))
            milliseconds = statistics.median(times[name]) * 1e3
            self.line(
                f"  {name:<44}{milliseconds:9.2f} ms {ratio:7.0%}", ratio >= floor, f"{floor:.0%}, {aim:.0%}"
            )

    def line(self, text: str, reached: bool, floor_and_aim: str) -> None:
        print(f"{text}   floor, aim {floor_and_aim}   {'ok' if reached else 'BELOW'}")
        if not reached:
            self.missed.append(text.strip())


def measure_large(report: Report, mebibytes: int, random: np.random.Generator) -> None:
    size = mebibytes * MIB // 4
    inputs = replicas_of(size, np.float32, random)
    outputs = [aligned(size, np.float32) for _ in inputs]
    works = {
        "fast, results reused": (lambda: fused_pass(inputs, outputs, FAST), 0.9, 1.0),
        "accurate, results reused": (lambda: fused_pass(inputs, outputs, ACCURATE), 0.8, 0.95),
        "accurate mean, results reused": (lambda: fused_pass(inputs, outputs, MEAN), 0.8, 0.95),
        "exact, results reused": (lambda: fused_pass(inputs, outputs, EXACT), 0.5, 0.8),
        "accurate, results from the pool": (pass_into_new(inputs, ACCURATE), 0.7, 0.9),
    }
    limits = {"memcpy": plain_copy(inputs, outputs), "streamed": streamed_copy(inputs, outputs)}
    report.of_limit(f"{REPLICAS} x {mebibytes} MiB float32", works, limits)


def measure_bfloat16(report: Report, mebibytes: int, random: np.random.Generator) -> None:
    size = mebibytes * MIB // 2
    inputs = replicas_of(size, ml_dtypes.bfloat16, random)
    outputs = [aligned(size, ml_dtypes.bfloat16) for _ in inputs]
    words = [[array.view(np.float32) for array in arrays] for arrays in (inputs, outputs)]
    works = {"accurate, results reused": (lambda: fused_pass(inputs, outputs, ACCURATE), 0.7, 0.9)}
    limits = {"memcpy": plain_copy(*words), "streamed": streamed_copy(*words)}
    report.of_limit(f"{REPLICAS} x {mebibytes} MiB bfloat16", works, limits)


def measure_gradients(report: Report, random: np.random.Generator) -> None:
    sizes = resnet50_sizes()
    inputs = [replicas_of(size, np.float32, random) for size in sizes]
    flat = [(size, np.float32) for size in sizes for _ in range(REPLICAS)]

    def grouped(arrays: list[np.ndarray]) -> list[list[np.ndarray]]:
        return [arrays[start : start + REPLICAS] for start in range(0, len(arrays), REPLICAS)]

    reused = grouped([aligned(size, dtype) for size, dtype in flat])
    works = {
        "batch mean, results reused": (
            lambda: fused_batch(list(zip(inputs, reused, strict=True)), MEAN),
            0.7,
            0.9,
        ),
        "batch mean, results from the pool": (
            lambda: fused_batch(list(zip(inputs, grouped(result_pool.empty_batch(flat)), strict=True)), MEAN),
            0.7,
            0.9,
        ),
    }
    # As one array for each replica, so that the limit has no small arrays to deal with.
    sources = replicas_of(sum(sizes), np.float32, random)
    targets = [aligned(sum(sizes), np.float32) for _ in range(REPLICAS)]
    limits = {"memcpy": plain_copy(sources, targets), "streamed": streamed_copy(sources, targets)}
    report.of_limit(f"ResNet-50 gradients, {len(sizes)} arrays, {REPLICAS} replicas", works, limits)


def measure_one_element(report: Report) -> None:
    inputs = [np.ones(1, np.float32) for _ in range(REPLICAS)]
    outputs = [np.empty(1, np.float32) for _ in range(REPLICAS)]
    for name, recipe in (("fast", FAST), ("accurate", ACCURATE), ("accurate mean", MEAN), ("exact", EXACT)):
        times = []
        for _ in range(20):
            begin = time.perf_counter()
            for _ in range(500):
                fused_pass(inputs, outputs, recipe)
            times.append((time.perf_counter() - begin) / 500)
        seconds = statistics.median(times)
        report.line(
            f"one element, {REPLICAS} replicas, {name:<16}{time_text(seconds):>10}",
            seconds < 30e-6,
            "30, 12 us",
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--small", action="store_true", help="16 MiB instead of 100, 8 instead of 50")
    options = parser.parse_args()
    set_num_threads(options.threads)
    random = np.random.default_rng(0)
    report = Report(options.rounds)
    print(f"kernels {selected_kernels()}, {num_threads()} threads, {options.rounds} rounds")
    measure_one_element(report)
    measure_large(report, 16, random)
    if not options.small:
        measure_large(report, 100, random)
    measure_bfloat16(report, 8 if options.small else 50, random)
    measure_gradients(report, random)
    print(f"pool: {result_pool.statistics()}")
    for text in report.missed:
        print(f"below its floor: {text}")
    return 1 if report.missed else 0


if __name__ == "__main__":
    sys.exit(main())
