"""The fused pass with sums of what it reads and writes, added up tile by tile while it is in a cache."""

from __future__ import annotations

import ctypes
import functools
import itertools
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crossdevice.kernels.host.fingerprint_pass import FINGERPRINT, RowSums, is_compiled
from crossdevice.kernels.host.fused_pass import (
    RANGES_PER_THREAD,
    AddressTable,
    Arrays,
    PreparedPass,
    fused_batch,
    kernel_of,
    participants_for,
    scratch_place,
)
from crossdevice.kernels.host.resources.threads import run_together
from crossdevice.kernels.host.work_list import (
    HEADER_WORDS,
    MANY_INPUTS,
    NO_PROGRAM,
    RANGE_ELEMENTS,
    ROW_WORDS,
    TUPLE_HEADER_BYTES,
    WORD_BYTES,
    Task,
    address_of,
    as_words,
    ranges_of,
    traffic_bytes,
)
from crossdevice.kernels.position_keys import NUM_SUMS, ROW_BYTES
from crossdevice.values.recipe import Recipe

TILE_BYTES = 256 << 10
"""Traffic of a tile, which stays in a second-level cache."""


class Summed(NamedTuple):
    """Memory that a task reads or writes, the same number of bytes for each of its elements, and its sums."""

    memory: NDArray[Any]
    sums: NDArray[Any]
    offset: int = 0
    """Of the memory's first byte, in what the sums are of."""
    kind: RowSums = FINGERPRINT
    target: NDArray[Any] | None = None
    """What the memory is copied to: each vector is read once, added and stored. For fingerprints only."""

    def add(self, start: int = 0) -> None:
        """Adds the sums of the bytes from `start` on, and copies them."""
        rest = self.memory.reshape(-1).view(np.uint8)[start:]
        if self.target is not None:
            self.target.reshape(-1).view(np.uint8)[start:] = rest
        self.kind.add(rest, self.offset + start, self.sums)


def zero_sums() -> NDArray[np.uint64]:
    """Returns the fingerprint sums of nothing."""
    return np.zeros(NUM_SUMS, np.uint64)


def bound_sums(
    tasks: Sequence[tuple[Arrays, Arrays]], summed: Sequence[Sequence[Summed]], recipe: Recipe
) -> Callable[[], None]:
    """Returns what does passes of one recipe, and adds up the sums that `summed` has for each of them.

    Memory is read once: a tile is reduced first, and what it was made of and has become is in a cache then.
    Tasks may all be without outputs, where `summed` copies.
    """
    if not tasks:
        return _nothing
    every = [each for of_task in summed for each in of_task]
    has_outputs = bool(tasks[0][1])
    found: tuple[PreparedPass | None, Sequence[Task]] | None = None
    if is_compiled():
        found = kernel_of(tasks, recipe) if has_outputs else (None, [(tuple(each), ()) for each, _ in tasks])
    if found is None or any(each.offset % ROW_BYTES for each in every):
        return functools.partial(_sum_afterwards, tasks if has_outputs else (), every, recipe)
    return _TiledPass(*found, summed)


def _nothing() -> None:
    """Does no pass."""


def _sum_afterwards(tasks: Sequence[tuple[Arrays, Arrays]], summed: Sequence[Summed], recipe: Recipe) -> None:
    fused_batch(tasks, recipe)
    for each in summed:
        each.add()


class _Rest(NamedTuple):
    """The bytes behind the last whole row of summed memory, which the walk does not know."""

    number: int
    start: int
    num_bytes: int
    offset: int
    kind: RowSums


class _TiledPass:
    """Tasks of one kernel, done tile by tile; several threads take ranges of them one by one."""

    def __init__(
        self, prepared: PreparedPass | None, tasks: Sequence[Task], summed: Sequence[Sequence[Summed]]
    ) -> None:
        every = [each for of_task in summed for each in of_task]
        self._prepared = prepared
        self._kept_alive: tuple[Any, ...] = tasks, every
        self._sums = tuple([each.sums for each in every])
        arrays = [array for inputs, outputs in tasks for array in (*inputs, *outputs)]
        memories = [each.memory for each in every]
        targets = [each.memory if each.target is None else each.target for each in every]
        addresses = list(map(address_of, (*arrays, *memories, *targets, *self._sums)))
        self._first_memory, self._num_addresses = len(arrays), len(addresses)
        table = AddressTable(len(addresses))
        table.fill(addresses)
        traffic = sum([traffic_bytes(*task) for task in tasks])
        self._participants = participants_for(traffic)
        self._has_many_inputs = any(len(inputs) >= MANY_INPUTS for inputs, _ in tasks)
        self._counter = array("q", [0])
        rows: list[tuple[int, ...]] = [(0,) * ROW_WORDS]  # a tile, by itself a work list for the kernel
        notes: list[int] = []
        self._rests: list[_Rest] = []
        place, number = table.place, 0
        for (inputs, outputs), of_task in zip(tasks, summed, strict=True):
            size, num_arrays = inputs[0].size, len(inputs) + len(outputs)
            step = TILE_BYTES // (num_arrays * inputs[0].itemsize) // RANGE_ELEMENTS * RANGE_ELEMENTS
            places = place, len(inputs), place + WORD_BYTES * len(inputs), len(outputs)
            place += WORD_BYTES * num_arrays
            ranges: Iterable[tuple[int, int]] = ((0, size),)
            if self._participants > 1:
                own = traffic_bytes(inputs, outputs)
                ranges = ranges_of(size, RANGES_PER_THREAD * self._participants * own // traffic)
            for start, stop in ranges:
                rows.append((*places, start, stop, len(notes), max(step, RANGE_ELEMENTS)))
            notes += len(of_task), number
            for memory, _, offset, kind, _ in of_task:
                kernel, num_bytes = kind.load(), memory.nbytes
                notes += kernel.address, num_bytes // max(size, 1), offset // ROW_BYTES, kernel.keys
                if num_bytes % ROW_BYTES:
                    start = num_bytes - num_bytes % ROW_BYTES
                    self._rests.append(_Rest(number, start, num_bytes - start, offset + start, kind))
                number += 1
        self._num_rows, self._notes = len(rows) - 1, array("q", notes)
        divisor, program = 1.0, NO_PROGRAM
        if prepared is not None:
            divisor, program = prepared.divisor, prepared.program
        self._words = as_words(rows, divisor, program, is_shared=False)
        self._words[0] = 1
        self._use(table, 0)

    def _use(self, table: AddressTable, first: int) -> None:
        self._table = table
        self.addresses = table.addresses[first : first + self._num_addresses]
        """Of inputs and outputs, of summed memory, of where that is copied to, and of sums."""
        self._place = table.place + WORD_BYTES * first

    def join(self, table: AddressTable, first: int) -> None:
        """Reads addresses from a part of this table from now on, and keeps no array but sums alive."""
        moved = table.place + WORD_BYTES * first - self._place
        for row in range(1, self._num_rows + 1):
            word = HEADER_WORDS + row * ROW_WORDS
            self._words[word] += moved
            self._words[word + 2] += moved
        self._use(table, first)
        self._kept_alive = ()

    def __call__(self) -> None:
        """Runs the kernel, and adds up sums."""
        self._counter[0] = 0
        if self._participants == 1:
            self._walk(self._place_of_notes(2))
        else:
            self._found: list[tuple[NDArray[Any], ...]] = []
            run_together(self._take_ranges, self._participants)
            for found in self._found:
                for total, own in zip(self._sums, found, strict=True):
                    total += own
        for rest in self._rests:
            self._add_rest(rest)

    def _add_rest(self, rest: _Rest) -> None:
        number = self._first_memory + rest.number
        memory, target = (int(self.addresses[each]) for each in (number, number + len(self._sums)))
        if target != memory:
            ctypes.memmove(target + rest.start, memory + rest.start, rest.num_bytes)
        rest.kind.add_at(memory + rest.start, rest.num_bytes, rest.offset, self._sums[rest.number])

    def _take_ranges(self) -> None:
        sums = tuple([np.zeros_like(each) for each in self._sums])
        self._walk(id(sums) + TUPLE_HEADER_BYTES)
        self._found.append(sums)

    def _place_of_notes(self, part: int) -> int:
        """Returns the place of pointers to summed memory, to targets, or to sums."""
        return self._place + WORD_BYTES * (self._first_memory + part * len(self._sums))

    def _walk(self, sums: int) -> None:
        from crossdevice.kernels.host.llvm.tiles import compiled_walk

        words = self._words if self._participants == 1 else self._words[:]
        compiled_walk()(
            0 if self._prepared is None else self._prepared.address,
            words.buffer_info()[0],
            self._num_rows,
            self._counter.buffer_info()[0] if self._participants > 1 else 0,
            self._notes.buffer_info()[0],
            self._place_of_notes(0),
            self._place_of_notes(1),
            sums,
            scratch_place() if self._has_many_inputs else 0,
        )


class MovablePasses:
    """Passes that are laid out once, for arrays that are elsewhere in each call; sums stay where they are."""

    def __init__(self, passes: Sequence[_TiledPass], bases: Sequence[NDArray[Any]]) -> None:
        addresses = [address for each in passes for address in each.addresses.tolist()]
        table = AddressTable(len(addresses))
        table.fill(addresses)
        first = 0
        for each in passes:
            each.join(table, first)
            first += each.addresses.size
        self._addresses = table.addresses
        starts = np.array([address_of(base) for base in bases], np.int64)
        sizes = np.array([base.nbytes for base in bases], np.int64)
        order = np.argsort(starts)
        order = order[sizes[order] > 0]  # an array without elements may be in the middle of another
        numbers = order[np.searchsorted(starts[order], self._addresses, "right") - 1]
        is_within = (starts[numbers] <= self._addresses) & (self._addresses < (starts + sizes)[numbers])
        self._moving = np.flatnonzero(is_within)
        self._bases = numbers[is_within]
        self._offsets = self._addresses[is_within] - starts[self._bases]

    def move(self, bases: Sequence[NDArray[Any]]) -> None:
        """Has passes use these arrays in place of those that they were laid out for, in the same order."""
        starts = np.array([address_of(base) for base in bases], np.int64)
        self._addresses[self._moving] = starts[self._bases] + self._offsets


def movable_passes(
    passes: Sequence[Callable[[], None]], bases: Sequence[NDArray[Any]]
) -> MovablePasses | None:
    """Returns passes of `bound_sums` over parts of `bases` so that they can be moved; None if they cannot.

    Bases that overlap cannot be told apart by addresses.
    """
    tiled = [each for each in passes if isinstance(each, _TiledPass)]
    if not tiled or any(each is not _nothing and not isinstance(each, _TiledPass) for each in passes):
        return None
    ranges = sorted((address_of(base), address_of(base) + base.nbytes) for base in bases if base.nbytes)
    if not ranges or any(end > start for (_, end), (start, _) in itertools.pairwise(ranges)):
        return None
    return MovablePasses(tiled, bases)
