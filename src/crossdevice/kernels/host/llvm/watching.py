"""A compiled look at many ndarrays: whether each still has the address and the shape it had."""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import njit

from crossdevice.kernels.host.llvm.code import OBJECT_HEADER_BYTES, word_at

NDIM_MASK = 0xFFFFFFFF
"""The number of dimensions is a C int, followed by padding, behind the address."""

WRITEABLE_FLAG = 0x400
"""NPY_ARRAY_WRITEABLE, in the C int behind the address, dimensions, shape, strides, base and dtype."""


@functools.cache
def compiled_watch() -> Callable[[int, int, int], int]:
    """Called with (pointers to ndarrays, how many, known words): the first that differs, or -1.

    The words of an array are its address, the flag it needs if any, its number of dimensions and its shape.
    """

    def first_changed(arrays: int, number: int, known: int) -> int:
        word = 0
        for index in range(number):
            fields = word_at(arrays, index) + OBJECT_HEADER_BYTES
            if word_at(fields, 0) != word_at(known, word):
                return index
            needed = word_at(known, word + 1)
            if word_at(fields, 6) & needed != needed:
                return index
            num_dimensions = word_at(fields, 1) & NDIM_MASK
            if num_dimensions != word_at(known, word + 2):
                return index
            shape = word_at(fields, 2)
            for dimension in range(num_dimensions):
                if word_at(shape, dimension) != word_at(known, word + 3 + dimension):
                    return index
            word += 3 + num_dimensions
        return -1

    return njit("int64(int64,int64,int64)", nogil=True)(first_changed)
