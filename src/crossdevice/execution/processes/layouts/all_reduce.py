"""All-reduce: each worker combines a shard of all contributions, and every rank gets all shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from crossdevice.plans.tasks import ContributionsOfRanks, Piece, ReducedLeaf, Ref, Task, TaskPlan, pieces_of


def all_reduce(
    leaves: Sequence[ReducedLeaf],
    workers: Sequence[int] | None = None,
    *,
    is_small: bool = False,
    is_even: bool = False,
    seen_by: int | None = None,
) -> TaskPlan:
    """The tasks for leaves that travel together; `workers` are the ranks that combine, else all of them.

    If they are small every rank combines everything: one exchange instead of two. With `is_even` shards are
    equal, as engines move them.
    """
    size = len(leaves[0].counts)
    if is_small:
        emit = _combined_by_all(leaves, seen_by)
    else:
        pieces = pieces_of([leaf.length for leaf in leaves], workers or range(size), is_even=is_even)
        emit = _shards(leaves, pieces, seen_by)
    partials = [task for leaf in leaves for task in leaf.partial_tasks()]
    return TaskPlan(size, (*partials, *emit), seen_by, is_brought_to_all=is_small)


def _shards(leaves: Sequence[ReducedLeaf], pieces: Iterable[Piece], seen_by: int | None) -> Iterator[Task]:
    contributions = list(map(ContributionsOfRanks, leaves))
    for worker, number, start, stop in pieces:
        leaf, seen = leaves[number], None if worker == seen_by else seen_by
        ranks = range(len(leaf.counts)) if seen is None else (seen,)
        yield Task(
            1,
            worker,
            contributions[number].between(start, stop, seen),
            leaf.of_ranks,
            tuple([Ref(leaf.result_of(rank), start, stop) for rank in ranks]),
        )


def _combined_by_all(leaves: Sequence[ReducedLeaf], seen_by: int | None) -> Iterator[Task]:
    contributions = list(map(ContributionsOfRanks, leaves))
    for worker in range(len(leaves[0].counts)):
        seen = None if worker == seen_by else seen_by
        for leaf, arrays in zip(leaves, contributions, strict=True):
            if leaf.length:
                outputs = (Ref.whole(leaf.result_of(worker)),) if seen is None else ()
                yield Task(1, worker, arrays.between(0, leaf.length, seen), leaf.of_ranks, outputs)
