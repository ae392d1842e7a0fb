"""The sums of a fingerprint, compiled: two multiplications of 32 bits for each half of a 64-bit word."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from crossdevice.kernels.host.llvm.lanes import INT64, Builder, Value
from crossdevice.kernels.host.llvm.numba_pass import Kernel, entry_of
from crossdevice.kernels.host.llvm.words import emitted, set_word, word_at
from crossdevice.kernels.position_keys import (
    BLOCK_ROWS,
    FACTORS,
    GOLDEN,
    NUM_SUMS,
    ROW_BYTES,
    ROW_WORDS,
    SHIFTS,
    word_keys,
)

LANES = 8
"""64-bit words in a row."""

ROW = ir.VectorType(INT64, LANES)
LOW_HALVES = ir.Constant(ROW, [0xFFFFFFFF] * LANES)
HALF_BITS = ir.Constant(ROW, [32] * LANES)

KEY_BYTES = 2 * ROW_BYTES
"""Keys of a row: one vector for the low halves, one for the high ones."""


@functools.cache
def spread_keys() -> NDArray[Any]:
    """Returns `word_keys` for `compiled_sums`: widened, even words of a row first, on a cache line."""
    rows = word_keys().reshape(-1, LANES, 2).swapaxes(1, 2)
    memory = np.empty(rows.size + LANES, np.uint64)
    start = -memory.ctypes.data % ROW_BYTES // memory.itemsize
    keys = memory[start : start + rows.size]
    keys[:] = rows.reshape(-1)
    return keys


@functools.cache
def compiled_sums() -> Kernel:
    """Compiles the function that adds the sums of some rows.

    Its arguments: address, first row, number of rows, address of `spread_keys`, address of sums.
    """
    golden, (first_factor, second_factor) = np.uint64(GOLDEN), map(np.uint64, FACTORS)
    first_shift, second_shift, third_shift = map(np.uint64, SHIFTS)

    def add_sums(address: int, first_row: int, num_rows: int, keys: int, sums: int) -> None:
        row, stop = first_row, first_row + num_rows
        while row < stop:
            block, place = row // BLOCK_ROWS, row % BLOCK_ROWS
            count = min(BLOCK_ROWS - place, stop - row)
            halves = block_halves(address, keys + place * KEY_BYTES, count)
            for index in range(NUM_SUMS):
                key = np.uint64(block * NUM_SUMS + index + 1) * golden
                key = (key ^ (key >> first_shift)) * first_factor
                key = (key ^ (key >> second_shift)) * second_factor
                key = (key ^ (key >> third_shift)) | np.uint64(1)
                product = np.uint64(halves[index // 2]) * key
                set_word(sums, index, np.int64(np.uint64(word_at(sums, index)) + product))
            address += count * ROW_BYTES
            row += count

    return entry_of(add_sums, "fingerprint", "void(int64,int64,int64,int64,int64)")


@emitted(types.UniTuple(types.int64, 2))
def block_halves(build: Builder, address: Value, keys: Value, num_rows: Value) -> Value:
    """Returns the two sums of some rows of one block, kept in registers from the first row to the last."""
    places = [cgutils.alloca_once_value(build, ir.Constant(ROW, [0] * LANES)) for _ in range(2)]
    with cgutils.for_range(build, num_rows) as loop:
        words = _loaded(build, address, loop.index, ROW_BYTES, 0)
        low, high = build.and_(words, LOW_HALVES), build.lshr(words, HALF_BITS)
        for number, place in enumerate(places):
            shift = number * ROW_WORDS * 8
            for half, offset in ((low, 0), (high, ROW_BYTES)):
                key = build.and_(_loaded(build, keys, loop.index, KEY_BYTES, shift + offset), LOW_HALVES)
                build.store(build.add(build.load(place), build.mul(half, key)), place)
    sums = [_added(build, build.load(place)) for place in places]
    return cgutils.pack_array(build, sums)


def _loaded(build: Builder, start: Value, index: Value, stride: int, offset: int) -> Value:
    place = build.add(build.mul(index, ir.Constant(INT64, stride)), ir.Constant(INT64, offset))
    loaded = build.load(build.inttoptr(build.add(start, place), ROW.as_pointer()))
    loaded.align = 1
    return loaded


def _added(build: Builder, row: Value) -> Value:
    """Adds up all lanes."""
    kind = ir.FunctionType(INT64, [ROW])
    return build.call(
        cgutils.get_or_insert_function(build.module, kind, "llvm.vector.reduce.add.v8i64"), [row]
    )
