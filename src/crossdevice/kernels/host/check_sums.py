"""Check sums of integers that wrap: linear, so those of several arrays add up to those of their sum.

Bytes are rows of 64, and 128 rows a block of 8 KiB. The rows of all blocks are added up, those of each block
turned by a number of rows of its own; then the 8 KiB of columns are multiplied by keys of their places.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.kernels.host.fingerprint_pass import Bytes, RowSums
from crossdevice.kernels.position_keys import COLUMN_ROWS, GOLDEN, ROW_BYTES, TURN_SHIFT, splitmix64

if TYPE_CHECKING:
    from crossdevice.kernels.host.llvm.fingerprinting import RowKernel

Flat = NDArray[Any]

NUM_KEYS = 16
"""Check sums of an array."""


def zero_columns(item_bytes: int) -> Flat:
    """Returns the columns of no rows at all, for elements of so many bytes."""
    return np.zeros(COLUMN_ROWS * ROW_BYTES // item_bytes, f"u{item_bytes}")


def check_sums(columns: Flat) -> Flat:
    """Multiplies columns by keys of their places, and adds them up.

    >>> columns = zero_columns(2)
    >>> columns[5] = 1 << 15
    >>> int(check_sums(columns)[0])
    32768
    """
    keys = _keys(columns.size, columns.dtype.str)
    sums: Flat = np.add.reduce(columns[:, None] * keys, axis=0, dtype=columns.dtype)
    return sums


@functools.cache
def row_columns(item_bytes: int) -> RowSums:
    """Returns what adds rows to columns of elements of so many bytes."""

    @functools.cache
    def load() -> RowKernel:
        from crossdevice.kernels.host.llvm.fingerprinting import compiled_columns

        return compiled_columns(item_bytes)

    return RowSums(_add_rows, load)


def _add_rows(rows: Bytes, first: int, columns: Flat) -> None:
    """Adds whole rows to columns: the reference for the kernels."""
    numbers = first + np.arange(rows.size // ROW_BYTES, dtype=np.uint64)
    turns = (numbers // np.uint64(COLUMN_ROWS) * np.uint64(GOLDEN)) >> np.uint64(TURN_SHIFT)
    places = (numbers + turns) % np.uint64(COLUMN_ROWS)
    words, wholes = rows.view(columns.dtype).reshape(numbers.size, -1), columns.reshape(COLUMN_ROWS, -1)
    for place in range(COLUMN_ROWS):
        wholes[place] += np.add.reduce(words[places == place], axis=0, dtype=columns.dtype)


@functools.cache
def _keys(num_columns: int, dtype: str) -> Flat:
    """Keys of columns, those of the first sum odd: then an error in one element always shows."""
    numbers = np.arange(num_columns * NUM_KEYS, dtype=np.uint64)
    keys = splitmix64(numbers).astype(dtype).reshape(num_columns, NUM_KEYS)
    keys[:, 0] |= 1
    return keys
