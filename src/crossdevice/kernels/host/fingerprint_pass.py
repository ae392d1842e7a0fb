"""The sums of fingerprints of arrays in host memory: each byte is read once, by as many threads as help."""

from __future__ import annotations

import ctypes
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crossdevice.kernels.host.fused_pass import selected_kernels
from crossdevice.kernels.host.resources.threads import num_threads, run_together
from crossdevice.kernels.host.work_list import address_of
from crossdevice.kernels.position_keys import (
    BLOCK_BYTES,
    BLOCK_ROWS,
    NUM_SUMS,
    ROW_BYTES,
    Words,
    sums_of_blocks,
)

if TYPE_CHECKING:
    from crossdevice.kernels.host.llvm.fingerprinting import RowKernel

PIECE_BYTES = 512 << 10
"""Bytes that a thread processes at a time: a copy of them still fits its cache."""

COPIED_BYTES = 4 << 20
"""The same of an array that has to be copied: more rows of it have more of each line of memory."""

TILE_BYTES = 32 << 10
"""Bytes that are turned at a time, in the order of memory first: they stay in a first-level cache."""

TURNED_ITEMS = (1, 2, 4, 8)
"""Sizes of elements for which a kernel turns matrices."""

THREADED_BYTES = 2 << 20
"""Size from which a second thread helps."""

Bytes = NDArray[np.uint8]


class Piece(NamedTuple):
    """A range of an array: its array, its byte offset, and how its elements are read."""

    array: int
    offset: int
    num_bytes: int
    read: Callable[[], NDArray[Any]] | int
    """Gives the elements as a contiguous, native ndarray; or where they are, for a compiled kernel."""


def pieces_of(number: int, flat: NDArray[Any], offset: int = 0) -> Iterator[Piece]:
    """Splits a contiguous array into pieces for several threads; one piece if there is one thread."""
    memory: Bytes = flat.reshape(-1).view(np.uint8)
    step = PIECE_BYTES if num_threads() > 1 else max(memory.size, 1)
    for start in range(0, memory.size, step):
        part = memory[start : start + step]
        yield Piece(number, offset + start, part.size, lambda part=part: part)  # type: ignore[misc]


def pieces_at(number: int, address: int, num_bytes: int) -> Iterator[Piece]:
    """Splits memory as `pieces_of` does, for compiled kernels; whoever asks keeps it alive."""
    step = PIECE_BYTES if num_threads() > 1 else max(num_bytes, 1)
    for start in range(0, num_bytes, step):
        yield Piece(number, start, min(step, num_bytes - start), address + start)


def in_order(part: NDArray[Any]) -> NDArray[Any]:
    """Copies a part of an array in which another axis than the last may be contiguous.

    Whole lines of memory are read into small tiles: along the last axis of a transposed array each element
    has a line of its own, and lines a power of two apart push each other out of the cache.

    >>> in_order(np.arange(6).reshape(2, 3).T).tolist()
    [[0, 3], [1, 4], [2, 5]]
    """
    if part.ndim < 2 or abs(part.strides[-1]) <= min(map(abs, part.strides)):
        return np.ascontiguousarray(part)
    copy = np.empty(part.shape, part.dtype)
    if part.ndim == 2 and part.strides[0] == part.itemsize in TURNED_ITEMS and is_compiled():
        _turn(part, copy)
        return copy
    length = part.shape[-1]
    step = max(1, TILE_BYTES * length // max(part.nbytes, 1))
    for start in range(0, length, step):
        copy[..., start : start + step] = part[..., start : start + step].copy(order="K")
    return copy


def _turn(part: NDArray[Any], copy: NDArray[Any]) -> None:
    from crossdevice.kernels.host.llvm import fingerprinting

    lines = np.empty(fingerprinting.TURNED_COLUMNS * fingerprinting.TURNED_PITCH, np.uint8)
    turn = fingerprinting.compiled_turn(part.itemsize)
    turn(address_of(part), part.strides[1], *part.shape, address_of(copy), address_of(lines))


def sums_of(pieces: Iterable[Piece], num_arrays: int) -> Words:
    """Returns the sums of each array, one row of `NUM_SUMS` per array; pieces may come in any order.

    >>> memory = np.arange(9, dtype=np.float32)
    >>> whole = sums_of(pieces_of(0, memory), 1)
    >>> parts = sums_of([*pieces_of(0, memory[5:], offset=20), *pieces_of(0, memory[:5])], 1)
    >>> bool((whole == parts).all())
    True
    """
    work = list(pieces)
    numbers = itertools.count()  # `next` is atomic, also between threads
    found: list[Words] = []

    def take_pieces() -> None:
        own = np.zeros((num_arrays, NUM_SUMS), np.uint64)
        while (number := next(numbers)) < len(work):
            array, offset, num_bytes, read = work[number]
            if isinstance(read, int):
                FINGERPRINT.add_at(read, num_bytes, offset, own[array])
            else:
                FINGERPRINT.add(read().reshape(-1).view(np.uint8), offset, own[array])
        found.append(own)

    is_large = len(work) > 1 and sum(piece.num_bytes for piece in work) >= THREADED_BYTES
    run_together(take_pieces, min(num_threads(), len(work)) if is_large else 1)
    total = found[0]
    for other in found[1:]:
        total = total + other
    return total


class RowSums(NamedTuple):
    """A kind of sums of rows of 64 bytes, such that sums of ranges add up to those of the whole."""

    reference: Callable[[Bytes, int, Any], None]
    """Adds the sums of whole rows, given the number of the first row, to an array."""
    load: Callable[[], RowKernel]
    """Compiles the kernel that does so."""

    def add(self, memory: Bytes, offset: int, sums: NDArray[Any]) -> None:
        """Adds the sums of bytes at this byte offset of an array; incomplete rows are padded."""
        head = min(-offset % ROW_BYTES, memory.size)
        whole = (memory.size - head) // ROW_BYTES * ROW_BYTES
        if head:
            self._add_rows(_row_with(memory[:head], offset % ROW_BYTES), offset // ROW_BYTES, sums)
        if whole:
            self._add_rows(memory[head : head + whole], (offset + head) // ROW_BYTES, sums)
        if head + whole < memory.size:
            row = _row_with(memory[head + whole :], 0)
            self._add_rows(row, (offset + head + whole) // ROW_BYTES, sums)

    def add_at(self, address: int, num_bytes: int, offset: int, sums: NDArray[Any]) -> None:
        """Adds the sums of memory by the compiled kernel; the offset is that of a row."""
        rest, kernel = num_bytes % ROW_BYTES, self.load()
        whole = num_bytes - rest
        first = offset // ROW_BYTES
        kernel.entry(address, first, whole // ROW_BYTES, kernel.keys, address_of(sums), 0)
        if rest:
            memory = ctypes.string_at(address + whole, rest)
            self.add(np.frombuffer(memory, np.uint8), offset + whole, sums)

    def _add_rows(self, rows: Bytes, first: int, sums: NDArray[Any]) -> None:
        if not is_compiled():
            self.reference(rows, first, sums)
            return
        kernel = self.load()
        kernel.entry(address_of(rows), first, rows.size // ROW_BYTES, kernel.keys, address_of(sums), 0)


def _row_with(part: Bytes, start: int) -> Bytes:
    row = np.zeros(ROW_BYTES, np.uint8)
    row[start : start + part.size] = part
    return row


def _add_rows(rows: Bytes, first: int, sums: Words) -> None:
    block, place = divmod(first, BLOCK_ROWS)
    start = place * ROW_BYTES
    padded = np.zeros(-(-(start + rows.size) // BLOCK_BYTES) * BLOCK_BYTES, np.uint8)
    padded[start : start + rows.size] = rows
    sums += sums_of_blocks(padded.view("<u4"), block)


def is_compiled() -> bool:
    """Returns True if sums are added up by compiled kernels."""
    return sys.byteorder == "little" and selected_kernels() == "numba"


@functools.cache
def _load() -> RowKernel:
    from crossdevice.kernels.host.llvm.fingerprinting import compiled_sums

    return compiled_sums()


FINGERPRINT = RowSums(_add_rows, _load)
"""The sums of fingerprints."""
