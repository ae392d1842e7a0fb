"""Steps that ranks of one host take together: a barrier in shared memory that carries a few numbers.

A step ends for a rank when all have come to it, and a rank that comes to the next one is done with what it
read in this one. So whatever is written for a step may be overwritten two steps later: everything is there
twice, and no rank has to be told that it was read.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
import os
import struct
import sys
import threading
import time
from array import array
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np

from crossdevice.process_groups.protocol import RankLostError

SPIN_SECONDS = 0.0001
"""Time that a rank polls before it sleeps: a wake-up takes some 50 us.

It does not yield meanwhile. On a busy machine a rank that yields is scheduled last; a sleeper is woken first.
"""

CROWDED_SPIN_SECONDS = 0.000005
"""Polling time with more ranks than processors: another rank needs this one's."""

LOOK_SECONDS = 3e-8
"""Duration of a compiled look, more or less."""

SLEEP_SECONDS = 0.02
"""The longest sleep in one piece. A wake-up is never lost for longer, and an interrupt never waits longer."""

SIGNATURE_BYTES = 16
_KEY = struct.Struct(f"<qq{SIGNATURE_BYTES}s")
_LINE_BYTES = 64
_PAGE_BYTES = 4096
_GATE = 64
_WITHDRAWN, _ASLEEP = 1, 2
"""Word offsets after the step counter."""

_FUTEX = 202  # the system call of x86-64
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_EVERYBODY = (1 << 31) - 1


class SharedSteps:
    """The steps of one rank of a group; waits like a background call.

    The store of one word is seen whole, and after the stores before it: so it is on x86-64, where alone this
    is used.
    """

    def __init__(self, memory: mmap.mmap, rank: int, size: int, processes: Sequence[tuple[int, int]]) -> None:
        """`processes` has the id and the start time of each rank's process."""
        self._memory = memory
        self._words = memoryview(memory).cast("q")
        self._gates = memoryview(memory).cast("I")
        self._gate_address = address_of(memory) + _GATE
        self._processes = processes
        self._block_bytes = block_bytes(size)
        self._places = [_PAGE_BYTES + number * self._block_bytes for number in range(size)]
        self._own = self._places[rank]
        self._own_word = self._own // 8
        self._others = {number: place for number, place in enumerate(self._places) if number != rank}
        self._counters = [place // 8 for place in self._others.values()]
        # Where others post, for odd and even steps.
        self._keys = [
            [(at, at + _KEY.size) for at in (self._header(place, parity) for place in self._others.values())]
            for parity in (0, 1)
        ]
        self._own_headers = [self._header(self._own, parity) for parity in (0, 1)]
        self._key = b""
        self._fence = threading.RLock()  # which a signal handler may take again
        is_crowded = size > len(os.sched_getaffinity(0))
        self._spin_seconds = CROWDED_SPIN_SECONDS if is_crowded else SPIN_SECONDS
        self._num_looks = 1 + int(self._spin_seconds / LOOK_SECONDS)
        self.number = 0
        """The last step this rank has come to."""
        self._is_over = True
        start = address_of(memory)
        self._other_addresses = array("q", [start + place for place in self._others.values()])
        addresses = start + self._own, *self._other_addresses.buffer_info()
        self._blocks = [(*addresses, header - self._own, _KEY.size // 8) for header in self._own_headers]
        self.meet: Callable[..., int] | None = None
        """A compiled function that comes to a step and looks for the others; see `come`."""

    @property
    def parity(self) -> int:
        """The one of two places that the next step uses."""
        return (self.number + 1) & 1

    def come(self, call: int, exchange: int, signature: bytes, numbers: Sequence[int] = ()) -> bool:
        """Comes to the next step like `post`; returns whether all ranks have come, after a short wait."""
        if self.meet is None:
            self.post(call, exchange, signature, numbers)
            return self.have_soon_come()
        return self._meet(self._announce(call, exchange, signature, numbers))

    def _meet(self, step: int) -> bool:
        """Comes to an announced step and looks for the others, in compiled code."""
        assert self.meet is not None
        found = self.meet(*self._blocks[step & 1], step, self._num_looks)
        if found > 1:
            self._wake(step)
        self._is_over = found > 0
        return self._is_over

    def post(self, call: int, exchange: int, signature: bytes, numbers: Sequence[int] = ()) -> None:
        """Comes to the next step, for that exchange of that call; earlier writes become readable."""
        step = self._announce(call, exchange, signature, numbers)
        words = self._words
        words[self._own_word] = step
        self._let_others_see()
        for place in self._counters:
            if words[place] < step:
                return
        if any(words[place + _ASLEEP] for place in self._counters):
            self._wake(step)

    def withhold(self, call: int, exchange: int, signature: bytes, numbers: Sequence[int] = ()) -> bool:
        """Comes to the next step like `post`, but invisibly to others: for fault injection."""
        header = self._own_headers[self._announce(call, exchange, signature, numbers) & 1]
        self._memory[header : header + _KEY.size] = bytes(_KEY.size)  # of no exchange: these count from 1
        return False

    def _announce(self, call: int, exchange: int, signature: bytes, numbers: Sequence[int]) -> int:
        """Writes the data of the next step, not yet visible to others, and returns its number."""
        if len(signature) > SIGNATURE_BYTES:
            signature = hashlib.blake2b(signature, digest_size=SIGNATURE_BYTES).digest()
        step = self.number + 1
        header = self._own_headers[step & 1]
        key = _KEY.pack(call, exchange, signature)
        self._memory[header : header + _KEY.size] = key
        if numbers:
            struct.pack_into(f"<{len(numbers)}q", self._memory, header + _KEY.size, *numbers)
        self._key, self.number, self._is_over = key, step, False
        return step

    def _wake(self, step: int) -> None:
        self._gates[_GATE // 4] = step & 0xFFFFFFFF
        wake_all(self._gate_address)

    def have_soon_come(self) -> bool:
        """Spins briefly; returns whether all ranks have come to this step, for the same exchange."""
        if self.meet is not None:
            return self._meet(self.number)
        end = time.monotonic() + self._spin_seconds
        while not self._have_all_come():
            if time.monotonic() >= end:
                return False
        self._is_over = True
        return True

    def wait(self, seconds: float) -> bool:
        """Sleeps until all ranks come, at most this long; call `have_soon_come` or `come` first."""
        end = time.monotonic() + seconds
        while not self._have_all_come():
            left = end - time.monotonic()
            if left <= 0:
                return False
            self._sleep(min(left, SLEEP_SECONDS))
        self._is_over = True
        return True

    def _sleep(self, seconds: float) -> None:
        """Sleeps until the last rank comes.

        A rank looks for sleepers after it has come; this one comes before it marks itself asleep and looks
        again. So one of the two sees the other.
        """
        gate, asleep = self._gates[_GATE // 4], self._own_word + _ASLEEP
        try:
            self._words[asleep] = 1
            self._let_others_see()
            if not self._have_all_come():
                sleep_while(self._gate_address, gate, seconds)
        finally:
            self._words[asleep] = 0

    def _let_others_see(self) -> None:
        """Orders earlier writes before later reads: taking a lock is a memory fence."""
        with self._fence:
            pass

    def result(self) -> None:
        """Does nothing: a step has no result."""

    def numbers_of(self, rank: int, first: int, count: int) -> tuple[int, ...]:
        """Returns some of the numbers that a rank has posted with this step."""
        header = self._header(self._places[rank], self.number)
        return struct.unpack_from(f"<{count}q", self._memory, header + _KEY.size + 8 * first)

    @property
    def awaited_ranks(self) -> Collection[int]:
        """The ranks that have not come to this step, or came to another exchange, or gave up."""
        return [rank for rank, place in self._others.items() if not self._has_come(place)]

    def check_contact(self, silent: Collection[int]) -> None:  # noqa: ARG002 - the system knows who is gone
        """Raises RankLostError if the process of a rank that is waited for has ended."""
        ended = self.ended_ranks(self.awaited_ranks)
        # It may have come just before; and who has withdrawn has only followed another one.
        lost = [rank for rank in ended if not self._has_come(self._places[rank])]
        lost.sort(key=lambda rank: self._words[self._places[rank] // 8 + _WITHDRAWN])
        if lost:
            raise RankLostError(lost[0], f"process {self._processes[lost[0]][0]} has ended")

    def ended_ranks(self, ranks: Collection[int] | None = None) -> list[int]:
        """Returns the ranks, of these or of all others, with processes that have ended."""
        return [
            rank for rank in (self._others if ranks is None else ranks) if has_ended(*self._processes[rank])
        ]

    def abandon(self) -> None:
        """Marks the step abandoned, so that late ranks do not complete it; an ended step stays complete."""
        if not self._is_over:
            self._words[self._own // 8 + _WITHDRAWN] = self.number

    def _have_all_come(self) -> bool:
        words, step = self._words, self.number
        for place in self._counters:
            if words[place] < step or words[place + _WITHDRAWN] == step:
                return False
        memory, key = self._memory, self._key
        for start, stop in self._keys[step & 1]:  # noqa: SIM110 - a generator takes twice as long
            if memory[start:stop] != key:
                return False
        return True

    def _has_come(self, place: int) -> bool:
        header = self._header(place, self.number)
        return (
            self._words[place // 8] >= self.number
            and self._words[place // 8 + _WITHDRAWN] != self.number
            and self._memory[header : header + _KEY.size] == self._key
        )

    def _header(self, place: int, step: int) -> int:
        """Returns the address at which a rank posts for a step."""
        return place + _LINE_BYTES + (step & 1) * ((self._block_bytes - _LINE_BYTES) // 2)


def block_bytes(size: int) -> int:
    """Computes the bytes of a rank's counters and of two blocks of posts."""
    posted = _KEY.size + 8 * (2 * size + 8)
    return 2 * -(-posted // _LINE_BYTES) * _LINE_BYTES + _LINE_BYTES


def steps_bytes(size: int) -> int:
    """Returns the memory of a group's steps, in whole pages; the first 16 bytes stay free."""
    return -(-(_PAGE_BYTES + size * block_bytes(size)) // _PAGE_BYTES) * _PAGE_BYTES


def address_of(memory: mmap.mmap) -> int:
    """Returns the address where the memory is mapped in this process."""
    return int(np.frombuffer(memory, np.uint8, 1).__array_interface__["data"][0])


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@functools.cache
def _system_call() -> Callable[..., int]:
    """Returns the system call, which releases the GIL and is interrupted by signals."""
    assert sys.platform == "linux"
    call = ctypes.CDLL(None).syscall
    call.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    call.restype = ctypes.c_long
    return call


def sleep_while(address: int, value: int, seconds: float) -> None:
    """Sleeps until a wake-up at this 32-bit word; returns at once if the word has another value.

    May return early, as after a signal, so callers check their condition again.
    """
    time = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    _system_call()(_FUTEX, address, _FUTEX_WAIT, value, ctypes.addressof(time))


def wake_all(address: int) -> None:
    """Wakes all that sleep at this word, in any process."""
    _system_call()(_FUTEX, address, _FUTEX_WAKE, _EVERYBODY, None)


def start_time_of(process: int) -> int | None:
    """Returns the start of a process in ticks since the system started; None if it has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    # After the name, which may contain anything: the state, and nineteen fields later the time.
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


def has_ended(process: int, start_time: int) -> bool:
    """Returns True if the process started at that time has ended."""
    return start_time_of(process) != start_time
