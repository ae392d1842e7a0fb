"""How fast fingerprints are, beside a pass that only reads the same memory, and beside SHA-256 and CRC-32.

`python benchmarks/fingerprints.py` prints one line per size, and fails where that of contiguous arrays
reaches less than FLOOR of the speed of reading. Arrays are taken in turn from as many as do not fit into a
cache, by the same threads on both sides, and rounds of both alternate: only the ratio is to be trusted.

`--gpu` does so on a GPU, by its own events, beside PyTorch's sum of the same memory as float32. The speed of
a copy, and the time of a whole call, which waits for the digest on the host, are printed, too.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

import crossdevice as cd
from crossdevice.kernels.host.resources.threads import run_together

FLOOR, STRIDED_FLOOR = 0.8, 0.3
SIZES = (1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20)
BEYOND_CACHE = 256 << 20
PIECE_WORDS = 64 << 10

GPU_SIZES = (1 << 20, 64 << 20, 1 << 30)
BEYOND_GPU_CACHE = 1 << 30
MAX_LAUNCHES = 256
"""Of a kind in a row: more fill the queue of the GPU while it is kept busy."""

HEAD_START_CYCLES = 40_000_000
"""For which the GPU is kept busy before it is timed, so that it never waits for Python."""

Array = NDArray[Any]


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def folded(words: NDArray[np.int64]) -> np.int64:
    """Reads every word, and does as little with it as may be."""
    found = np.int64(0)
    for word in words:
        found ^= word
    return found


def read(array: Array) -> None:
    """Reads memory with as many threads as a fingerprint."""
    words = array.reshape(-1, order="A").view(np.int64)
    starts = itertools.count(0, PIECE_WORDS)

    def take() -> None:
        while (start := next(starts)) < words.size:
            folded(words[start : start + PIECE_WORDS])

    run_together(take, cd.num_threads())


def seconds(call: Callable[[Array], object], arrays: Sequence[Array]) -> float:
    """Of one array, on average over all of them."""
    start = time.perf_counter()
    for array in arrays:
        call(array)
    return (time.perf_counter() - start) / len(arrays)


def compare(name: str, num_bytes: int, rounds: int, arrays: Sequence[Array], floor: float) -> bool:
    """Prints a line; returns True if the fingerprint is as fast as it should be."""
    calls: dict[str, Callable[[Array], object]] = {"read": read, "fingerprint": cd.fingerprint}
    times: dict[str, list[float]] = {each: [] for each in calls}
    for _ in range(rounds + 1):
        for each, call in calls.items():
            times[each].append(seconds(call, arrays))
    ratios = [a / b for a, b in zip(times["read"][1:], times["fingerprint"][1:], strict=True)]
    ratio, fastest = statistics.median(ratios), min(times["fingerprint"])
    print(
        f"{num_bytes >> 20:4} MiB {name:12} {num_bytes / fastest / 1e9:6.1f} GB/s"
        f"  {ratio:5.2f} of reading (floor {floor})"
    )
    return ratio >= floor


def compare_on_gpu(num_bytes: int, rounds: int) -> bool:
    """Prints a line; returns True if arrays on a GPU are digested as fast as they should be."""
    import torch

    from crossdevice.kernels.cuda.gpu_fingerprint import add_sums

    device = torch.device("cuda")
    arrays = [torch.ones(num_bytes // 4, device=device) for _ in range(max(2, BEYOND_GPU_CACHE // num_bytes))]
    arrays = arrays[:MAX_LAUNCHES]
    total = torch.zeros(4, dtype=torch.int64, device=device)
    target, mean = torch.empty_like(arrays[0]), torch.empty((), device=device)

    def gpu_seconds(call: Callable[[Any], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HEAD_START_CYCLES)
        start.record()
        for array in arrays:
            call(array)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / len(arrays)

    calls: dict[str, Callable[[Any], object]] = {
        "sum": lambda array: torch.sum(array, dim=0, out=mean),
        "copy": target.copy_,
        "fingerprint": lambda array: add_sums(array.view(torch.uint8), total),
    }
    times: dict[str, list[float]] = {each: [] for each in (*calls, "call")}
    for _ in range(rounds + 1):
        for each, call in calls.items():
            times[each].append(gpu_seconds(call))
        times["call"].append(seconds(cd.fingerprint, arrays))
    of_sum, of_copy, of_ours, of_call = (statistics.median(each[1:]) for each in times.values())
    print(
        f"{num_bytes >> 20:4} MiB on a GPU  {num_bytes / of_ours / 1e9:6.0f} GB/s ({of_ours * 1e6:.1f} us)"
        f"  sum {num_bytes / of_sum / 1e9:6.0f}  copy {2 * num_bytes / of_copy / 1e9:6.0f} GB/s"
        f"  {of_sum / of_ours:5.2f} of reading (floor {FLOOR})  a call {of_call * 1e6:.0f} us"
    )
    return of_sum / of_ours >= FLOOR


def main() -> None:
    """Compares all sizes; exits with 1 below a floor."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--gpu", action="store_true", help="arrays in the memory of a GPU")
    arguments = parser.parse_args()
    rounds = arguments.rounds
    if arguments.gpu:
        sys.exit(0 if all(list(map(functools.partial(compare_on_gpu, rounds=rounds), GPU_SIZES))) else 1)
    are_fast = []
    for num_bytes in SIZES:
        side = int((num_bytes // 4) ** 0.5)
        arrays = [np.ones((side, side), np.float32) for _ in range(max(1, BEYOND_CACHE // num_bytes))]
        num_bytes = arrays[0].nbytes
        are_fast.append(compare("contiguous", num_bytes, rounds, arrays, FLOOR))
        turned = [array.T for array in arrays]
        are_fast.append(compare("transposed", num_bytes, rounds, turned, STRIDED_FLOOR))
    memory = np.ones(16 << 20, np.uint8)
    others: dict[str, Callable[[Any], object]] = {"SHA-256": hashlib.sha256, "CRC-32": zlib.crc32}
    for name, call in others.items():
        print(f"  16 MiB {name:12} {memory.size / seconds(call, [memory]) / 1e9:6.1f} GB/s")
    sys.exit(0 if all(are_fast) else 1)


if __name__ == "__main__":
    main()
