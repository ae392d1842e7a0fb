"""All-to-all: each replica's array is cut into a part for each replica, which puts its parts end to end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from crossdevice.plans.tasks import Buffer, Ref, Task, TaskPlan
from crossdevice.values.recipe import COPYING


def all_to_all(
    num_bytes: Sequence[Sequence[Sequence[int]]],
    counts: Sequence[Sequence[int]],
    *,
    seen_by: int | None = None,
) -> TaskPlan:
    """The tasks for leaves: of each, the bytes that each replica has for each, and each rank's replicas."""
    tasks = itertools.chain.from_iterable(
        _copies(leaf, *each, seen_by) for leaf, each in enumerate(zip(num_bytes, counts, strict=True))
    )
    return TaskPlan(len(counts[0]), tuple(tasks), seen_by)


def _copies(
    leaf: int, num_bytes: Sequence[Sequence[int]], counts: Sequence[int], seen_by: int | None
) -> Iterator[Task]:
    replicas = [(rank, replica) for rank, count in enumerate(counts) for replica in range(count)]
    arrays = [
        Buffer("input", rank, leaf, replica, "uint8", sum(parts))
        for (rank, replica), parts in zip(replicas, num_bytes, strict=True)
    ]
    firsts = [list(itertools.accumulate(parts, initial=0)) for parts in num_bytes]
    for target, (worker, own) in enumerate(replicas):
        lengths = [parts[target] for parts in num_bytes]
        whole = Buffer("result", worker, leaf, own, "uint8", sum(lengths))
        end = 0
        for source, length in enumerate(lengths):
            start, end = end, end + length
            is_seen = seen_by in (None, worker)
            if length and (is_seen or replicas[source][0] == seen_by):
                first = firsts[source][target]
                outputs = (Ref(whole, start, end),) if is_seen else ()
                yield Task(1, worker, (Ref(arrays[source], first, first + length),), COPYING, outputs)
