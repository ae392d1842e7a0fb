"""Compiled looks at many ndarrays: whether they are as they were, and whether they are alike.

As short as these are, letting other threads run meanwhile would take longer than they do.
"""

from __future__ import annotations

import functools

from crossdevice.kernels.host.llvm.numba_pass import Kernel, entry_of
from crossdevice.kernels.host.llvm.words import OBJECT_HEADER_BYTES, word_at

# The C struct of an ndarray, in words: the type of any object, then the address, dimensions (a C int), shape,
# strides, base, dtype and flags (a C int).
TYPE, ADDRESS, NUM_DIMENSIONS, SHAPE, STRIDES, DTYPE, FLAGS = -1, 0, 1, 2, 3, 5, 6

INT_MASK = 0xFFFFFFFF

WRITEABLE_FLAG = 0x400
"""NPY_ARRAY_WRITEABLE."""


@functools.cache
def compiled_watch() -> Kernel:
    """Called with (pointers to ndarrays, how many, known words): the first that differs, or -1.

    The words of an array are its address, the flag it needs if any, its number of dimensions and its shape.
    """

    def first_changed(arrays: int, number: int, known: int) -> int:
        word = 0
        for index in range(number):
            fields = word_at(arrays, index) + OBJECT_HEADER_BYTES
            if word_at(fields, ADDRESS) != word_at(known, word):
                return index
            needed = word_at(known, word + 1)
            if word_at(fields, FLAGS) & needed != needed:
                return index
            num_dimensions = word_at(fields, NUM_DIMENSIONS) & INT_MASK
            if num_dimensions != word_at(known, word + 2):
                return index
            shape = word_at(fields, SHAPE)
            for dimension in range(num_dimensions):
                if word_at(shape, dimension) != word_at(known, word + 3 + dimension):
                    return index
            word += 3 + num_dimensions
        return -1

    return entry_of(first_changed, "watch", "int64(int64,int64,int64)", nogil=False)


@functools.cache
def compiled_are_alike() -> Kernel:
    """Called with (pointers to objects of which the first is an ndarray, how many): whether all are alike.

    Those have the type, dtype object, shape and strides of the first.
    """

    def are_alike(arrays: int, number: int) -> bool:
        first = word_at(arrays, 0) + OBJECT_HEADER_BYTES
        num_dimensions = word_at(first, NUM_DIMENSIONS) & INT_MASK
        for index in range(1, number):
            fields = word_at(arrays, index) + OBJECT_HEADER_BYTES
            if (
                word_at(fields, TYPE) != word_at(first, TYPE)
                or word_at(fields, DTYPE) != word_at(first, DTYPE)
                or word_at(fields, NUM_DIMENSIONS) & INT_MASK != num_dimensions
            ):
                return False
            for dimension in range(num_dimensions):
                if word_at(word_at(fields, SHAPE), dimension) != word_at(word_at(first, SHAPE), dimension):
                    return False
                if word_at(word_at(fields, STRIDES), dimension) != word_at(
                    word_at(first, STRIDES), dimension
                ):
                    return False
        return True

    return entry_of(are_alike, "alike", "boolean(int64,int64)", nogil=False)
