"""Arrays as rows along one axis: in this order the parts of an array are ranges of its elements."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from crossdevice.backends.protocol import Array, Backend
from crossdevice.values.device import Device, device_of

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
