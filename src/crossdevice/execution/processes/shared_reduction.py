"""A pack reduced through shared memory: each rank combines its shard straight from what all have brought."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from crossdevice.execution.processes.packs import PackedPiece, ProcessPack, pieces_between
from crossdevice.execution.processes.travelling import LINE_ELEMENTS, shard_edges
from crossdevice.kernels.host.fused_pass import STREAMED_BYTES, bound_batch, fused_batch, fused_pass
from crossdevice.kernels.recipe import COPYING, Recipe
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.process_groups.shared_arrays import NOWHERE, Bytes, Place
from crossdevice.process_groups.shared_memory import WINDOW_BYTES, SharedMemory
from crossdevice.values.weights import Weights

Flat = NDArray[Any]

ALONE_BYTES = 128 << 10
"""Up to here, of what all ranks bring, every rank combines everything itself: one step instead of two."""


class _Chunk(NamedTuple):
    """A range of the pack that fits into windows, and who does what of it."""

    start: int
    brought: tuple[PackedPiece, ...]
    """What this rank puts into its window: what others combine."""
    mine: tuple[PackedPiece, ...]
    theirs: tuple[tuple[int, PackedPiece], ...]
    """What others combine, with their ranks; nothing if every rank combines everything."""

    def place(self, piece: PackedPiece) -> slice:
        """Where a piece is in the windows."""
        return slice(piece.in_pack.start - self.start, piece.in_pack.stop - self.start)


class _InPlace(NamedTuple):
    """Arrays that ranks have in shared memory, so that nobody need copy them to or from a window."""

    inputs: Sequence[Flat | None]
    """By rank; None for those that are in private memory."""
    outputs: Sequence[Flat] | None = None
    """The outputs of all ranks; None if any of them is in private memory."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing goes through windows."""
        return self.outputs is not None and all(array is not None for array in self.inputs)


class SharedPack:
    """How one rank reduces a pack through the windows of its group.

    A chunk is brought, combined and collected in turn. While a rank combines one it can rely on the others
    having brought it, and once all have brought the next one the results of this one are there: so there is
    one step for each chunk, and one more at the end. The bits are those of any other way: an element is
    made of the same contributions, in the order of ranks, by the same kernel.
    """

    def __init__(self, pack: ProcessPack, shared: SharedMemory) -> None:
        self._pack = pack
        self.shared = shared
        self._length = chunk_length(pack)
        numbers = [pack.num_arrays(rank) for rank in range(len(pack.counts))]
        all_bytes = pack.num_elements * pack.travelling.itemsize * sum(numbers)
        self._is_alone = all_bytes <= ALONE_BYTES and pack.num_elements <= self._length
        self._is_lone = pack.is_sent_as_it_is and set(numbers) == {1} and not self._is_alone
        self.is_small_and_lone = self._is_alone and pack.is_sent_as_it_is and pack.num_elements > 0
        """Whether it is one leaf of which every rank combines everything, in one step."""
        self._is_streamed = pack.num_elements * pack.result.itemsize * len(numbers) >= STREAMED_BYTES
        self._nothing_in_place = _InPlace([None] * len(numbers))
        self._whole = self._chunk(0, pack.num_elements)
        self._chunks = [
            self._chunk(start, min(start + self._length, pack.num_elements))
            for start in range(0, pack.num_elements, self._length)
        ]
        self._brought = [
            [self._arrays(window, number) for window, number in zip(windows, numbers, strict=True)]
            for windows in shared.brought
        ]
        length = min(self._length, pack.num_elements)
        self.inputs = [[array[:length] for rank in of_all for array in rank] for of_all in self._brought]
        """Where the arrays of all ranks go if every rank combines everything; by parity of the step."""
        self.own = [[array[:length] for array in of_all[shared.rank]] for of_all in self._brought]
        self._made = [
            [window[: self._length * pack.result.itemsize].view(pack.result) for window in windows]
            for windows in shared.made
        ]

    def bound(self, views: Sequence[Flat], targets: Sequence[Flat]) -> Callable[[GroupCall], None]:
        """A function that reduces these arrays of a small and lone leaf into those targets."""
        steps = self.shared.steps
        copies = [list(zip(own, views, strict=True)) for own in self.own]
        passes = [bound_batch([(inputs, targets)], self._pack.final_recipe) for inputs in self.inputs]

        def reduce(call: GroupCall) -> None:
            parity = steps.parity
            for array, view in copies[parity]:
                array[:] = view
            self.tell_of(self.own[parity])
            call.step()
            for work in passes[parity]:
                work()

        return reduce

    def run(
        self,
        call: GroupCall,
        views: Mapping[int, Sequence[Flat]],
        total: Flat,
        copies: Mapping[int, Sequence[Flat]],
        weights: Weights | None = None,
    ) -> None:
        """The pack's result in `total` and in the copies of its leaves."""
        recipe = self._pack.final_recipe.with_weights(weights)
        arrays, steps = self.shared.arrays, self.shared.steps
        found = self._nothing_in_place
        before: tuple[_Chunk, int] | None = None
        source = views[self._pack.leaves[0].leaf][0] if self._is_lone else None
        place = NOWHERE if source is None else arrays.place_of(source)
        for chunk in self._chunks:
            parity = steps.parity
            if place == NOWHERE:
                self._bring(chunk, parity, views)
            if source is not None and chunk is self._chunks[0]:
                call.step([arrays.num_freed, *place, *arrays.place_of(total)])
                found = self._in_place(source, total)
                if found.is_complete:
                    self._combine(self._whole, parity, views, total, copies, found, recipe)
                    break
            else:
                call.step()
            if before is not None:
                self._collect(*before, total, copies)
            self._combine(chunk, parity, views, total, copies, found, recipe)
            if found.outputs is None:
                before = chunk, parity
        if self._is_alone:
            return
        call.step()
        if before is not None:
            self._collect(*before, total, copies)
        elif found.outputs is not None:
            for copy in copies[self._pack.leaves[0].leaf]:
                copy[:] = total

    def explained(self) -> str:
        """What a rank does with arrays in private memory, in words."""
        pack = self._pack
        what = "its arrays" if pack.partial is None else f"one partial result in {pack.partial.name}"
        elements = sum(piece.stop - piece.start for chunk in self._chunks for piece in chunk.brought)
        num_bytes = elements * pack.travelling.itemsize * pack.num_arrays(self.shared.rank)
        part = "everything" if self._is_alone else "its shard"
        num_steps = len(self._chunks) + (not self._is_alone)
        return (
            f"brings {what} to shared memory, {num_bytes} bytes, and combines {part} there, "
            f"in {num_steps} step{'' if num_steps == 1 else 's'}"
        )

    def _in_place(self, source: Flat, total: Flat) -> _InPlace:
        """After the first step: which arrays of all ranks are in shared memory."""
        shared = self.shared
        inputs: list[Flat | None] = []
        outputs: list[Flat | None] = []
        for rank in range(len(self._pack.counts)):
            num_freed, *numbers = shared.steps.numbers_of(rank, 0, 1 + 2 * len(NOWHERE))
            shared.arrays.note_freed(rank, num_freed)
            ends = Place(*numbers[: len(NOWHERE)]), Place(*numbers[len(NOWHERE) :])
            for arrays, place, own in zip((inputs, outputs), ends, (source, total), strict=True):
                if place == NOWHERE or rank == shared.rank:
                    arrays.append(None if place == NOWHERE else own)
                else:
                    arrays.append(shared.arrays.array_at(rank, place, own))
        everywhere = [output for output in outputs if output is not None]
        return _InPlace(inputs, everywhere if len(everywhere) == len(outputs) else None)

    def _chunk(self, start: int, stop: int) -> _Chunk:
        leaves, rank = self._pack.leaves, self.shared.rank
        if self._is_alone:
            everything = pieces_between(leaves, start, stop)
            return _Chunk(start, everything, everything, ())
        edges = [start + edge for edge in shard_edges(stop - start, len(self._pack.counts))]
        shards = [pieces_between(leaves, *ends) for ends in itertools.pairwise(edges)]
        theirs = tuple((peer, piece) for peer, shard in enumerate(shards) if peer != rank for piece in shard)
        brought = tuple(piece for _, piece in theirs)
        # Of a partial result the own part is made with the rest, and in the same place.
        brought += shards[rank] if self._pack.partial is not None else ()
        return _Chunk(start, brought, shards[rank], theirs)

    def _arrays(self, window: Bytes, number: int) -> list[Flat]:
        """A rank's arrays in its window, one after the other."""
        size = self._length * self._pack.travelling.itemsize
        return [window[k * size : (k + 1) * size].view(self._pack.travelling) for k in range(number)]

    def _bring(self, chunk: _Chunk, parity: int, views: Mapping[int, Sequence[Flat]]) -> None:
        arrays = self._brought[parity][self.shared.rank]
        if self._pack.partial is None:
            for piece in chunk.brought:
                place = chunk.place(piece)
                for array, view in zip(arrays, views[piece.leaf], strict=True):
                    array[place] = view[piece.in_leaf]
                self.tell_of([array[place] for array in arrays])
            return
        (partial,) = arrays
        tasks = [
            ([view[piece.in_leaf] for view in views[piece.leaf]], [partial[chunk.place(piece)]])
            for piece in chunk.brought
        ]
        fused_batch(tasks, self._pack.local_recipe)
        self.tell_of([window for _, (window,) in tasks])

    def tell_of(self, shown: Sequence[Flat]) -> None:
        """Calls `on_shown`, if it is set, with what others are about to read."""
        if self.shared.on_shown is not None:
            for array in shown:
                self.shared.on_shown(array)

    def _combine(
        self,
        chunk: _Chunk,
        parity: int,
        views: Mapping[int, Sequence[Flat]],
        total: Flat,
        copies: Mapping[int, Sequence[Flat]],
        found: _InPlace,
        recipe: Recipe,
    ) -> None:
        brought, rank = self._brought[parity], self.shared.rank
        made = self._made[parity][rank]
        is_own_private = self._pack.partial is None and not self._is_alone
        tasks = []
        for piece in chunk.mine:
            place = chunk.place(piece)
            inputs: list[Flat] = []
            for peer, array in enumerate(found.inputs):
                if peer == rank and is_own_private:
                    inputs += [view[piece.in_leaf] for view in views[piece.leaf]]
                elif array is not None:
                    inputs.append(array[piece.in_leaf])
                else:
                    inputs += [window[place] for window in brought[peer]]
            if found.outputs is not None:
                outputs = [output[piece.in_pack] for output in found.outputs]
            else:
                outputs = [total[piece.in_pack], *(copy[piece.in_leaf] for copy in copies[piece.leaf])]
                if not self._is_alone:
                    outputs.append(made[place])
            tasks.append((inputs, outputs))
        if len(tasks) == 1:
            fused_pass(*tasks[0], recipe)
        else:
            fused_batch(tasks, recipe)
        if not self._is_alone and found.outputs is None:
            self.tell_of([outputs[-1] for _, outputs in tasks])

    def _collect(self, chunk: _Chunk, parity: int, total: Flat, copies: Mapping[int, Sequence[Flat]]) -> None:
        tasks = [
            (
                [self._made[parity][peer][chunk.place(piece)]],
                [total[piece.in_pack], *(copy[piece.in_leaf] for copy in copies[piece.leaf])],
            )
            for peer, piece in chunk.theirs
        ]
        fused_batch(tasks, COPYING, is_streamed=self._is_streamed)


def chunk_length(pack: ProcessPack) -> int:
    """How many elements of a pack fit into windows at once; 0 if there are too many arrays."""
    most = max(pack.num_arrays(rank) for rank in range(len(pack.counts)))
    widest = max(pack.travelling.itemsize * most, pack.result.itemsize)
    return WINDOW_BYTES // widest // LINE_ELEMENTS * LINE_ELEMENTS
