"""What a process that runs for long uses now and then, and whether that grows."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import crossdevice as cd

WARM_UP = 0.1
"""The part of a run that is not judged: caches fill, kernels are compiled."""

MAX_GROWTH_BYTES = 48 << 20
MAX_GROWTH = 0.05
"""Of memory, whichever is more."""

MAX_MORE = 3
"""Descriptors and threads, of which libraries open some late."""

MAX_SLOWDOWN = {"calls_per_processor_second": 0.3, "calls_per_second": 0.5}
"""Other programs take their part of caches and memory, and ranks wait for each other while these run."""

FOLDER = Path("/proc/self")


class Sample(NamedTuple):
    """What a process uses, and how many calls it made in a second since the last sample.

    By the clock, without the time in which its main thread waited for a processor that others had; and of
    the time that processors worked for it.
    """

    seconds: float
    memory_bytes: int
    descriptors: int
    threads: int
    calls_per_second: float
    calls_per_processor_second: float

    def __str__(self) -> str:
        return (
            f"{self.seconds:7.0f} s  {self.memory_bytes / 2**20:8.1f} MiB  {self.descriptors:4d} descriptors"
            f"  {self.threads:4d} threads  {self.calls_per_second:8.1f} calls/s"
            f"  {self.calls_per_processor_second:8.1f} calls/s of processors"
        )


def sampled(
    work: Callable[[], int],
    seconds: float,
    count: int | None = None,
    agreed: Callable[[bool], bool] = bool,
) -> Iterator[Sample]:
    """Does the work, which returns how many calls it made, again and again, and takes samples.

    Args:
        count: how many samples; by default one in 5 seconds, 6 to 60 of them.
        agreed: whether all agree that it is time for a sample, where several do the work together.
    """
    count = min(max(int(seconds // 5), 6), 60) if count is None else count
    start = time.monotonic()
    last, last_work, calls = start - _waited_seconds(), time.process_time(), 0
    for number in range(1, count + 1):
        calls += work()
        while not agreed(time.monotonic() >= start + seconds * number / count):
            calls += work()
        now, work_now = time.monotonic() - _waited_seconds(), time.process_time()
        per_second, per_work = calls / max(now - last, 1e-9), calls / max(work_now - last_work, 1e-9)
        yield sample(time.monotonic() - start, per_second, per_work)
        last, last_work, calls = now, work_now, 0


def _waited_seconds() -> float:
    """How long the main thread could have run, but others did."""
    try:
        return int((FOLDER / "schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):  # not on every kernel
        return 0.0


def sample(seconds: float, calls_per_second: float, calls_per_processor_second: float) -> Sample:
    """What this process uses now, without memory that waits for its next use."""
    cd.release_memory()
    pages = int((FOLDER / "statm").read_text().split()[1])
    return Sample(
        seconds,
        pages * os.sysconf("SC_PAGE_SIZE"),
        len(list((FOLDER / "fd").iterdir())),
        len(list((FOLDER / "task").iterdir())),
        calls_per_second,
        calls_per_processor_second,
    )


def drifts(samples: Sequence[Sample]) -> list[str]:
    """What has grown or slowed down from the first to the last third of what is judged.

    What is used swings, as things live until they are collected; what leaks is never given back. So of what
    is used the least counts, and of how fast calls are the median.
    """
    judged = samples[int(len(samples) * WARM_UP) :]
    third = max(len(judged) // 3, 1)

    def of_thirds(measure: Callable[[Iterable[float]], float], field: str) -> tuple[float, float]:
        first, last = (
            measure([getattr(each, field) for each in part]) for part in (judged[:third], judged[-third:])
        )
        return first, last

    found = []
    before, after = of_thirds(min, "memory_bytes")
    if after - before > max(MAX_GROWTH_BYTES, MAX_GROWTH * before):
        found.append(f"memory grew from {before / 2**20:.1f} to {after / 2**20:.1f} MiB")
    for field in ("descriptors", "threads"):
        before, after = of_thirds(min, field)
        if after - before > MAX_MORE:
            found.append(f"{field} grew from {before:g} to {after:g}")
    for field, slowdown in MAX_SLOWDOWN.items():
        before, after = of_thirds(statistics.median, field)
        if after < before * (1 - slowdown):
            found.append(f"{field.replace('_', ' ')} fell from {before:.1f} to {after:.1f}")
    return found
