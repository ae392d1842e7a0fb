"""Reductions by the `*_implementation` methods that a subclass has overridden."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from crossdevice.backends.registry import backend_of_type
from crossdevice.errors import MismatchError
from crossdevice.execution.local.batch import CheckedBatch
from crossdevice.execution.local.copying import copied_into
from crossdevice.execution.local.planning import Planner
from crossdevice.execution.reading.leaf_spec import Dense
from crossdevice.execution.reading.outputs import wrapped
from crossdevice.execution.reading.values import at
from crossdevice.values.device import Device
from crossdevice.values.distributed import PerReplica, components_of
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.quantities import counted, kind_text
from crossdevice.values.reduce_op import ReduceOp


class Hooks(NamedTuple):
    """TensorFlow's overridable methods of an algorithm, and those that a subclass has overridden."""

    reduce: Callable[..., Any]
    batch_reduce: Callable[..., Any]
    broadcast: Callable[..., Any]
    overridden: frozenset[str]

    @property
    def reduces(self) -> bool:
        """True if they take the place of planned reductions."""
        return not self.overridden.isdisjoint(("reduce_implementation", "batch_reduce_implementation"))

    @property
    def broadcasts(self) -> bool:
        """True if they take the place of broadcasts."""
        return "broadcast_implementation" in self.overridden

    def name_for(self, *, is_batch: bool) -> str:
        """The name of the method that reduces, for errors."""
        is_whole = not self._is_one_by_one(is_batch) and "batch_reduce_implementation" in self.overridden
        return "batch_reduce_implementation" if is_whole else "reduce_implementation"

    def reducing(
        self, op: ReduceOp, options: CommunicationOptions, *, is_batch: bool
    ) -> Callable[[list[tuple[PerReplica, Any]]], Any]:
        """Returns what reduces pairs of one leaf and its destinations."""
        if self._is_one_by_one(is_batch):
            return lambda pairs: [self.reduce(op, value, target, options) for value, target in pairs]
        return lambda pairs: self.batch_reduce(op, pairs, options)

    def _is_one_by_one(self, is_batch: bool) -> bool:
        return not is_batch and not self.overridden.isdisjoint(("reduce_implementation", "plan_sum"))


HOOKS = ("plan_sum", "reduce_implementation", "batch_reduce_implementation", "broadcast_implementation")
"""The methods whose overriding counts."""


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
            for leaf, checked in zip(leaves, batch.leaves[number], strict=True):
                check_result(leaf, devices, name)
                if isinstance(checked, Dense):
                    dtype = checked.spec.result_dtype(batch.op)
                    _check_arrays(components_of(leaf), devices, checked, dtype, name)
            columns = list(map(components_of, leaves))
            answer = leaves[0] if value.structure is None else wrapped(columns, value.structure, devices)
            answers[number] = answer if out is None else copied_into(answer, devices, out)
    return answers


def _checked_results(results: Any, expected: int, name: str) -> list[Any]:
    if not isinstance(results, (list, tuple)):
        found = "None" if results is None else kind_text(results)
        raise MismatchError(
            f"{name} returned {found} for {counted(expected, 'value')}; expected a list with one result "
            "for each"
        )
    if len(results) != expected:
        raise MismatchError(
            f"{name} returned {counted(len(results), 'result')} for {counted(expected, 'value')}; expected "
            "one for each"
        )
    return list(results)


def _check_arrays(
    components: Sequence[Any], destinations: Sequence[Device], leaf: Dense, dtype: str, name: str
) -> None:
    """Refuses components that are not arrays of the leaf's library and shape, and of this dtype."""
    expected = (leaf.backend.name, dtype, leaf.spec.shape)
    for component, device in zip(components, destinations, strict=True):
        found = _described(component)
        if found != expected:
            raise MismatchError(
                f"{name} returned for {device} {_spelled(component, found)}{at(leaf.path)}; expected "
                f"{_spelled(component, expected)}"
            )


def _described(component: Any) -> tuple[str, str, tuple[int, ...]] | None:
    """Returns library, dtype and shape of an array; None for what is none."""
    backend = backend_of_type(type(component))
    if backend is None or not hasattr(component, "dtype"):
        return None
    return backend.name, backend.dtype_of(component), backend.shape_of(component)


def _spelled(component: Any, found: tuple[str, str, tuple[int, ...]] | None) -> str:
    if found is None:
        return kind_text(component)
    library, dtype, shape = found
    return f"an array of {library}, {dtype} {shape}"


def check_result(result: Any, destinations: Sequence[Device], name: str) -> None:
    """Refuses a hook's result that is nothing, or has not one component for each destination."""
    if result is None:
        raise MismatchError(
            f"{name} returned None for a value; expected the result on {', '.join(map(str, destinations))}"
        )
    number = len(components_of(result))
    if number != len(destinations):
        raise MismatchError(
            f"{name} returned a result with {counted(number, 'component')} for "
            f"{counted(len(destinations), 'destination')} ({', '.join(map(str, destinations))}); expected "
            "one for each"
        )
