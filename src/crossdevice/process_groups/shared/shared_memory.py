"""Memory that ranks of a group share on one host; `host_agreement.py` finds these ranks."""

from __future__ import annotations

import mmap
import os
import platform
import struct
import sys
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice import runtime
from crossdevice.errors import OptionError
from crossdevice.process_groups.shared.shared_arrays import Bytes, SharedArrays
from crossdevice.process_groups.shared.shared_steps import SharedSteps, start_time_of, steps_bytes

WINDOW_BYTES = 2 << 20
"""Bytes that one rank can show the others at once. More takes several steps; less fits caches worse."""


NOTE_BYTES = 4096
"""Bytes for a rank's note, readable even if the engine's board is gone."""

_NOTE = struct.Struct("<II")


class SharedMemory:
    """The shared memory of one host, as one rank sees it: steps, windows for data, and notes.

    For each of two steps in turn every rank has one window for what it brings and one for what it makes of
    it. A rank writes to its own windows only.
    """

    def __init__(self, memory: mmap.mmap, rank: int, processes: list[tuple[int, int]]) -> None:
        """`rank` counts those of this host; `processes` has the id and start time of each."""
        size = len(processes)
        self.rank = rank
        self.steps = SharedSteps(memory, rank, size, processes)
        self.arrays = SharedArrays(processes)
        self._memory, self._size = memory, size
        self._notes_start = steps_bytes(size) + 4 * size * WINDOW_BYTES
        windows = np.frombuffer(memory, np.uint8)[steps_bytes(size) : self._notes_start]
        pages = windows.reshape(2, 2, size, WINDOW_BYTES)
        self.brought: list[list[Bytes]] = [list(pages[0, parity]) for parity in (0, 1)]
        """Windows by parity of the step and by rank."""
        self.made: list[list[Bytes]] = [list(pages[1, parity]) for parity in (0, 1)]
        self.on_shown: Callable[[NDArray[Any]], None] | None = None
        """Called with what this rank has put into a window, before others read it: for fault injection."""

    def put_note(self, text: str) -> bool:
        """Puts this rank's note in place of its last one; returns False if it is too long."""
        note = text.encode()
        if _NOTE.size + len(note) > NOTE_BYTES:
            return False
        start = self._notes_start + self.rank * NOTE_BYTES
        # All at once, more or less: who reads it meanwhile finds that it does not fit its checksum.
        self._memory[start : start + _NOTE.size + len(note)] = _NOTE.pack(len(note), zlib.crc32(note)) + note
        return True

    def notes(self) -> dict[int, str]:
        """Returns the existing notes, by rank of this host."""
        found = {}
        for rank in range(self._size):
            start = self._notes_start + rank * NOTE_BYTES
            length, checksum = _NOTE.unpack_from(self._memory, start)
            note = self._memory[start + _NOTE.size : start + _NOTE.size + min(length, NOTE_BYTES)]
            if length and zlib.crc32(note) == checksum:
                found[rank] = note.decode()
        return found


def memory_bytes(size: int) -> int:
    """Computes the bytes that a number of ranks need."""
    return steps_bytes(size) + 4 * size * WINDOW_BYTES + size * NOTE_BYTES


def is_wanted(given: bool | None) -> bool:
    """Decides whether a group uses shared memory: by its argument, else by the environment, else yes."""
    if given is not None:
        return given
    word = runtime.SHARED_MEMORY.read()
    if word not in ("0", "1"):
        raise OptionError(f"{runtime.SHARED_MEMORY.variable} must be 0 or 1; got {word!r}")
    return word == "1"


def shared_memory_unavailable() -> str | None:
    """Returns the reason this process cannot share memory with others; None if it can."""
    if sys.platform != "linux":
        return f"it is implemented for Linux, and this is {sys.platform}"
    if platform.machine() != "x86_64":
        return f"it is implemented for x86-64, and this is {platform.machine()}"
    if start_time_of(os.getpid()) is None:
        return "/proc cannot be read"
    return None
