"""Broadcast: every other rank copies the arrays of one."""

from __future__ import annotations

from collections.abc import Sequence

from crossdevice.plans.tasks import Buffer, Ref, Task, TaskPlan
from crossdevice.values.recipe import COPYING


def broadcast(num_bytes: Sequence[int], size: int, root: int, *, seen_by: int | None = None) -> TaskPlan:
    """The tasks for leaves of so many bytes, which `root` keeps where they are."""
    tasks = []
    for leaf, length in enumerate(num_bytes):
        array = Buffer("input", root, leaf, 0, "uint8", length)
        for worker in range(size):
            if worker == root or not length or seen_by not in (None, root, worker):
                continue
            copy = Buffer("result", worker, leaf, 0, "uint8", length)
            outputs = (Ref.whole(copy),) if seen_by in (None, worker) else ()
            tasks.append(Task(1, worker, (Ref.whole(array),), COPYING, outputs))
    return TaskPlan(size, tuple(tasks), seen_by, is_brought_to_all=True)
