"""Reductions by the `*_implementation` methods that a subclass has overridden."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from crossdevice.errors import MismatchError
from crossdevice.execution.local.batch import CheckedBatch
from crossdevice.execution.local.copying import copied_into
from crossdevice.execution.local.planning import Planner
from crossdevice.execution.reading.outputs import wrapped
from crossdevice.values.device import Device
from crossdevice.values.distributed import PerReplica, components_of


def reduced_by_hook(
    batch: CheckedBatch,
    destinations: Sequence[Any],
    hook: Callable[[list[tuple[PerReplica, Any]]], Any],
    name: str,
    planner: Planner,
) -> list[Any]:
    """Reduces a batch by a hook that takes pairs of one leaf and its destinations.

    A lone replica that stays on its device needs no hook. What the hook returns is checked; `name` is what
    errors call it.
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
    results = iter(_checked_results(hook(pairs), len(pairs), name) if pairs else [])
    for number, (value, devices, out) in enumerate(batch.requests):
        if answers[number] is None:
            leaves = [next(results) for _ in value.leaves]
            for leaf in leaves:
                check_result(leaf, devices, name)
            columns = list(map(components_of, leaves))
            answer = leaves[0] if value.structure is None else wrapped(columns, value.structure, devices)
            answers[number] = answer if out is None else copied_into(answer, devices, out)
    return answers


def _checked_results(results: Any, expected: int, name: str) -> list[Any]:
    if not isinstance(results, (list, tuple)):
        found = "None" if results is None else f"a {type(results).__name__}"
        raise MismatchError(
            f"{name} returned {found} for {expected} values; expected a list with one result for each"
        )
    if len(results) != expected:
        raise MismatchError(
            f"{name} returned {len(results)} results for {expected} values; expected one for each"
        )
    return list(results)


def check_result(result: Any, destinations: Sequence[Device], name: str) -> None:
    """Refuses a hook's result that is nothing, or has not one component for each destination."""
    if result is None:
        raise MismatchError(
            f"{name} returned None for a value; expected the result on {', '.join(map(str, destinations))}"
        )
    number = len(components_of(result))
    if number != len(destinations):
        raise MismatchError(
            f"{name} returned a result with {number} components for {len(destinations)} destinations "
            f"({', '.join(map(str, destinations))}); expected one for each"
        )
