"""The fused pass with sums of what it reads and writes, added up tile by tile while it is in a cache."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crossdevice.kernels.host.fingerprint_pass import FINGERPRINT, RowSums, is_compiled
from crossdevice.kernels.host.fused_pass import (
    RANGES_PER_THREAD,
    Arrays,
    PreparedPass,
    fused_batch,
    kernel_of,
    participants_for,
    scratch_place,
)
from crossdevice.kernels.host.resources.threads import run_together
from crossdevice.kernels.host.work_list import (
    MANY_INPUTS,
    NO_PROGRAM,
    RANGE_ELEMENTS,
    ROW_WORDS,
    TUPLE_HEADER_BYTES,
    Task,
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
    """Returns what does passes of one recipe, once, and adds up the sums that `summed` has for each of them.

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
    return _TiledPass(*found, summed, every).run


def _nothing() -> None:
    """Does no pass."""


def _sum_afterwards(tasks: Sequence[tuple[Arrays, Arrays]], summed: Sequence[Summed], recipe: Recipe) -> None:
    fused_batch(tasks, recipe)
    for each in summed:
        each.add()


class _TiledPass:
    """Tasks of one kernel, done tile by tile; several threads take ranges of them one by one."""

    def __init__(
        self,
        prepared: PreparedPass | None,
        tasks: Sequence[Task],
        summed: Sequence[Sequence[Summed]],
        every: Sequence[Summed],
    ) -> None:
        self._prepared, self._tasks, self._all = prepared, tasks, every  # rows have addresses in the tuples
        self._memories = tuple([each.memory for each in every])
        self._targets = tuple([each.memory if each.target is None else each.target for each in every])
        traffic = sum([traffic_bytes(*task) for task in tasks])
        self._participants = participants_for(traffic)
        self._has_many_inputs = any(len(inputs) >= MANY_INPUTS for inputs, _ in tasks)
        self._counter = array("q", [0])
        rows: list[tuple[int, ...]] = [(0,) * ROW_WORDS]  # a tile, by itself a work list for the kernel
        notes: list[int] = []
        number = 0
        for (inputs, outputs), of_task in zip(tasks, summed, strict=True):
            size, num_arrays = inputs[0].size, len(inputs) + len(outputs)
            step = TILE_BYTES // (num_arrays * inputs[0].itemsize) // RANGE_ELEMENTS * RANGE_ELEMENTS
            places = id(inputs) + TUPLE_HEADER_BYTES, len(inputs), id(outputs) + TUPLE_HEADER_BYTES
            ranges: Iterable[tuple[int, int]] = ((0, size),)
            if self._participants > 1:
                own = traffic_bytes(inputs, outputs)
                ranges = ranges_of(size, RANGES_PER_THREAD * self._participants * own // traffic)
            for start, stop in ranges:
                rows.append((*places, len(outputs), start, stop, len(notes), max(step, RANGE_ELEMENTS)))
            notes += len(of_task), number
            number += len(of_task)
            for memory, _, offset, kind, _ in of_task:
                kernel = kind.load()
                item_bytes, first_row = memory.nbytes // max(size, 1), offset // ROW_BYTES
                notes += kernel.address, item_bytes, first_row, kernel.keys
        self._num_rows, self._notes = len(rows) - 1, array("q", notes)
        divisor, program = 1.0, NO_PROGRAM
        if prepared is not None:
            divisor, program = prepared.divisor, prepared.program
        self._words = as_words(rows, divisor, program, is_shared=False)
        self._words[0] = 1

    def run(self) -> None:
        """Runs the kernel, and adds up sums."""
        if self._participants == 1:
            self._walk(tuple([each.sums for each in self._all]))
        else:
            self._found: list[tuple[NDArray[Any], ...]] = []
            run_together(self._take_ranges, self._participants)
            for sums in self._found:
                for each, own in zip(self._all, sums, strict=True):
                    each.sums[:] += own
        for each in self._all:  # the walk knows whole rows only
            rest = each.memory.nbytes % ROW_BYTES
            if rest:
                each.add(each.memory.nbytes - rest)

    def _take_ranges(self) -> None:
        sums = tuple([np.zeros_like(each.sums) for each in self._all])
        self._walk(sums)
        self._found.append(sums)

    def _walk(self, sums: tuple[NDArray[Any], ...]) -> None:
        from crossdevice.kernels.host.llvm.tiles import compiled_walk

        words = self._words if self._participants == 1 else self._words[:]
        compiled_walk()(
            0 if self._prepared is None else self._prepared.address,
            words.buffer_info()[0],
            self._num_rows,
            self._counter.buffer_info()[0] if self._participants > 1 else 0,
            self._notes.buffer_info()[0],
            id(self._memories) + TUPLE_HEADER_BYTES,
            id(self._targets) + TUPLE_HEADER_BYTES,
            id(sums) + TUPLE_HEADER_BYTES,
            scratch_place() if self._has_many_inputs else 0,
        )
