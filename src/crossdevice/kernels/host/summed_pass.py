"""The fused pass with sums of what it reads and writes, added up tile by tile while it is in a cache."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crossdevice.kernels.host.fingerprint_pass import FINGERPRINT, RowSums, is_compiled
from crossdevice.kernels.host.fused_pass import (
    RANGES_PER_THREAD,
    THREADED_BYTES,
    Arrays,
    PreparedPass,
    fused_batch,
    kernel_of,
    scratch_place,
)
from crossdevice.kernels.host.resources.threads import num_threads, run_together
from crossdevice.kernels.host.work_list import (
    MANY_INPUTS,
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

    def add(self, start: int = 0) -> None:
        """Adds the sums of the bytes from `start` on."""
        self.kind.add(self.memory.reshape(-1).view(np.uint8)[start:], self.offset + start, self.sums)


def zero_sums() -> NDArray[np.uint64]:
    """Returns the fingerprint sums of nothing."""
    return np.zeros(NUM_SUMS, np.uint64)


def summed_batch(
    tasks: Sequence[tuple[Arrays, Arrays]], summed: Sequence[Sequence[Summed]], recipe: Recipe
) -> None:
    """Does many passes of one recipe, as `fused_batch`; adds up the sums that `summed` has for each of them.

    Memory is read once: a tile is reduced first, and what it was made of and has become is in a cache then.
    """
    if not tasks:
        return
    found = kernel_of(tasks, recipe) if is_compiled() else None
    every = [each for of_task in summed for each in of_task]
    if found is None or any(each.offset % ROW_BYTES for each in every):
        fused_batch(tasks, recipe)
        for each in every:
            each.add()
        return
    _TiledPass(*found, summed, every).run()


class _TiledPass:
    """Tasks of one kernel, done tile by tile; several threads take ranges of them one by one."""

    def __init__(
        self,
        prepared: PreparedPass,
        tasks: Sequence[Task],
        summed: Sequence[Sequence[Summed]],
        every: Sequence[Summed],
    ) -> None:
        self._prepared, self._tasks = prepared, tasks  # kept: rows have addresses in their tuples
        self._all = every
        self._memories = tuple([each.memory for each in self._all])
        traffic = sum([traffic_bytes(*task) for task in tasks])
        self._participants = 1
        if traffic >= THREADED_BYTES:
            self._participants = min(num_threads(), 2 * traffic // THREADED_BYTES)
        self._has_many_inputs = any(len(inputs) >= MANY_INPUTS for inputs, _ in tasks)
        self._counter, self._notes = array("q", [0]), array("q")
        self._rows: list[tuple[int, ...]] = []
        number = 0
        for (inputs, outputs), of_task in zip(tasks, summed, strict=True):
            size, num_arrays = inputs[0].size, len(inputs) + len(outputs)
            step = TILE_BYTES // (num_arrays * inputs[0].itemsize) // RANGE_ELEMENTS * RANGE_ELEMENTS
            places = id(inputs) + TUPLE_HEADER_BYTES, len(inputs), id(outputs) + TUPLE_HEADER_BYTES
            place = len(self._notes)
            ranges: Iterable[tuple[int, int]] = [(0, size)]
            if self._participants > 1:
                ranges = ranges_of(size, RANGES_PER_THREAD * self._participants)
            for start, stop in ranges:
                self._rows.append((*places, len(outputs), start, stop, place, max(step, RANGE_ELEMENTS)))
            self._notes.extend((len(of_task), number))
            number += len(of_task)
            for memory, _, offset, kind in of_task:
                kernel = kind.load()
                item_bytes, first_row = memory.nbytes // max(size, 1), offset // ROW_BYTES
                self._notes.extend((kernel.address, item_bytes, first_row, kernel.keys))

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

        prepared = self._prepared
        rows = [
            (0,) * ROW_WORDS,
            *self._rows,
        ]  # the first one is a tile, by itself a work list for the kernel
        words = as_words(rows, prepared.divisor, prepared.program, is_shared=False)
        words[0] = 1
        compiled_walk()(
            prepared.address,
            words.buffer_info()[0],
            len(self._rows),
            self._counter.buffer_info()[0] if self._participants > 1 else 0,
            self._notes.buffer_info()[0],
            id(self._memories) + TUPLE_HEADER_BYTES,
            id(sums) + TUPLE_HEADER_BYTES,
            scratch_place() if self._has_many_inputs else 0,
        )
