"""Gather: every rank copies the arrays of all ranks, end to end; sparse rows and their indices too."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from crossdevice.plans.tasks import Buffer, Ref, Task, TaskPlan
from crossdevice.values.recipe import COPYING


def gather(num_bytes: Sequence[Sequence[int]], *, seen_by: int | None = None) -> TaskPlan:
    """The tasks for leaves of which each rank has one array, of so many bytes."""
    return TaskPlan(len(num_bytes[0]), tuple(_copies(num_bytes, seen_by)), seen_by, is_brought_to_all=True)


def _copies(num_bytes: Sequence[Sequence[int]], seen_by: int | None) -> Iterator[Task]:
    ranks = range(len(num_bytes[0]))
    arrays = [
        [Buffer("input", rank, leaf, 0, "uint8", length) for rank, length in enumerate(of_ranks)]
        for leaf, of_ranks in enumerate(num_bytes)
    ]
    for leaf, of_ranks in enumerate(num_bytes):
        edges = list(itertools.accumulate(of_ranks, initial=0))
        for worker in ranks:
            whole = Buffer("result", worker, leaf, 0, "uint8", edges[-1])
            for rank in ranks if seen_by in (None, worker) else (seen_by,):
                start, stop = edges[rank : rank + 2]
                if start < stop:
                    outputs = (Ref(whole, start, stop),) if seen_by in (None, worker) else ()
                    yield Task(1, worker, (Ref.whole(arrays[leaf][rank]),), COPYING, outputs)
