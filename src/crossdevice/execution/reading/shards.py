"""Axes of arrays: cut into one part for each replica, or first, so that parts are ranges of elements."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from crossdevice.backends.protocol import Array, Backend
from crossdevice.errors import ConversionError, OptionError
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
