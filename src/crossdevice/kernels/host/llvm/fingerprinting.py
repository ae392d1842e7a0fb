"""Sums of rows of 64 bytes, compiled: those of fingerprints, and columns of integers.

A fingerprint takes two multiplications of 32 bits for each half of a 64-bit word.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from crossdevice.kernels.host.llvm.lanes import INT64, Builder, Value
from crossdevice.kernels.host.llvm.numba_pass import Kernel, compiled, entry_of
from crossdevice.kernels.host.llvm.standby import address_of
from crossdevice.kernels.host.llvm.words import emitted, set_word, word_at
from crossdevice.kernels.position_keys import (
    BLOCK_ROWS,
    COLUMN_ROWS,
    FACTORS,
    GOLDEN,
    NUM_SUMS,
    ROW_BYTES,
    SHIFTS,
    TURN_SHIFT,
    word_keys,
)

LANES = 8
"""64-bit words in a row."""

ROW = ir.VectorType(INT64, LANES)
LOW_HALVES = ir.Constant(ROW, [0xFFFFFFFF] * LANES)
HALF_BITS = ir.Constant(ROW, [32] * LANES)

UNROLLED_ROWS = 8

TURNED_COLUMNS, TURNED_BYTES = 64, 512
"""Columns of a matrix that are turned at a time, and bytes of each."""

TURNED_PITCH = TURNED_BYTES + ROW_BYTES
"""Bytes from one to the next: not a power of two, else all of them compete for one set of a cache."""

KEY_BYTES = 2 * ROW_BYTES
"""Keys of a row: one vector for the low halves, one for the high ones."""

ROW_ARGUMENTS = 6
"""Arguments of a kernel of rows, all of them words."""

ROW_SIGNATURE = f"void({','.join(['int64'] * ROW_ARGUMENTS)})"


class RowKernel(NamedTuple):
    """A compiled function that adds the sums of some rows, its address, and that of its keys.

    Its arguments: address, first row, number of rows, address of keys, address of sums; where rows are copied
    to as they are read (0: nowhere). Columns are not copied.
    """

    entry: Kernel
    address: int
    keys: int


def _spread_keys() -> NDArray[Any]:
    rows = word_keys().reshape(-1, LANES, 2).swapaxes(1, 2)
    memory = np.empty(rows.size + LANES, np.uint64)
    start = -memory.ctypes.data % ROW_BYTES // memory.itemsize
    keys = memory[start : start + rows.size]
    keys[:] = rows.reshape(-1)
    return keys


SPREAD_KEYS = _spread_keys()
"""`word_keys` for `compiled_sums`: widened, even words of a row first, on a cache line.

Kernels keep only its address. It is made once, at import: of two made by two threads, one would be freed.
"""


@functools.cache
def compiled_sums() -> RowKernel:
    """Compiles the function that adds the sums of some rows, and copies them; its keys are `SPREAD_KEYS`."""
    golden, (first_factor, second_factor) = np.uint64(GOLDEN), map(np.uint64, FACTORS)
    first_shift, second_shift, third_shift = map(np.uint64, SHIFTS)

    def add_sums(address: int, first_row: int, num_rows: int, keys: int, sums: int, target: int) -> None:
        row, stop = first_row, first_row + num_rows
        while row < stop:
            block, place = row // BLOCK_ROWS, row % BLOCK_ROWS
            count = min(BLOCK_ROWS - place, stop - row)
            own_keys = keys + place * KEY_BYTES
            if target:
                halves = copied_halves(address, own_keys, count, target)
                target += count * ROW_BYTES
            else:
                halves = block_halves(address, own_keys, count)
            for index in range(NUM_SUMS):
                key = np.uint64(block * NUM_SUMS + index + 1) * golden
                key = (key ^ (key >> first_shift)) * first_factor
                key = (key ^ (key >> second_shift)) * second_factor
                key = (key ^ (key >> third_shift)) | np.uint64(1)
                product = np.uint64(halves[index // 2]) * key
                set_word(sums, index, np.int64(np.uint64(word_at(sums, index)) + product))
            address += count * ROW_BYTES
            row += count

    return _row_kernel(add_sums, "fingerprint", SPREAD_KEYS.ctypes.data)


@functools.cache
def compiled_columns(item_bytes: int) -> RowKernel:
    """Compiles the function that adds some rows to columns of elements of so many bytes; it has no keys."""
    golden, shift, add_words = np.uint64(GOLDEN), np.uint64(TURN_SHIFT), _adding_words(item_bytes)

    def add_columns(
        address: int, first_row: int, num_rows: int, _keys: int, columns: int, _target: int
    ) -> None:
        row, stop = first_row, first_row + num_rows
        while row < stop:
            block, place = row // COLUMN_ROWS, row % COLUMN_ROWS
            turned = (place + int((np.uint64(block) * golden) >> shift)) % COLUMN_ROWS
            count = min(COLUMN_ROWS - max(place, turned), stop - row)
            add_words(address, columns + turned * ROW_BYTES, count)
            address += count * ROW_BYTES
            row += count

    return _row_kernel(add_columns, f"columns {item_bytes}", 0)


@functools.cache
def compiled_turn(item_bytes: int) -> Kernel:
    """Compiles the function that copies a matrix whose columns are contiguous to one whose rows are.

    Its arguments: address of the matrix, bytes from column to column, number of rows, number of columns,
    address of the copy, memory of `TURNED_COLUMNS * TURNED_PITCH` bytes. Columns are read in runs of whole
    lines, to places that do not push each other out of a cache.
    """
    gather = _gathering(item_bytes)

    def turn(matrix: int, stride: int, num_rows: int, num_columns: int, copy: int, lines: int) -> None:
        most_rows = TURNED_BYTES // item_bytes
        for top in range(0, num_rows, most_rows):
            rows = min(most_rows, num_rows - top)
            for left in range(0, num_columns, TURNED_COLUMNS):
                columns = min(TURNED_COLUMNS, num_columns - left)
                for column in range(columns):
                    start = matrix + (left + column) * stride + top * item_bytes
                    copy_bytes(lines + column * TURNED_PITCH, start, rows * item_bytes)
                for row in range(rows):
                    target = copy + ((top + row) * num_columns + left) * item_bytes
                    gather(target, lines + row * item_bytes, columns)

    name, arguments = f"turn {item_bytes}", ",".join(["int64"] * 6)
    return entry_of(turn, name, f"void({arguments})")


@functools.cache
def _gathering(item_bytes: int) -> Any:
    """Makes the intrinsic that gathers a row of elements from columns."""
    element = ir.IntType(8 * item_bytes).as_pointer()

    @emitted()
    def gather(build: Builder, target: Value, source: Value, count: Value) -> None:
        with cgutils.for_range(build, count) as loop:
            column = build.mul(loop.index, ir.Constant(INT64, TURNED_PITCH))
            place = build.mul(loop.index, ir.Constant(INT64, item_bytes))
            found = build.load(build.inttoptr(build.add(source, column), element))
            found.align = 1
            stored = build.store(found, build.inttoptr(build.add(target, place), element))
            stored.align = 1

    return gather


@emitted()
def copy_bytes(build: Builder, target: Value, source: Value, count: Value) -> None:
    """Copies bytes between places that do not overlap."""
    target, source = (build.inttoptr(each, ir.IntType(8).as_pointer()) for each in (target, source))
    cgutils.raw_memcpy(build, target, source, count, 1)


def _row_kernel(function: Kernel, name: str, keys: int) -> RowKernel:
    kernel: Any = compiled(function, name, ROW_SIGNATURE)
    return RowKernel(kernel.get_overload(ROW_SIGNATURE), address_of(kernel), keys)


@functools.cache
def _adding_words(item_bytes: int) -> Any:
    """Makes the intrinsic that adds some rows to columns, element by element."""
    row_type = ir.VectorType(ir.IntType(8 * item_bytes), ROW_BYTES // item_bytes)

    @emitted()
    def add_words(build: Builder, address: Value, columns: Value, num_rows: Value) -> None:
        with cgutils.for_range(build, num_rows) as loop:
            place = build.mul(loop.index, ir.Constant(INT64, ROW_BYTES))
            row, column = (
                build.inttoptr(build.add(start, place), row_type.as_pointer()) for start in (address, columns)
            )
            words, total = build.load(row), build.load(column)
            words.align = total.align = 1
            stored = build.store(build.add(total, words), column)
            stored.align = 1

    return add_words


@emitted(types.UniTuple(types.int64, 2))
def block_halves(build: Builder, address: Value, keys: Value, num_rows: Value) -> Value:
    """Returns the two sums of some rows of one block."""
    return _halves(build, address, keys, num_rows)


@emitted(types.UniTuple(types.int64, 2))
def copied_halves(build: Builder, address: Value, keys: Value, num_rows: Value, target: Value) -> Value:
    """Returns the same, of rows that are copied."""
    return _halves(build, address, keys, num_rows, target)


def _halves(
    build: Builder, address: Value, keys: Value, num_rows: Value, target: Value | None = None
) -> Value:
    """Emits the two sums, which are kept in registers from the first row to the last.

    The second keys of a row are the first keys of the next one, so each is loaded once.
    """
    zero = ir.Constant(ROW, [0] * LANES)
    sums = [cgutils.alloca_once_value(build, zero) for _ in range(2)]
    carried = [
        cgutils.alloca_once_value(build, _key(build, keys, ir.Constant(INT64, 0), half)) for half in range(2)
    ]

    def add_row(row: Value) -> None:
        words = _loaded(build, address, row, ROW_BYTES, 0)
        if target is not None:
            place = build.add(target, build.mul(row, ir.Constant(INT64, ROW_BYTES)))
            stored = build.store(words, build.inttoptr(place, ROW.as_pointer()))
            stored.align = 1
        halves = build.and_(words, LOW_HALVES), build.lshr(words, HALF_BITS)
        following = build.add(row, ir.Constant(INT64, 1))
        new = [_key(build, keys, following, half) for half in range(2)]
        for place, row_keys in zip(sums, ([build.load(each) for each in carried], new), strict=True):
            low, high = map(build.mul, halves, row_keys)
            build.store(build.add(build.load(place), build.add(low, high)), place)
        for place, key in zip(carried, new, strict=True):
            build.store(key, place)

    unrolled = ir.Constant(INT64, UNROLLED_ROWS)
    with cgutils.for_range(build, build.udiv(num_rows, unrolled)) as loop:
        first = build.mul(loop.index, unrolled)
        for step in range(UNROLLED_ROWS):
            add_row(build.add(first, ir.Constant(INT64, step)))
    rest = build.urem(num_rows, unrolled)
    with cgutils.for_range(build, rest) as loop:
        add_row(build.add(build.sub(num_rows, rest), loop.index))
    return cgutils.pack_array(build, [_added(build, build.load(place)) for place in sums])


def _key(build: Builder, keys: Value, row: Value, half: int) -> Value:
    """Emits the load of the keys of a row, for the low or the high halves of its words."""
    return build.and_(_loaded(build, keys, row, KEY_BYTES, half * ROW_BYTES), LOW_HALVES)


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
