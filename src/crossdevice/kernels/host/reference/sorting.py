"""Columns sorted in NumPy: extremes, and the middle values for medians."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.kernels.host.reference.long_accumulator import FORMATS
from crossdevice.values.reduce_op import ReduceOp


def sorted_values(inputs: Sequence[NDArray[Any]], start: int, stop: int) -> list[NDArray[Any]]:
    """Returns the values at sorted positions `start` to `stop` of each column; NaN if it has a NaN.

    >>> sorted_values([np.array([3, 1]), np.array([2, 5]), np.array([9, 0])], 1, 2)
    [array([3, 1])]
    """
    return list(_of_keys(inputs, lambda keys: np.sort(keys, axis=0)[start:stop]))


def extreme(inputs: Sequence[NDArray[Any]], op: ReduceOp) -> NDArray[Any]:
    """Returns the minimum or maximum as in IEEE 754-2019: NaN wins, and -0 is less than +0."""
    pick = np.min if op is ReduceOp.MIN else np.max
    return _of_keys(inputs, lambda keys: pick(keys, axis=0))


def _of_keys(inputs: Sequence[NDArray[Any]], picked: Callable[[NDArray[Any]], NDArray[Any]]) -> NDArray[Any]:
    """Picks the middle values of integers that sort like the inputs, and converts them back."""
    dtype = inputs[0].dtype
    keys = np.stack([array.view(key_dtype(dtype)) for array in inputs])
    infinity = infinity_of(dtype)
    if infinity is None:
        return picked(keys)
    largest = keys.dtype.type(np.iinfo(keys.dtype).max)
    is_nan = (keys & largest > infinity).any(axis=0)
    # Negative numbers with all bits but the sign turned over sort like floats, -0 before +0.
    signs = keys.dtype.type(8 * dtype.itemsize - 1)
    keys ^= (keys >> signs) & largest
    elements = picked(keys)
    elements ^= (elements >> signs) & largest
    elements[..., is_nan] = quiet_nan(infinity)
    return elements.view(dtype)


def key_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the integer dtype that elements are sorted as."""
    return np.dtype(f"i{dtype.itemsize}") if dtype.name in FORMATS else dtype


def infinity_of(dtype: np.dtype[Any]) -> int | None:
    """Returns the bits of infinity, below those of NaN; None for integers."""
    if dtype.name not in FORMATS:
        return None
    if dtype.name == "float8_e4m3fn":  # which has none: of the largest number
        return 0x7E
    significand = 1 << (FORMATS[dtype.name].precision - 1)
    return (1 << (8 * dtype.itemsize - 1)) - significand


def quiet_nan(infinity: int) -> int:
    """Returns the bits of the positive quiet NaN."""
    return infinity | (infinity & -infinity) >> 1
