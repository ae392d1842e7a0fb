"""Arrays as rows along one axis: in this order the parts of an array are ranges of its elements."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import Array, Backend
from crossdevice.values.device import Device


def rows_of(array: Array, axis: int, backend: Backend) -> NDArray[Any]:
    """An array on the host, contiguous, with its axis first."""
    shaped = backend.to_host(array).reshape(backend.shape_of(array))
    return np.ascontiguousarray(np.moveaxis(shaped, axis, 0))


def rows_on_gpu(array: Array, axis: int, backend: Backend) -> Array:
    """The same of PyTorch's arrays, where they are."""
    moved = array.movedim(axis, 0)
    return backend.reshape(backend.flat(moved), tuple(moved.shape))


def array_of_rows(
    rows: NDArray[Any], shape: tuple[int, ...], axis: int, backend: Backend, device: Device
) -> Array:
    """New rows of this shape, as an array whose axis is in its place again; it may adopt their memory."""
    array = np.ascontiguousarray(np.moveaxis(rows.reshape(shape), 0, axis))
    return backend.from_host(array.reshape(-1), array.shape, device)
