"""Gathers and all-to-alls: arrays, or a part for each replica, that are put end to end along an axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from crossdevice.backends.protocol import Array, Backend
from crossdevice.errors import DtypeMismatchError, OptionError, ShapeMismatchError
from crossdevice.execution.reading.shards import check_sum, checked_axis, read_sizes
from crossdevice.execution.reading.values import Leaf, Value, check_agreement, one_backend
from crossdevice.values.device import Device
from crossdevice.values.quantities import counted

Placed: TypeAlias = tuple[Value, tuple[Device, ...], Any]
"""A value to be gathered, its destinations, and the `out` of the result."""

Sizes: TypeAlias = tuple[tuple[int, ...] | None, ...]
"""The lengths of each replica's parts, for the replicas of this process; None for parts of equal length."""


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


class AllToAll(NamedTuple):
    """A checked value whose parts go from each replica to all replicas, into `out` unless that is None."""

    value: Value
    gatherings: list[Gathering]
    sizes: Sizes
    out: Any


def read_all_to_all(read: Value, axis: int, sizes: Any, out: Any) -> AllToAll:
    """Checks the arguments of an all-to-all."""
    of_replicas = read_sizes_of_all(sizes, len(read.devices))
    gatherings = [check_gather(leaf, read.devices, read.devices, axis, "all_to_all") for leaf in read.leaves]
    for leaf, (arrays, backend, own_axis) in zip(read.leaves, gatherings, strict=True):
        for replica, (array, given) in enumerate(zip(arrays, of_replicas, strict=True)):
            check_sum(given, backend.shape_of(array)[own_axis], f" in replica {replica}{leaf.at_path}")
    return AllToAll(read, gatherings, of_replicas, out)


def read_sizes_of_all(sizes: Any, num_replicas: int) -> Sizes:
    """One list of lengths for all replicas, or one for each."""
    if not hasattr(sizes, "__len__") or not any(hasattr(each, "__len__") for each in sizes):
        return (read_sizes(sizes),) * num_replicas
    if len(sizes) != num_replicas:
        raise OptionError(
            f"sizes has {counted(len(sizes), 'list')}; expected {num_replicas}, one for each replica"
        )
    return tuple(map(read_sizes, sizes))
