"""Calls on arrays that their library records, so that it can differentiate them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from crossdevice.backends.protocol import Array, Autograd, LinearMap
from crossdevice.backends.registry import backend_of_type
from crossdevice.errors import OutError
from crossdevice.execution.linear_maps import Placement, Shapes
from crossdevice.execution.reading.outputs import wrapped
from crossdevice.execution.reading.values import Leaf, Value
from crossdevice.values.device import Device
from crossdevice.values.distributed import DistributedValues, Mirrored, components_of
from crossdevice.values.nesting import flatten


@dataclasses.dataclass(frozen=True)
class RecordedLeaves:
    """The leaves of some values that their library records; results of others are returned as they are."""

    autograd: Autograd
    placed: Sequence[tuple[Value, tuple[Device, ...]]]
    picked: Sequence[tuple[int, int]]
    """For each recorded leaf, the number of its value and the number of the leaf in it."""

    @property
    def places(self) -> tuple[Placement, ...]:
        """Sources and destinations of each leaf."""
        return tuple(Placement(self.placed[i][0].devices, self.placed[i][1]) for i, _ in self.picked)

    @property
    def shapes(self) -> list[Shapes]:
        """The shapes of the arrays of each leaf."""
        return list(map(_shapes_of, self._columns))

    @property
    def _columns(self) -> list[tuple[Array, ...]]:
        return [self.leaf(i, k).arrays for i, k in self.picked]

    def called(
        self,
        run: Callable[[], Sequence[Any]],
        linear: LinearMap,
        kind: type[DistributedValues] = Mirrored,
        shapes: list[Any] | None = None,
    ) -> list[Any]:
        """Calls `run` for all values and records it as a linear map of the leaves.

        The shapes of the results are appended to `shapes`.
        """
        columns: list[list[tuple[Array, ...]]] = []

        def run_flat() -> list[Array]:
            columns.extend(
                _of_leaves(result, value) for result, (value, _) in zip(run(), self.placed, strict=True)
            )
            if shapes is not None:
                shapes.extend(_shapes_of(columns[i][k]) for i, k in self.picked)
            return [array for i, k in self.picked for array in columns[i][k]]

        arrays = [array for column in self._columns for array in column]
        results = iter(self.autograd.linear_call(run_flat, linear, arrays))
        for i, k in self.picked:
            columns[i][k] = tuple(islice(results, len(columns[i][k])))
        return [
            wrapped(own, value.structure, devices, kind)
            for own, (value, devices) in zip(columns, self.placed, strict=True)
        ]

    def leaf(self, i: int, k: int) -> Leaf:
        """Leaf k of value i."""
        return self.placed[i][0].leaves[k]


def recorded_leaves(
    placed: Sequence[tuple[Value, tuple[Device, ...]]], outs: Sequence[Any]
) -> RecordedLeaves | None:
    """The leaves of values with a recorded array; None if there are none.

    If there are any, `out` is refused: what was recorded of its arrays would no longer be true.
    """
    picked: list[tuple[int, int]] = []
    found = None
    for i, (value, _) in enumerate(placed):
        for k, leaf in enumerate(value.leaves):
            autograd = _autograd_of(leaf.arrays)
            if autograd is not None:
                picked.append((i, k))
                found = autograd
    if found is None:
        return None
    recorded = RecordedLeaves(found, placed, picked)
    if any(out is not None for out in outs):
        raise OutError(
            f"out was given for a value{recorded.leaf(*picked[0]).at_path} that requires a gradient; "
            "results that are differentiated are new arrays: leave out= away, or turn recording off "
            "(torch.no_grad(), detach())"
        )
    return recorded


def _autograd_of(arrays: Sequence[Any]) -> Autograd | None:
    """The autograd of their library, if it records any of them."""
    backend = backend_of_type(type(arrays[0]))
    autograd = None if backend is None else backend.autograd
    return autograd if autograd is not None and any(map(autograd.is_recorded, arrays)) else None


def _of_leaves(result: Any, value: Value) -> list[tuple[Array, ...]]:
    """For each leaf, its results on all destinations."""
    components = components_of(result)
    if value.structure is None:
        return [tuple(components)]
    return list(zip(*(flatten(component)[0] for component in components), strict=True))


def _shapes_of(arrays: Sequence[Array]) -> Shapes:
    return tuple(tuple(array.shape) for array in arrays)
