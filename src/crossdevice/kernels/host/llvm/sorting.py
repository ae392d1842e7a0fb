"""Columns of integers put in order by a network of comparisons, compiled by numba."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from crossdevice.kernels.host.llvm.numba_pass import keeps_kernels

TILE_ELEMENTS = 512
"""Elements over which the whole network is run: with some dozens of inputs they stay in cache."""


def _sort_columns(
    keys: NDArray[Any],
    num_elements: int,
    network: NDArray[np.int64],
    start: int,
    stop: int,
    infinity: int,
    nan: int,
) -> None:
    """Puts the ranks from `start` to `stop` of each of the first columns into these rows.

    `network` has pairs of rows to compare. `infinity` has its bits, 0 for integers.
    """
    count = keys.shape[0]
    signs, largest = 8 * keys.itemsize - 1, (1 << (8 * keys.itemsize - 1)) - 1
    has_nan = np.empty(TILE_ELEMENTS, np.bool_)
    for tile in range(0, num_elements, TILE_ELEMENTS):
        end = min(tile + TILE_ELEMENTS, num_elements)
        if infinity:
            has_nan[:] = False
            for row in range(count):
                for element in range(tile, end):
                    bits = keys[row, element]
                    has_nan[element - tile] |= bits & largest > infinity
                    keys[row, element] = bits ^ ((bits >> signs) & largest)
        for pair in range(network.shape[0]):
            low, high = network[pair, 0], network[pair, 1]
            for element in range(tile, end):
                left, right = keys[low, element], keys[high, element]
                keys[low, element] = min(left, right)
                keys[high, element] = max(left, right)
        if infinity:
            for row in range(start, stop):
                for element in range(tile, end):
                    bits = keys[row, element]
                    bits = bits ^ ((bits >> signs) & largest)
                    keys[row, element] = nan if has_nan[element - tile] else bits


@functools.cache
def compiled_sort(dtype: str) -> Callable[..., None]:
    """The sort for keys of one integer dtype, compiled or loaded from disk."""
    signature = f"void({dtype}[:,::1],int64,int64[:,::1],int64,int64,int64,int64)"
    return njit(signature, nogil=True, cache=keeps_kernels())(_sort_columns)


@functools.cache
def network_of(num_inputs: int) -> NDArray[np.int64]:
    """Batcher's merge exchange for so many inputs: pairs of rows to compare.

    >>> network_of(3).tolist()
    [[0, 2], [0, 1], [1, 2]]
    """
    return np.array(list(_merge_exchange(num_inputs)), np.int64).reshape(-1, 2)


def _merge_exchange(count: int) -> Iterator[tuple[int, int]]:
    """Knuth, The Art of Computer Programming, volume 3, algorithm 5.2.2M."""
    top = 1 << max((count - 1).bit_length() - 1, 0)
    step = top
    while step > 0:
        other, residue, distance = top, 0, step
        while True:
            for low in range(count - distance):
                if low & step == residue:
                    yield low, low + distance
            if other == step:
                break
            distance, other, residue = other - step, other >> 1, step
        step >>= 1
