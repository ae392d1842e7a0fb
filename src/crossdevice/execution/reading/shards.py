"""Calls along an axis: arrays cut into one part for each replica, put end to end, or seen as rows."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from crossdevice.backends.protocol import Array, Backend
from crossdevice.errors import ConversionError, DtypeMismatchError, OptionError, ShapeMismatchError
from crossdevice.execution.reading.values import Leaf, Value, check_agreement, one_backend
from crossdevice.values.device import Device, device_of
from crossdevice.values.quantities import counted


def checked_axis(axis: int, num_dimensions: int, call: str, at_path: str) -> int:
    """The axis counted from the front; scalars have none."""
    try:
        axis = operator.index(axis)
    except TypeError:
        raise TypeError(f"axis must be an integer; got {axis!r}") from None
    if num_dimensions == 0:
        raise ConversionError(f"{call} needs at least one dimension{at_path}; replica 0 holds a scalar")
    if not -num_dimensions <= axis < num_dimensions:
        raise ConversionError(
            f"axis {axis} is out of range for {counted(num_dimensions, 'dimension')}{at_path}"
        )
    return axis % num_dimensions


def read_sizes(sizes: Any) -> tuple[int, ...] | None:
    """The lengths of parts as a tuple; None for parts of equal length."""
    if sizes is None:
        return None
    try:
        read = tuple(map(operator.index, sizes))
    except TypeError:
        read = (-1,)
    if min(read, default=0) < 0:
        raise OptionError(f"sizes must be lengths, 0 or more, one for each replica; got {sizes!r}")
    return read


def part_lengths(
    length: int, num_parts: int, sizes: Sequence[int] | None = None, where: str = ""
) -> list[int]:
    """The lengths that were given; else as equal as possible, the longer ones first, as numpy.array_split's.

    >>> part_lengths(7, 3)
    [3, 2, 2]
    """
    if sizes is None:
        size, longer = divmod(length, num_parts)
        return [size + (part < longer) for part in range(num_parts)]
    if len(sizes) != num_parts:
        raise OptionError(
            f"sizes has {counted(len(sizes), 'length')}; expected {num_parts}, one for each replica"
        )
    check_sum(sizes, length, where)
    return list(sizes)


def check_sum(sizes: Sequence[int] | None, length: int, where: str) -> None:
    """Refuses lengths of parts that do not add up to the length of the axis."""
    if sizes is not None and sum(sizes) != length:
        raise OptionError(f"sizes {list(sizes)} add up to {sum(sizes)}{where}; the axis has length {length}")


def cuts_of(axis: int, lengths: Sequence[int]) -> list[tuple[Any, ...]]:
    """Indices of consecutive parts of an array along an axis."""
    before = (slice(None),) * axis
    edges = itertools.pairwise(itertools.accumulate(lengths, initial=0))
    return [(*before, slice(start, stop), ...) for start, stop in edges]


Rows: TypeAlias = Any
"""An array with the axis first, contiguous: of NumPy or, on a GPU that others may reach, of PyTorch."""


def rows_of(array: Array, axis: int, backend: Backend, gpu: Device | None = None) -> Rows:
    """An array on the host, or on this GPU as it is, with its axis first."""
    if gpu is not None:
        moved = array.movedim(axis, 0)
        return backend.reshape(backend.flat(moved), tuple(moved.shape))
    shaped = backend.to_host(array).reshape(backend.shape_of(array))
    return np.ascontiguousarray(np.moveaxis(shaped, axis, 0) if axis else shaped)


def joined_rows(arrays: tuple[Array, ...], axis: int, backend: Backend, gpu: Device | None) -> Rows:
    """Arrays end to end along the axis."""
    if gpu is None:
        rows = [rows_of(array, axis, backend) for array in arrays]
        return rows[0] if len(rows) == 1 else np.concatenate(rows)
    whole = arrays[0] if len(arrays) == 1 else backend.concat(arrays, axis, gpu)
    return rows_of(whole, axis, backend, gpu)


def array_of_rows(rows: Rows, shape: tuple[int, ...], axis: int, backend: Backend, device: Device) -> Array:
    """New rows of this shape as an array on a device, its axis in its place again; it may adopt memory."""
    if isinstance(rows, np.ndarray):
        array = rows.reshape(shape)
        if axis:
            array = np.ascontiguousarray(np.moveaxis(array, 0, axis))
        return backend.from_host(array.reshape(-1), array.shape, device)
    there = rows.movedim(0, axis).contiguous() if axis else rows
    return there if device_of(there) == device else backend.copy(there, device)


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
