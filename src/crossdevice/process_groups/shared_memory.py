"""Memory that ranks of a group share because they run on one host; `host_agreement.py` finds out who does."""

from __future__ import annotations

import mmap
import os
import platform
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.errors import OptionError
from crossdevice.process_groups.process_times import start_time_of
from crossdevice.process_groups.shared_arrays import Bytes, SharedArrays
from crossdevice.process_groups.shared_steps import SharedSteps, steps_bytes

SHARED_MEMORY_VARIABLE = "CROSSDEVICE_SHARED_MEMORY"

WINDOW_BYTES = 2 << 20
"""What one rank can show the others at once. More has to go in several steps, and less stays in caches."""


class SharedMemory:
    """The memory of ranks of one host, seen from one: steps, and windows for what they show each other.

    For each of two steps in turn every rank has one window for what it brings and one for what it makes of
    it. A rank writes to its own windows only.
    """

    def __init__(self, memory: mmap.mmap, rank: int, processes: list[tuple[int, int]]) -> None:
        """`rank` counts those of this host; `processes` has the id and the start time of each of them."""
        size = len(processes)
        self.rank = rank
        self.steps = SharedSteps(memory, rank, size, processes)
        self.arrays = SharedArrays(processes)
        windows = np.frombuffer(memory, np.uint8)[steps_bytes(size) : memory_bytes(size)]
        pages = windows.reshape(2, 2, size, WINDOW_BYTES)
        self.brought: list[list[Bytes]] = [list(pages[0, parity]) for parity in (0, 1)]
        """By parity of the step and by rank."""
        self.made: list[list[Bytes]] = [list(pages[1, parity]) for parity in (0, 1)]
        self.on_shown: Callable[[NDArray[Any]], None] | None = None
        """Called with what this rank has put into a window, before others read it: for faults on purpose."""


def memory_bytes(size: int) -> int:
    """What so many ranks need of it."""
    return steps_bytes(size) + 4 * size * WINDOW_BYTES


def is_wanted(given: bool | None) -> bool:
    """Whether a group is to use shared memory: as it was told, else as the variable says, else yes."""
    if given is not None:
        return given
    word = os.environ.get(SHARED_MEMORY_VARIABLE, "1")
    if word not in ("0", "1"):
        raise OptionError(f"{SHARED_MEMORY_VARIABLE} must be 0 or 1; got {word!r}")
    return word == "1"


def unavailable_reason() -> str | None:
    """Reason why this process cannot share memory with others; None if it can."""
    if sys.platform != "linux":
        return f"it is implemented for Linux, and this is {sys.platform}"
    if platform.machine() != "x86_64":
        return f"it is implemented for x86-64, and this is {platform.machine()}"
    if start_time_of(os.getpid()) is None:
        return "/proc cannot be read"
    return None
