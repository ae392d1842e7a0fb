"""A leaf that is reduced over the replicas of all ranks, as layouts see it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from crossdevice.plans.tasks import Buffer, Ref, Task
from crossdevice.values.recipe import Recipe


class ReducedLeaf(NamedTuple):
    """A leaf by its number in the call. Complex numbers are pairs of reals here, unless they are multiplied.

    `counts` has the replicas of each rank. With a `partial` dtype, one partial per rank travels in place of
    the arrays of its replicas.
    """

    number: int
    length: int
    counts: tuple[int, ...]
    dtype: str
    partial: str | None
    result: str
    of_replicas: Recipe
    """Makes partials."""
    of_ranks: Recipe
    """Makes results, of whatever travels."""

    @property
    def travelling(self) -> str:
        """The dtype of the exchanged arrays."""
        return self.partial or self.dtype

    def num_arrays(self, rank: int) -> int:
        """Returns the number of arrays that a rank sends."""
        return self.counts[rank] if self.partial is None else 1

    def inputs(self, rank: int) -> list[Buffer]:
        """Returns the arrays of a rank's replicas."""
        return [
            Buffer("input", rank, self.number, replica, self.dtype, self.length)
            for replica in range(self.counts[rank])
        ]

    def contributions(self, rank: int) -> list[Buffer]:
        """Lists the arrays that a rank sends: those of its replicas, or its partial."""
        if self.partial is None:
            return self.inputs(rank)
        return [Buffer("partial", rank, self.number, 0, self.partial, self.length)]

    def result_of(self, rank: int) -> Buffer:
        """Returns the result, which all replicas of a rank share."""
        return Buffer("result", rank, self.number, 0, self.result, self.length)

    def partial_tasks(self) -> Iterator[Task]:
        """Yields tasks that combine the arrays of each rank's own replicas, if partials are exchanged."""
        if self.partial is not None and self.length:
            for rank in range(len(self.counts)):
                inputs = tuple(map(Ref.whole, self.inputs(rank)))
                (partial,) = self.contributions(rank)
                yield Task(0, rank, inputs, self.of_replicas, (Ref.whole(partial),))


class ContributionsOfRanks:
    """The contributions to a leaf of all ranks in order, or of one rank that sees only its own."""

    def __init__(self, leaf: ReducedLeaf) -> None:
        self._of_ranks = [leaf.contributions(rank) for rank in range(len(leaf.counts))]
        self._of_all = list(itertools.chain.from_iterable(self._of_ranks))

    def between(self, start: int, stop: int, seen_by: int | None = None) -> tuple[Ref, ...]:
        """Returns these elements of all contributions, or of those of one rank."""
        buffers: Sequence[Buffer] = self._of_all if seen_by is None else self._of_ranks[seen_by]
        return tuple([Ref(buffer, start, stop) for buffer in buffers])
