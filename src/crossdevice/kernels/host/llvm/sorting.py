"""Columns of integers put in order by a network of comparisons, compiled by numba."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.kernels.host.llvm.numba_pass import compiled

TILE_ELEMENTS = 512
"""Elements over which the whole network is run: with some dozens of inputs they stay in cache."""


@functools.cache
def compiled_sort(dtype: str) -> Callable[..., None]:
    """Returns the sort for keys of one integer dtype, compiled or loaded from disk."""

    def sort(
        keys: NDArray[Any],
        num_elements: int,
        network: NDArray[np.int64],
        start: int,
        stop: int,
        infinity: int,
        nan: int,
    ) -> None:
        """Puts the sorted values `start` to `stop` of each of the first columns into these rows.

        `network` has pairs of rows to compare. `infinity` has its bits, 0 for integers.
        """
        signs, largest = 8 * keys.itemsize - 1, (1 << (8 * keys.itemsize - 1)) - 1
        # Rows as slices that are counted from 0: so LLVM makes vectors of these loops.
        for tile in range(0, num_elements, TILE_ELEMENTS):
            end = min(tile + TILE_ELEMENTS, num_elements)
            if infinity:
                for number in range(keys.shape[0]):
                    row = keys[number, tile:end]
                    for element in range(end - tile):
                        bits = row[element]
                        turned = bits ^ ((bits >> signs) & largest)
                        row[element] = largest if bits & largest > infinity else turned
            for pair in range(network.shape[0]):
                low, high = keys[network[pair, 0], tile:end], keys[network[pair, 1], tile:end]
                for element in range(end - tile):
                    left, right = low[element], high[element]
                    low[element] = left if left < right else right
                    high[element] = right if left < right else left
            if infinity:
                last = keys[keys.shape[0] - 1, tile:end]
                for number in range(start, stop):
                    row = keys[number, tile:end]
                    # The last row is the last to be turned back, if it is one of these.
                    for element in range(end - tile):
                        bits = row[element]
                        turned = bits ^ ((bits >> signs) & largest)
                        row[element] = nan if last[element] == largest else turned

    signature = f"void({dtype}[:,::1],int64,int64[:,::1],int64,int64,int64,int64)"
    return compiled(sort, f"sort {dtype}", signature)


@functools.cache
def network_of(num_inputs: int) -> NDArray[np.int64]:
    """Lists Batcher's merge exchange for this many inputs: pairs of rows to compare.

    >>> network_of(3).tolist()
    [[0, 2], [0, 1], [1, 2]]
    """
    return np.array(list(_merge_exchange(num_inputs)), np.int64).reshape(-1, 2)


def _merge_exchange(count: int) -> Iterator[tuple[int, int]]:
    """Yields the pairs of Knuth, The Art of Computer Programming, volume 3, algorithm 5.2.2M."""
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
