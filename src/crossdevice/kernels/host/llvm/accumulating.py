"""numba kernels that add weighted inputs to a running sum in memory, which may have several parts."""

# ruff: noqa: ARG001 - numba fixes the parameters of intrinsics and of the functions that emit them

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from crossdevice.kernels.host.llvm.code import byte_offset
from crossdevice.kernels.host.llvm.conversions import as_double, in_memory_order
from crossdevice.kernels.host.llvm.lanes import DOUBLE, INT64, STORED, Builder, Lanes, State, Value, Vector
from crossdevice.kernels.host.llvm.numba_pass import Kernel, compiled
from crossdevice.kernels.host.llvm.words import loaded_word, set_word, word_at
from crossdevice.kernels.host.reference.rounding import two_sum
from crossdevice.kernels.host.reference.running import NUM_PARTS
from crossdevice.kernels.host.work_list import WORD_BYTES

SIGNATURE = "int64(int64,int64,int64,int64,int64,int64)"

ROW_WORDS = 4
"""Addresses of inputs, addresses of parts, start, stop."""

LANES = 16
"""Elements at a time: two lines of each part, and of up to three parts in half the registers."""


@functools.cache
def accumulating_kernel(family: str, dtype: str) -> Kernel:
    """Returns the kernel that adds inputs to sums of a family; the kernel returns how many rows it finished.

    Called with (rows, how many, inputs of each, their weights, leftovers, capacity). Elements that the parts
    cannot hold without error are left as they were. `leftovers` gets their number, and the row and the
    position of each; once there are `capacity`, the row of the next such position starts there.
    """
    name = f"{family} {dtype}"

    def kernel(rows: int, num_rows: int, num_inputs: int, weights: int, leftovers: int, capacity: int) -> int:
        left = 0
        for number in range(num_rows):
            row = rows + number * ROW_WORDS * WORD_BYTES
            terms, parts = (word_at(row, 0), num_inputs, weights), word_at(row, 1)
            position, stop = word_at(row, 2), word_at(row, 3)
            while position < stop:
                if position + LANES <= stop and not add_lanes(name, LANES, terms, parts, position):
                    position += LANES
                    continue
                end = min(position + LANES, stop)
                while position < end:
                    if add_lanes(name, 1, terms, parts, position):
                        if left == capacity:
                            set_word(row, 2, position)
                            set_word(leftovers, 0, left)
                            return number
                        set_word(leftovers, 1 + 2 * left, number)
                        set_word(leftovers, 2 + 2 * left, position)
                        left += 1
                    position += 1
        set_word(leftovers, 0, left)
        return num_rows

    return compiled(kernel, f"accumulate {name}", SIGNATURE)


@intrinsic(prefer_literal=True)
def add_lanes(typing_context: Any, name: Any, lanes: Any, terms: Any, parts: Any, position: Any) -> Any:
    """Adds `lanes` elements of all inputs from `position` on, times their weights, to the parts.

    `terms` has the addresses of the inputs, how many they are, and the weights.

    1 is returned, and nothing is written, if a part of an exact sum would have to be rounded.
    """
    signature = types.int64(name, lanes, terms, parts, position)
    family, dtype = name.literal_value.split(" ")
    count = lanes.literal_value

    def emit(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        _, _, terms, parts, position = arguments
        inputs, num_inputs, weights = cgutils.unpack_tuple(builder, terms)
        vectors = Lanes(builder, count)
        wide_offset = byte_offset(builder, position, "float64")
        addresses = [
            builder.add(loaded_word(builder, parts, ir.Constant(INT64, number)), wide_offset)
            for number in range(NUM_PARTS[family])
        ]
        places = [
            cgutils.alloca_once_value(builder, vectors.load(place, DOUBLE).value) for place in addresses
        ]
        lost = cgutils.alloca_once_value(builder, vectors.constant(ir.IntType(1), 0).value)
        with cgutils.for_range(builder, num_inputs) as loop:
            weight = vectors.spread(builder.bitcast(loaded_word(builder, weights, loop.index), DOUBLE))
            start = builder.add(
                loaded_word(builder, inputs, loop.index), byte_offset(builder, position, dtype)
            )
            stored = vectors.load(start, STORED[dtype])
            element = in_memory_order(as_double(stored, dtype), dtype)
            state = tuple(Vector(vectors, builder.load(place)) for place in places)
            grown, is_lost = _grown(family, state, element, weight)
            for part, place in zip(grown, places, strict=True):
                builder.store(part.value, place)
            if is_lost is not None:
                builder.store(builder.or_(builder.load(lost), is_lost.value), lost)

        def write() -> None:
            for place, address in zip(places, addresses, strict=True):
                value = builder.load(place)
                stored = builder.store(value, builder.inttoptr(address, value.type.as_pointer()))
                stored.align = 1

        if not family.startswith("expansion"):
            write()
            return ir.Constant(INT64, 0)
        is_any = Vector(vectors, builder.load(lost)).is_any()
        with builder.if_then(builder.not_(is_any), likely=True):
            write()
        return builder.zext(is_any, INT64)

    return signature, emit


def _grown(family: str, state: State, element: Vector, weight: Vector) -> tuple[State, Vector | None]:
    """Adds element * weight to the parts; also tells where they have lost something. As in `running.py`."""
    if family == "wide":
        return (state[0] + element * weight,), None
    product, rest, is_known = element.two_product(weight)
    if family == "compensated":
        total, error = two_sum(state[0], product)
        return (total, state[1] + error + rest), None
    parts = list(state)
    is_lost = ~is_known & ((element != 0.0) & (weight != 0.0))
    rest = (rest == 0.0).select(-0.0, rest)  # so that a sum of -0.0 stays that
    for left in (product, rest):
        for number, part in enumerate(parts):
            parts[number], left = two_sum(part, left)
        is_lost |= left != 0.0
    return tuple(parts), is_lost
