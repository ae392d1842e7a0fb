"""Recycled memory for large results.

Page faults make a new 100 MiB result cost three to eleven times as much as writing it; recycled memory has
none. Results are ordinary arrays whose base object is a lease. When the last of them is freed, so is the
lease, and its block is ready for the next result.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from crossdevice import runtime
from crossdevice.errors import OptionError
from crossdevice.kernels.host.resources.threads import words_of_groups
from crossdevice.values.launchers import local_processes

SMALLEST_POOLED_BYTES = 1 << 20
"""Total size of a call's results from which they are pooled. From there on the C library returns freed memory
to the system at once, and every page of the next result faults: 8 x 256 KiB take 420 us instead of 115, where
a lease takes about 5."""

PAGE_BYTES = 4096
LINE_BYTES = 64

SMALLEST_PAGED_BYTES = 64 << 10
"""Size from which an array in a shared block starts on a page: this costs at most a sixteenth."""

SMALLEST_SHARING_BYTES = 64 << 10

IDLE_SECONDS = 10.0
"""Seconds that memory waits for its next use. A loop that is slower than that does not notice page faults."""

ARENA_BYTES = 32 << 20
"""Bytes of a batch of results that share one block: one array kept alive keeps no more than that."""


class Statistics(NamedTuple):
    """Bytes in a pool and its hits; concurrent threads may miscount the hits."""

    idle_bytes: int
    leased_bytes: int
    limit_bytes: int
    hits: int
    misses: int


class _Lease:
    """Base object of the arrays in a block, which returns the block when the last of them dies."""

    __slots__ = ("__array_interface__", "__weakref__", "_memory")

    def __init__(self, memory: NDArray[np.uint8], num_bytes: int) -> None:
        self._memory = memory
        address = memory.ctypes.data
        # On a page's first byte: streams slow down to a third where output - input is 64 to 256 modulo
        # 4096, and inputs start at 0, 16 (the C library) or 64 (PyTorch), so that it is 0 or less here.
        start = address + -address % PAGE_BYTES
        self.__array_interface__ = {
            "data": (start, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 3,
        }


class _Block(weakref.ref[_Lease]):
    """Memory of `num_bytes` plus a page, with a reference to its lease, dead when the block is idle."""

    __slots__ = ("idle_since", "key", "memory", "num_bytes")

    key: int
    num_bytes: int
    memory: NDArray[np.uint8]
    idle_since: float | None
    """Time at which it was first seen idle."""


class Pool:
    """Blocks of memory kept for reuse; above the limit the longest unused one is freed first.

    The pool has no lock. No code of ours runs when a block is returned: its lease is freed, as a weak
    reference shows. A thread takes a block by popping it from a dictionary, which is atomic. So an interrupt
    loses one block at most, and finalizers, signal handlers and other threads may use the pool at any time.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._hits = 0
        self._misses = 0
        self._keys = itertools.count()
        self.start_anew()

    def start_anew(self) -> None:
        """Forgets all blocks and the thread that frees them, as a forked process must."""
        self._blocks: dict[int, _Block] = {}
        self._keeper: threading.Thread | None = None

    def empty(self, size: int, dtype: DTypeLike) -> NDArray[Any]:
        """Allocates a flat array of `size` elements, not initialized.

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
        """Allocates one flat array per (size, dtype); neighbours share blocks but no cache lines.

        Tiny arrays have memory of their own: a loss that is kept would keep a whole block alive. With
        `on_lines` they start on cache lines, too.
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
        """Allocates memory of these lengths in as few blocks as possible."""
        for ranges in _arenas(lengths):
            arena = self._leased(ranges[-1].stop)
            yield from map(arena.__getitem__, ranges)

    def clear(self) -> int:
        """Gives all idle memory back to the system; returns how many bytes that were."""
        return sum(map(self._dropped, self._idle()))

    @property
    def limit_bytes(self) -> int:
        """Upper bound on idle memory."""
        if self._limit_bytes is None:
            self._limit_bytes = _default_limit()
        return self._limit_bytes

    def set_limit(self, limit_bytes: int | None) -> None:
        """Bounds the idle memory; None restores CROSSDEVICE_POOL_BYTES, or a share of the machine's."""
        if limit_bytes is not None and (
            not isinstance(limit_bytes, (int, np.integer)) or isinstance(limit_bytes, bool) or limit_bytes < 0
        ):
            raise OptionError(f"the pool's limit must be a number of bytes, 0 or more; got {limit_bytes!r}")
        self._limit_bytes = None if limit_bytes is None else int(limit_bytes)
        self._keep_within_limit()

    def statistics(self) -> Statistics:
        """Returns the idle and leased bytes and the number of reused blocks."""
        self._keep_within_limit()
        blocks = list(self._blocks.values())
        idle = sum(block.num_bytes for block in _idle_among(blocks))
        leased = sum(block.num_bytes for block in blocks) - idle
        return Statistics(idle, leased, self.limit_bytes, self._hits, self._misses)

    def give_back_unused(self, now: float) -> bool:
        """Drops blocks that were idle for IDLE_SECONDS; returns whether any are left."""
        for block in self._idle():
            if block.idle_since is None:
                block.idle_since = now
            elif now - block.idle_since >= IDLE_SECONDS:
                self._dropped(block)
        self._keep_within_limit()
        return bool(self._blocks)

    def _leased(self, num_bytes: int) -> NDArray[np.uint8]:
        rounded = _size_class(num_bytes)
        memory = self._taken(rounded)
        if memory is None:
            self._keep_within_limit()
            memory = np.empty(rounded + PAGE_BYTES, np.uint8)
        lease = _Lease(memory, num_bytes)
        block = _Block(lease)
        block.key, block.num_bytes, block.memory, block.idle_since = next(self._keys), rounded, memory, None
        self._blocks[block.key] = block
        if self._keeper is None or not self._keeper.is_alive():
            self._keeper = threading.Thread(target=_keep, args=(self,), name="crossdevice-pool", daemon=True)
            self._keeper.start()
        return np.asarray(lease)

    def _taken(self, num_bytes: int) -> NDArray[np.uint8] | None:
        # The most recently used one is likely to be in the cache; the others age until they are freed.
        for block in reversed(self._idle()):
            if block.num_bytes == num_bytes and self._dropped(block):
                self._hits += 1
                return block.memory
        self._misses += 1
        return None

    def _keep_within_limit(self) -> None:
        idle = self._idle()
        surplus = sum(block.num_bytes for block in idle) - self.limit_bytes
        for block in idle:
            if surplus <= 0:
                break
            surplus -= self._dropped(block)

    def _idle(self) -> list[_Block]:
        """Returns the idle blocks, least recently used first."""
        # A list at once: the dictionary may change at any moment.
        return _idle_among(list(self._blocks.values()))

    def _dropped(self, block: _Block) -> int:
        """Drops a block and returns its bytes; 0 if another thread was faster."""
        return 0 if self._blocks.pop(block.key, None) is None else block.num_bytes


def _idle_among(blocks: Sequence[_Block]) -> list[_Block]:
    """Returns the blocks that are no longer leased."""
    # In C throughout: between calling a reference and testing what it returned, another thread could run and
    # take the block for leased.
    return list(itertools.filterfalse(_Block.__call__, blocks))


def release_memory() -> int:
    """Returns memory that is kept for the next results to the system.

    Memory that has not been used for some seconds is returned without this call.

    Returns:
        The number of bytes.

    >>> release_memory() >= 0
    True
    """
    return result_pool.clear()


def set_pool_bytes(limit_bytes: int | None) -> None:
    """Sets how much memory may wait for the next results.

    Args:
        limit_bytes: a number of bytes; 0 keeps none. None goes back to the variable CROSSDEVICE_POOL_BYTES
            or, if that is not set, to a quarter of the memory that the machine or container has, shared
            evenly among the processes that the launcher started on it.

    Raises:
        OptionError: the number is outside its range.
    """
    result_pool.set_limit(limit_bytes)


def pool_bytes() -> int:
    """Returns the number of bytes that the pool may keep idle for the next results.

    Returns:
        A number of bytes.
    """
    return result_pool.limit_bytes


def _keep(pool: Pool) -> None:
    while pool.give_back_unused(time.monotonic()):
        time.sleep(IDLE_SECONDS / 4)


def empty_on_line(size: int, dtype: DTypeLike) -> NDArray[Any]:
    """Allocates a flat array on a cache line: JAX and TensorFlow adopt such memory and copy other memory."""
    num_bytes = size * np.dtype(dtype).itemsize
    memory = np.empty(num_bytes + LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % LINE_BYTES
    return memory[start : start + num_bytes].view(dtype)


def _size_class(num_bytes: int) -> int:
    """Rounds up by at most an eighth, so that similar sizes share blocks; unused pages cost nothing."""
    step = max(PAGE_BYTES, 1 << (num_bytes.bit_length() - 4))
    return -(-num_bytes // step) * step


def _arenas(lengths: Sequence[int]) -> list[list[slice]]:
    """Groups neighbours into blocks of about ARENA_BYTES; a larger array has a block of its own."""
    arenas: list[list[slice]] = []
    end = ARENA_BYTES
    for length in lengths:
        alignment = PAGE_BYTES if length >= SMALLEST_PAGED_BYTES else LINE_BYTES
        start = end + -end % alignment
        if start + length > ARENA_BYTES:
            arenas.append([])
            start = 0
        end = start + length
        arenas[-1].append(slice(start, end))
    return arenas


def _default_limit() -> int:
    given = runtime.POOL_BYTES.read()
    if not given:
        return _memory_bytes() // (4 * local_processes(os.environ))
    if not given.isdigit():
        raise OptionError(
            f"{runtime.POOL_BYTES.variable} must be a number of bytes, 0 or more; got {given!r}"
        )
    return int(given)


def _memory_bytes() -> int:
    """Returns the machine's memory, or what control groups leave of it."""
    try:
        limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (AttributeError, ValueError, OSError):
        limits = [8 << 30]
    for words in words_of_groups("memory", ["memory.max"], ["memory.limit_in_bytes"]):
        limits += [int(word) for word in words if word.isdigit()]
    return min(limits)


result_pool = Pool()
"""Memory of results, unless the caller brings some for them."""

runtime.renew_after_fork(result_pool.start_anew)
