"""The price of `exact`: how many times as long as `accurate` it takes, by dtype, replicas, size and data.

    python benchmarks/exact.py [--dtypes NAMES] [--replicas NUMBERS] [--sizes NAMES] [--rounds N]
                               [--cpu] [--plain]

Two kinds of data: standard normal numbers, and such numbers whose magnitudes differ between replicas by up to
10^11 (10^10 in float16, which holds no more). Bound reductions with `out=` take turns, `exact` and
`accurate`, and medians are compared; a ratio above its target is marked by `!`. Results of a sample are
compared with fractions. Run it on a quiet machine; on a busy one `--cpu` counts the processor time of one
thread. `--plain` measures known calls of `ops.reduce` in place of bound ones.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import crossdevice as cd
from crossdevice.cli.bench.report import machine

DTYPES = ("float32", "bfloat16", "float16", "complex64", "float64")
REPLICAS = (2, 8, 32)
SIZES = {"1KiB": 1 << 10, "64KiB": 1 << 16, "1MiB": 1 << 20, "16MiB": 1 << 24}
TURN_SECONDS = 0.002
NUM_CHECKED = 40

Array = NDArray[Any]
Clock = Callable[[], float]


def target(num_bytes: int, replicas: int) -> float:
    """What the ratio is to be at most."""
    if num_bytes < 1 << 16:
        return 2.0
    return 1.1 if num_bytes >= 1 << 24 and replicas >= 8 else 1.5


def arrays_of(dtype: str, replicas: int, num_bytes: int, *, is_spread: bool) -> list[Array]:
    """The replicas' arrays."""
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    parts = 2 if kind.kind == "c" else 1
    size = num_bytes // kind.itemsize * parts
    generator = np.random.default_rng(size)
    # One pool for all replicas: making normal numbers takes longer than measuring.
    pool = generator.standard_normal(size + 4099 * replicas)
    if is_spread:
        first = -7 if dtype == "float16" else -6
        pool *= 10.0 ** generator.integers(first, first + 11 if dtype == "float16" else 6, pool.size)
    pool = pool.astype(np.float32 if parts == 2 else kind)
    return [pool[4099 * number :][:size].copy().view(kind) for number in range(replicas)]


def seconds(call: Callable[[], object], repeats: int, clock: Clock) -> float:
    """Of one call."""
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats


def measured(
    arrays: list[Array], op: str, rounds: int, clock: Clock, *, is_plain: bool
) -> tuple[float, float]:
    """Median seconds of `exact`, and of `accurate`."""
    calls: list[Callable[[], object]] = []
    for precision in ("exact", "accurate"):
        ops = cd.DirectAllReduce()
        outs = [np.empty_like(arrays[0])]
        value = cd.PerReplica(arrays)
        options = cd.CommunicationOptions(precision=precision)
        call: Callable[[], object] = ops.bind(op, value, "cpu:0", options=options, out=outs[0])
        if is_plain:
            call = functools.partial(ops.reduce, op, value, "cpu:0", options=options, out=outs[0])
        call()
        calls.append(call)
        if precision == "exact":
            check(arrays, op, outs[0])
    repeats = max(1, round(TURN_SECONDS / seconds(calls[1], 1, clock)))
    turns: list[list[float]] = [[], []]
    for _ in range(rounds + 1):
        for times, call in zip(turns, calls, strict=True):
            times.append(seconds(call, repeats, clock))
    exact, accurate = (statistics.median(times[1:]) for times in turns)
    return exact, accurate


def check(arrays: list[Array], op: str, out: Array) -> None:
    """Compares a sample with what fractions say."""
    parts = np.float32 if out.dtype.kind == "c" else out.dtype
    columns = np.stack([array[:NUM_CHECKED].view(parts).astype(np.float64) for array in arrays])
    results: list[Any] = list(out[:NUM_CHECKED].view(parts))
    for column, found in zip(columns.T, results, strict=True):
        true = sum(map(Fraction, column.tolist()), Fraction(0)) / (len(arrays) if op == "mean" else 1)
        if not np.isfinite(np.float64(found)):
            continue
        beside = [np.nextafter(found, found.dtype.type(side)) for side in (-np.inf, np.inf)]
        error = abs(Fraction(float(found)) - true)
        if any(abs(Fraction(float(near)) - true) < error for near in beside if np.isfinite(near)):
            sys.exit(f"WRONG: {op} of {column} is {found}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--replicas", default=",".join(map(str, REPLICAS)))
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cpu", action="store_true", help="one thread, and its processor time")
    parser.add_argument("--plain", action="store_true", help="known calls instead of bound ones")
    arguments = parser.parse_args()
    if arguments.cpu:
        cd.set_num_threads(1)
    clock = time.thread_time if arguments.cpu else time.perf_counter
    sizes = arguments.sizes.split(",")
    kinds = [(op, is_spread) for is_spread in (False, True) for op in ("sum", "mean")]
    names = [f"{op} {'spread' if is_spread else 'alike'}" for op, is_spread in kinds]
    print(f"# {machine()}, {cd.num_threads()} threads, {arguments.rounds} rounds")
    what = f"{'known calls' if arguments.plain else 'bound'}, {'processor' if arguments.cpu else 'wall'} time"
    print(f"# exact / accurate (microseconds of exact), {what}")
    print("# alike: one magnitude, spread: up to 10^11 apart")
    print(f"{'':<22} {'target':>6}  " + "".join(f"{name:>20}" for name in names))
    missed = count = 0
    for dtype in arguments.dtypes.split(","):
        for replicas in map(int, arguments.replicas.split(",")):
            for size in sizes:
                most, cells = target(SIZES[size], replicas), []
                for is_spread in (False, True):
                    arrays = arrays_of(dtype, replicas, SIZES[size], is_spread=is_spread)
                    for op in ("sum", "mean"):
                        exact, accurate = measured(
                            arrays, op, arguments.rounds, clock, is_plain=arguments.plain
                        )
                        ratio = exact / accurate
                        missed, count = missed + (ratio > most), count + 1
                        mark = "!" if ratio > most else " "
                        cells.append(f"{ratio:.2f}{mark} ({exact * 1e6:.1f})")
                line = f"{dtype:<10} {replicas:>3} x {size:<6} {most:>6}  "
                print(line + "".join(f"{cell:>20}" for cell in cells), flush=True)
    print(f"# {missed} of {count} ratios above their target")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
