"""Reduce-scatter: every replica of every rank gets its own part of what all contributions make."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from crossdevice.plans.tasks import Buffer, ContributionsOfRanks, ReducedLeaf, Ref, Task, TaskPlan


def reduce_scatter(
    leaves: Sequence[ReducedLeaf],
    edges: Sequence[Sequence[int]],
    workers: Sequence[int] | None = None,
    *,
    seen_by: int | None = None,
) -> TaskPlan:
    """The tasks for leaves whose parts, for all replicas in the order of ranks, begin and end at `edges`.

    `workers` has for each rank the one that combines its parts, else the rank itself.
    """
    size = len(leaves[0].counts)
    combining = workers or range(size)
    tasks = [task for leaf in leaves for task in leaf.partial_tasks()]
    contributions = list(map(ContributionsOfRanks, leaves))
    parts = [iter(itertools.pairwise(of_leaf)) for of_leaf in edges]
    for owner, worker in enumerate(combining):
        seen = None if worker == seen_by else seen_by
        for leaf, arrays, cuts in zip(leaves, contributions, parts, strict=True):
            for replica, (start, stop) in zip(range(leaf.counts[owner]), cuts, strict=False):
                if start < stop:
                    part = Buffer("result", owner, leaf.number, replica, leaf.result, stop - start)
                    outputs = (Ref.whole(part),) if seen in (None, owner) else ()
                    inputs = arrays.between(start, stop, seen)
                    tasks.append(Task(1, worker, inputs, leaf.of_ranks, outputs))
    return TaskPlan(size, tuple(tasks), seen_by)
