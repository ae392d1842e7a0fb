"""Compiled looks at many ndarrays: whether they are as they were, fit a signature, and lie apart.

As short as these are, letting other threads run meanwhile would take longer than they do.
"""

from __future__ import annotations

import functools

from crossdevice.kernels.host.llvm.numba_pass import Kernel, entry_of
from crossdevice.kernels.host.llvm.words import data_of, set_word, word_at
from crossdevice.kernels.host.work_list import OBJECT_HEADER_BYTES, WORD_BYTES

# The C struct of an ndarray, in words: the type of any object, then the address, dimensions (a C int), shape,
# strides, base, dtype and flags (a C int).
TYPE, ADDRESS, NUM_DIMENSIONS, SHAPE, STRIDES, DTYPE, FLAGS = -1, 0, 1, 2, 3, 5, 6

INT_MASK = 0xFFFFFFFF

CONTIGUOUS_FLAG, WRITEABLE_FLAG = 0x1, 0x400
"""NPY_ARRAY_C_CONTIGUOUS and NPY_ARRAY_WRITEABLE."""


@functools.cache
def compiled_watch() -> Kernel:
    """Compiles the function that returns the first changed array, or -1.

    Its arguments: pointers to ndarrays, their number, known words.

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
def compiled_fit() -> Kernel:
    """Compiles the function that returns True if all objects match their words.

    Its arguments: pointers to objects, their number, known words.

    The words of an object are its type, and of an ndarray its dtype object, the flags it needs, whether its
    strides count, its number of dimensions, its shape and its strides. Without a dtype the type says all.
    """

    def fit(arrays: int, number: int, known: int) -> bool:
        for index in range(number):
            fields = word_at(arrays, index) + OBJECT_HEADER_BYTES
            if word_at(fields, TYPE) != word_at(known, 0):
                return False
            dtype, needed, has_strides = word_at(known, 1), word_at(known, 2), word_at(known, 3)
            num_dimensions = word_at(known, 4)
            if dtype:
                if (
                    word_at(fields, DTYPE) != dtype
                    or word_at(fields, FLAGS) & needed != needed
                    or word_at(fields, NUM_DIMENSIONS) & INT_MASK != num_dimensions
                ):
                    return False
                shape, strides = word_at(fields, SHAPE), word_at(fields, STRIDES)
                for dimension in range(num_dimensions):
                    if word_at(shape, dimension) != word_at(known, 5 + dimension):
                        return False
                    if has_strides and word_at(strides, dimension) != word_at(
                        known, 5 + num_dimensions + dimension
                    ):
                        return False
            known += (5 + 2 * num_dimensions) * WORD_BYTES
        return True

    return entry_of(fit, "fit", "boolean(int64,int64,int64)", nogil=False)


@functools.cache
def compiled_are_apart() -> Kernel:
    """Compiles the function that returns True if no arrays overlap.

    Its arguments: a table, its number of rows, scratch memory, pointers to inputs, pointers to outputs.

    A row of the table has the number of a leaf's inputs, the bytes of each, the number of its outputs and the
    bytes of each. No output may overlap another, or an input, but for an input of the same leaf that it is
    exactly. Scratch memory has room for two words for each array.
    """

    def are_apart(table: int, leaves: int, ranges: int, inputs: int, outputs: int) -> bool:
        count = 0
        for leaf in range(leaves):
            row = table + 4 * leaf * WORD_BYTES
            num_inputs, input_bytes = word_at(row, 0), word_at(row, 1)
            num_outputs, output_bytes = word_at(row, 2), word_at(row, 3)
            for index in range(num_outputs):
                start = data_of(outputs, index)
                set_word(ranges, 2 * count, start)
                set_word(ranges, 2 * count + 1, 2 * (start + output_bytes) + 1)
                count += output_bytes != 0
            for index in range(num_inputs):
                start, is_in_place = data_of(inputs, index), False
                for other in range(num_outputs):
                    if data_of(outputs, other) == start and input_bytes == output_bytes:
                        is_in_place = True
                        break
                if not is_in_place:
                    set_word(ranges, 2 * count, start)
                    set_word(ranges, 2 * count + 1, 2 * (start + input_bytes))
                    count += input_bytes != 0
            inputs += num_inputs * WORD_BYTES
            outputs += num_outputs * WORD_BYTES
        # Shell's sort by the start: neighbours in memory mostly come one after the other already.
        gap = count
        while gap > 1:
            gap = max(1, gap * 4 // 9)
            for position in range(gap, count):
                start, end = word_at(ranges, 2 * position), word_at(ranges, 2 * position + 1)
                place = position
                while place >= gap and word_at(ranges, 2 * (place - gap)) > start:
                    set_word(ranges, 2 * place, word_at(ranges, 2 * (place - gap)))
                    set_word(ranges, 2 * place + 1, word_at(ranges, 2 * (place - gap) + 1))
                    place -= gap
                set_word(ranges, 2 * place, start)
                set_word(ranges, 2 * place + 1, end)
        any_end = written_end = 0
        for position in range(count):
            start, end = word_at(ranges, 2 * position), word_at(ranges, 2 * position + 1)
            is_written, end = end & 1, end >> 1
            if start < written_end or (is_written and start < any_end):
                return False
            any_end = max(any_end, end)
            if is_written:
                written_end = max(written_end, end)
        return True

    return entry_of(are_apart, "apart", "boolean(int64,int64,int64,int64,int64)", nogil=False)
