"""Checks of arrays that are put end to end along an axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from crossdevice.backends.protocol import Array, Backend
from crossdevice.errors import DtypeMismatchError, ShapeMismatchError
from crossdevice.execution.reading.shards import checked_axis
from crossdevice.execution.reading.values import Leaf, Value, check_agreement, one_backend
from crossdevice.values.device import Device

Placed: TypeAlias = tuple[Value, tuple[Device, ...], Any]
"""A value to be gathered, its destinations, and the `out` of the result."""


class Gathering(NamedTuple):
    """A checked leaf, ready to be gathered."""

    arrays: tuple[Array, ...]
    backend: Backend
    axis: int

    @property
    def dtype(self) -> str:
        """The dtype of all arrays."""
        return self.backend.dtype_of(self.arrays[0])

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of all arrays."""
        return tuple(map(self.backend.shape_of, self.arrays))

    def shape_with(self, length: Any) -> tuple[Any, ...]:
        """The shape of an array with this length along the axis."""
        shape = self.backend.shape_of(self.arrays[0])
        return (*shape[: self.axis], length, *shape[self.axis + 1 :])


def check_gather(
    leaf: Leaf, devices: Sequence[Device], destinations: Sequence[Device], axis: int, call: str = "gather"
) -> Gathering:
    """Refuses scalars, axes out of range and arrays that differ in more than the axis."""
    if leaf.is_sparse:
        raise NotImplementedError(
            f"{call} of IndexedSlices{leaf.at_path} is not defined; reduce them instead"
        )
    arrays, path = leaf.arrays, leaf.path
    backend = one_backend(arrays, devices, path, destinations)
    shapes = [backend.shape_of(array) for array in arrays]
    ranks = [len(shape) for shape in shapes]
    check_agreement(ranks, devices, "number of dimensions", ShapeMismatchError, path)
    axis = checked_axis(axis, ranks[0], call, leaf.at_path)
    check_agreement([backend.dtype_of(array) for array in arrays], devices, "dtype", DtypeMismatchError, path)
    rests = [shape[:axis] + shape[axis + 1 :] for shape in shapes]
    check_agreement(rests, devices, f"shape outside of axis {axis}", ShapeMismatchError, path)
    return Gathering(arrays, backend, axis)
