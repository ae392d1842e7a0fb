"""Memory for large results, used again: a block comes back when the last array in it is gone.

A fresh 100 MiB result costs three to eleven times the writing of it, in page faults; a recycled one
costs nothing. The arrays are ordinary: their base is a lease that gives the block back when it dies.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from crossdevice.errors import OptionError
from crossdevice.kernels.host.resources.control_groups import words_of_groups

VARIABLE = "CROSSDEVICE_POOL_BYTES"

SMALLEST_POOLED_BYTES = 1 << 20
"""Of a whole call. Above, the C library gives memory back as soon as it is free, and every page of the next
result is faulted in anew: 8 x 256 KiB take 420 us then, instead of 115; a lease takes about 5 us."""

PAGE_BYTES = 4096
LINE_BYTES = 64

SMALLEST_PAGED_BYTES = 64 << 10
"""In a shared block, arrays from this size on start on a page too: it costs them at most a sixteenth."""

SMALLEST_SHARING_BYTES = 64 << 10

ARENA_BYTES = 32 << 20
"""How much of a batch of results shares one block: one array kept alive keeps no more than that."""


class Statistics(NamedTuple):
    """What a pool holds and how often it could help."""

    idle_bytes: int
    leased_bytes: int
    limit_bytes: int
    hits: int
    misses: int


class _Block(NamedTuple):
    """A piece of memory of `num_bytes` and a page more, to start on a page."""

    num_bytes: int
    memory: NDArray[np.uint8]


class _Lease:
    """What arrays in a block have as their base; its end is the block's return."""

    __slots__ = ("__array_interface__", "_block", "_pool")

    def __init__(self, pool: Pool, block: _Block, num_bytes: int) -> None:
        self._pool = pool
        self._block = block
        address = block.memory.ctypes.data
        # On a page's first byte: streams slow down to a third where output - input is 64 to 256 modulo
        # 4096, and inputs start at 0, 16 (the C library) or 64 (PyTorch), so that it is 0 or less here.
        start = address + -address % PAGE_BYTES
        self.__array_interface__ = {
            "data": (start, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        self._pool.take_back(self._block)


class Pool:
    """Blocks of memory that wait for their next use, the longest idle given up first above the limit."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._leased_bytes = 0
        self._hits = 0
        self._misses = 0
        self.start_anew()

    def start_anew(self) -> None:
        """Forgets idle memory without asking for the lock, which another thread may have held at a fork."""
        # `__del__` may run inside any allocation, also inside one made below with the lock held. So it
        # only appends, which is atomic, and whoever can have the lock without waiting puts things in order.
        self._returned: deque[_Block] = deque()
        self._lock = threading.Lock()
        self._idle: OrderedDict[int, _Block] = OrderedDict()
        self._idle_bytes = 0
        self._next_key = 0

    def empty(self, size: int, dtype: DTypeLike) -> NDArray[Any]:
        """A flat array of `size` elements with no particular content.

        >>> Pool().empty(3, "float32").size
        3
        """
        element = np.dtype(dtype)
        num_bytes = size * element.itemsize
        if num_bytes < SMALLEST_POOLED_BYTES:
            return np.empty(size, element)
        return self._leased(num_bytes).view(element)

    def empty_batch(
        self, sizes: Sequence[tuple[int, DTypeLike]], *, on_lines: bool = False
    ) -> list[NDArray[Any]]:
        """One flat array for each (size, dtype); neighbours share blocks, each on lines of its own.

        Only tiny ones do not share: a loss that someone keeps would keep a whole block. With `on_lines`
        those start where lines do, too.
        """
        empty = empty_on_line if on_lines else np.empty
        elements = [(size, np.dtype(dtype)) for size, dtype in sizes]
        lengths = [size * element.itemsize for size, element in elements]
        if sum(lengths) < SMALLEST_POOLED_BYTES:
            return [empty(size, element) for size, element in elements]
        shared = [length for length in lengths if length >= SMALLEST_SHARING_BYTES]
        placed = iter(self._placed(shared))
        return [
            empty(size, element) if length < SMALLEST_SHARING_BYTES else next(placed).view(element)
            for (size, element), length in zip(elements, lengths, strict=True)
        ]

    def _placed(self, lengths: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
        """Memory of these lengths, in as few blocks as may be."""
        left = iter(lengths)
        for starts in _arenas(lengths):
            here = [next(left) for _ in starts]
            arena = self._leased(starts[-1] + here[-1])
            for start, length in zip(starts, here, strict=True):
                yield arena[start : start + length]

    def take_back(self, block: _Block) -> None:
        """Makes a block available again; called when a lease ends, in any thread, at any moment."""
        self._returned.append(block)
        self._settle()

    def clear(self) -> None:
        """Gives all idle memory back to the system."""
        with self._lock:
            self._file_returned()
            self._idle.clear()
            self._idle_bytes = 0
        self._settle()

    def set_limit(self, limit_bytes: int | None) -> None:
        """Bounds the idle memory; None goes back to CROSSDEVICE_POOL_BYTES, or a quarter of the machine's."""
        if limit_bytes is not None and (isinstance(limit_bytes, bool) or not int(limit_bytes) >= 0):
            raise OptionError(f"the pool's limit must be a number of bytes, 0 or more; got {limit_bytes!r}")
        with self._lock:
            self._limit_bytes = limit_bytes
            self._file_returned()
        self._settle()

    def statistics(self) -> Statistics:
        """What is idle and leased now, and how often a block could be used again."""
        with self._lock:
            self._file_returned()
            counts = Statistics(self._idle_bytes, self._leased_bytes, self._limit(), self._hits, self._misses)
        self._settle()
        return counts

    def _leased(self, num_bytes: int) -> NDArray[np.uint8]:
        rounded = _size_class(num_bytes)
        with self._lock:
            self._file_returned()
            block = self._pop_idle(rounded)
            if block is None:
                self._misses += 1
            else:
                self._hits += 1
            self._leased_bytes += rounded
        self._settle()
        if block is None:
            block = _Block(rounded, np.empty(rounded + PAGE_BYTES, np.uint8))
        return np.asarray(_Lease(self, block, num_bytes))

    def _pop_idle(self, num_bytes: int) -> _Block | None:
        # The last returned first: it is the most likely to be in cache.
        for key in reversed(self._idle):
            if self._idle[key].num_bytes == num_bytes:
                self._idle_bytes -= num_bytes
                return self._idle.pop(key)
        return None

    def _settle(self) -> None:
        # Whoever fails to get the lock leaves its block to the holder, who looks again after letting go.
        while self._returned and self._lock.acquire(blocking=False):
            try:
                self._file_returned()
            finally:
                self._lock.release()

    def _file_returned(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._idle[self._next_key] = block
            self._next_key += 1
            self._idle_bytes += block.num_bytes
            self._leased_bytes -= block.num_bytes
        while self._idle_bytes > self._limit():
            _, block = self._idle.popitem(last=False)
            self._idle_bytes -= block.num_bytes

    def _limit(self) -> int:
        if self._limit_bytes is None:
            self._limit_bytes = _default_limit()
        return self._limit_bytes


def empty_on_line(size: int, dtype: DTypeLike) -> NDArray[Any]:
    """A flat array that starts on a line: there JAX and TensorFlow adopt memory, elsewhere they copy it."""
    num_bytes = size * np.dtype(dtype).itemsize
    memory = np.empty(num_bytes + LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % LINE_BYTES
    return memory[start : start + num_bytes].view(dtype)


def _size_class(num_bytes: int) -> int:
    """Rounded up by an eighth at most, so that nearly equal sizes share blocks; unused pages cost nothing."""
    step = max(PAGE_BYTES, 1 << (num_bytes.bit_length() - 4))
    return -(-num_bytes // step) * step


def _arenas(lengths: Sequence[int]) -> list[list[int]]:
    """Where neighbours start in blocks of about ARENA_BYTES; what is larger has one of its own."""
    arenas: list[list[int]] = []
    end = ARENA_BYTES
    for length in lengths:
        alignment = PAGE_BYTES if length >= SMALLEST_PAGED_BYTES else LINE_BYTES
        start = end + -end % alignment
        if start + length > ARENA_BYTES:
            arenas.append([])
            start = 0
        arenas[-1].append(start)
        end = start + length
    return arenas


def _default_limit() -> int:
    given = os.environ.get(VARIABLE)
    if not given:
        return _memory_bytes() // 4
    if not given.isdigit():
        raise OptionError(f"{VARIABLE} must be a number of bytes, 0 or more; got {given!r}")
    return int(given)


def _memory_bytes() -> int:
    """What the machine has, or what control groups leave of it."""
    try:
        limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (AttributeError, ValueError, OSError):
        limits = [8 << 30]
    for words in words_of_groups("memory", ["memory.max"], ["memory.limit_in_bytes"]):
        limits += [int(word) for word in words if word.isdigit()]
    return min(limits)


result_pool = Pool()
"""Where results come from unless the caller brings memory for them."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=result_pool.start_anew)
