"""Reductions by the `*_implementation` methods that a subclass has overridden."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from crossdevice.execution.local.batch import CheckedBatch
from crossdevice.execution.local.copying import copied_into
from crossdevice.execution.local.planning import Planner
from crossdevice.execution.reading.outputs import wrapped
from crossdevice.values.distributed import PerReplica, components_of


def reduced_by_hook(
    batch: CheckedBatch,
    destinations: Sequence[Any],
    hook: Callable[[list[tuple[PerReplica, Any]]], list[Any]],
    planner: Planner,
) -> list[Any]:
    """The results of a batch by a hook that takes pairs of one leaf and its destinations.

    A lone replica that stays on its device needs no hook.
    """
    answers: list[Any] = [None] * len(batch.requests)
    pairs: list[tuple[PerReplica, Any]] = []
    for number, (value, devices, _) in enumerate(batch.requests):
        if len(value.devices) == 1 and set(value.devices) == set(devices):
            alone = CheckedBatch([batch.requests[number]], batch.op, batch.options)
            answers[number] = alone.run(planner)[0]
        else:
            pairs += [
                (PerReplica.of(leaf.arrays, value.devices), destinations[number]) for leaf in value.leaves
            ]
    results = iter(hook(pairs) if pairs else [])
    for number, (value, devices, out) in enumerate(batch.requests):
        if answers[number] is None:
            leaves = [next(results) for _ in value.leaves]
            columns = list(map(components_of, leaves))
            answer = leaves[0] if value.structure is None else wrapped(columns, value.structure, devices)
            answers[number] = answer if out is None else copied_into(answer, devices, out)
    return answers
