"""What is done for long: calls of all kinds, in one process and between several; some are refused."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np

import crossdevice as cd
from soak.samples import Sample, sampled

SIZES = (1, 100, 10_000, 1 << 20)
DTYPES = (np.float32, np.float64, np.float16, np.int32)
PRECISIONS = ("fast", "accurate", "exact")


def work_here(seed: int) -> Callable[[], int]:
    """A round of calls in one process; returns how many they were."""
    choose = random.Random(seed)
    strategy = cd.MirroredStrategy(["cpu:0", "cpu:1"])
    weights = strategy.create_variable(np.zeros(1000, np.float32))
    kept = cd.RingAllReduce()

    def step(x: Any) -> Any:
        total = cd.get_replica_context().all_reduce("mean", x)
        weights.assign_add(total)
        return total

    def work() -> int:
        size, dtype = choose.choice(SIZES), choose.choice(DTYPES)
        options = cd.CommunicationOptions(precision=choose.choice(PRECISIONS))
        arrays = [np.full(size, number + 1, dtype) for number in range(choose.choice((2, 3, 8)))]
        value = cd.PerReplica(arrays)
        expected = sum(range(1, len(arrays) + 1))
        fresh = choose.choice((cd.TreeAllReduce, cd.DirectAllReduce, cd.HierarchicalCopyAllReduce))()
        for ops in (kept, fresh):
            _check(ops.reduce("sum", value, "cpu:0", options), expected)
            _check(ops.reduce("sum", {"w": value}, value, options)["w"].values[-1], expected)
        bound = kept.bind("max", value, value, options)
        _check(bound().values[0], len(arrays))
        _check(kept.gather(cd.PerReplica([array[:1] for array in arrays]), "cpu:0")[-1:], len(arrays))
        _check(kept.bound.all_to_all(value)().values[0][-1:], len(arrays))
        strategy.run(step, args=(cd.PerReplica([np.ones(1000, np.float32)] * 2),))
        rows = cd.IndexedSlices(np.ones((2, 3), np.float32), np.array([0, 1]), (4, 3))
        cd.to_dense(kept.reduce("sum", cd.PerReplica([rows, rows]), "cpu:0"))
        with contextlib.suppress(cd.errors.ShapeMismatchError):
            kept.reduce("sum", cd.PerReplica([arrays[0], np.zeros((3, 3), dtype)]), "cpu:0")
        kept.reduce("sum", value, value, options, out=value)
        _check(arrays[0], expected)
        return 10

    return work


def soak_rank(group: cd.ProcessGroup, seed: int, seconds: float) -> list[Sample]:
    """What each of several processes does; they go on together, since every call is one of all."""
    choose = random.Random(seed)  # the same on all ranks
    ops = cd.CollectiveAllReduce(group=group)

    def work() -> int:
        for _ in range(20):
            size, dtype = choose.choice(SIZES), choose.choice(DTYPES)
            options = cd.CommunicationOptions(precision=choose.choice(PRECISIONS))
            mine = np.full(size, group.rank + 1, dtype)
            expected = group.size * (group.size + 1) // 2
            _check(ops.reduce("sum", mine, "cpu:0", options), expected)
            value = cd.PerReplica([mine, mine.copy()])
            _check(ops.reduce("sum", value, value, options).values[1], 2 * expected)
            _check(ops.broadcast(mine, "cpu:0", from_rank=1), 2)
            _check(ops.gather(mine[:1], "cpu:0")[-1:], group.size)
        with cd.cluster_from_env().form_group("torch", timeout_seconds=60.0) as other:
            cd.CollectiveAllReduce(group=other).reduce("sum", np.ones(3), "cpu:0")
        return 81

    def agreed(is_time: bool) -> bool:
        return bool(ops.broadcast(np.int32(is_time), "cpu:0", from_rank=0))

    return list(sampled(work, seconds, agreed=agreed))


def _check(found: Any, expected: float) -> None:
    if not (np.asarray(found) == expected).all():
        raise AssertionError(f"{found} instead of {expected}")
