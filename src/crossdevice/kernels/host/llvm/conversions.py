"""Conversions between float dtypes, emitted as LLVM code."""

from __future__ import annotations

from crossdevice.kernels.host.llvm.lanes import DOUBLE, HALF, INT16, INT32, SINGLE, Lanes, Vector
from crossdevice.kernels.host.llvm.short_floats import SHORT_FORMATS, short_of_single, single_of_short


def as_single(stored: Vector, dtype: str) -> Vector:
    """A narrower float as float32, exactly; of bfloat16 first every other element, then those between."""
    lanes = stored.lanes
    if dtype in SHORT_FORMATS:
        return single_of_short(stored, dtype)
    if dtype == "float16":
        return stored.converted("fpext", SINGLE)
    if lanes.count == 1:
        return (stored.converted("zext", INT32) << 16).converted("bitcast", SINGLE)
    # Neighbours in one word are parted by a shift and a mask; extending each would have to shuffle lanes.
    pairs = stored.converted("bitcast", INT32, Lanes(lanes.build, lanes.count // 2))
    both = (pairs << 16).shuffled(range(lanes.count), pairs & 0xFFFF0000)
    return both.converted("bitcast", SINGLE)


def in_memory_order(widened: Vector, dtype: str) -> Vector:
    """Elements widened by `as_single` or `as_double`, as they came from memory."""
    count = widened.lanes.count
    return _taken(widened, dtype, [lane // 2 + lane % 2 * (count // 2) for lane in range(count)])


def in_widened_order(ordered: Vector, dtype: str) -> Vector:
    """Elements in memory's order, as `as_single` and `as_double` would have them."""
    count = ordered.lanes.count
    return _taken(ordered, dtype, [*range(0, count, 2), *range(1, count, 2)])


def _taken(value: Vector, dtype: str, positions: list[int]) -> Vector:
    return value if dtype != "bfloat16" or value.lanes.count == 1 else value.shuffled(positions)


def as_double(stored: Vector, dtype: str) -> Vector:
    """Any float as float64, exactly."""
    if dtype == "float64":
        return stored
    single = stored if dtype == "float32" else as_single(stored, dtype)
    return single.converted("fpext", DOUBLE)


def from_single(single: Vector, dtype: str) -> Vector:
    """float32 rounded to nearest even into a narrower float; NaNs become the quiet one, but for float16."""
    if dtype in SHORT_FORMATS:
        return short_of_single(single, dtype)
    if dtype == "float16":
        return single.converted("fptrunc", HALF)
    bits = single.bits()
    carried = bits + ((bits >> 16 & 1) + 0x7FFF)
    rounded = (single != single).select(0x7FC00000, carried)
    if single.lanes.count == 1:
        return (rounded >> 16).converted("trunc", INT16)
    half = single.lanes.count // 2
    even, odd = rounded.shuffled(range(half)), rounded.shuffled(range(half, 2 * half))
    return (even >> 16 | odd & 0xFFFF0000).converted("bitcast", INT16, single.lanes)


def from_double(wide: Vector, dtype: str) -> Vector:
    """float64 rounded once, to nearest even, into any float; NaNs become the quiet one."""
    match dtype:
        case "float64":
            return wide.with_one_nan()
        case "float32":
            return wide.converted("fptrunc", SINGLE).with_one_nan()
        case "float16" | "float8_e4m3fn" | "float8_e5m2":
            # A float32 that is subnormal is zero as one of these, rounded as it may be.
            return from_single(wide.odd_single().with_one_nan(), dtype)
        case _:
            return from_single(wide.odd_single_or_subnormal(), dtype)
