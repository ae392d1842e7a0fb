"""Conversions between float dtypes, emitted as LLVM code."""

from __future__ import annotations

from llvmlite import ir

from crossdevice.kernels.host.llvm.lanes import DOUBLE, HALF, INT16, INT32, SINGLE, Lanes, Value
from crossdevice.kernels.host.llvm.short_floats import SHORT_FORMATS, short_of_single, single_of_short


def as_single(lanes: Lanes, stored: Value, dtype: str) -> Value:
    """A narrower float as float32, exactly; of bfloat16 first every other element, then those between."""
    build = lanes.build
    if dtype in SHORT_FORMATS:
        return single_of_short(lanes, stored, dtype)
    if dtype == "float16":
        return build.fpext(stored, lanes.vector(SINGLE))
    if lanes.count == 1:
        upper = build.shl(build.zext(stored, lanes.vector(INT32)), lanes.constant(INT32, 16))
        return build.bitcast(upper, lanes.vector(SINGLE))
    # Neighbours in one word are parted by a shift and a mask; extending each would have to shuffle lanes.
    half = Lanes(build, lanes.count // 2)
    pairs = build.bitcast(stored, half.vector(INT32))
    even = build.shl(pairs, half.constant(INT32, 16))
    odd = build.and_(pairs, half.constant(INT32, 0xFFFF0000))
    both = ir.Constant(lanes.vector(INT32), list(range(lanes.count)))
    return build.bitcast(build.shuffle_vector(even, odd, both), lanes.vector(SINGLE))


def in_memory_order(lanes: Lanes, widened: Value, dtype: str) -> Value:
    """Elements widened by `as_single` or `as_double`, as they came from memory."""
    half = lanes.count // 2
    return _taken(lanes, widened, dtype, [lane // 2 + lane % 2 * half for lane in range(lanes.count)])


def in_widened_order(lanes: Lanes, ordered: Value, dtype: str) -> Value:
    """Elements in memory's order, as `as_single` and `as_double` would have them."""
    return _taken(lanes, ordered, dtype, [*range(0, lanes.count, 2), *range(1, lanes.count, 2)])


def _taken(lanes: Lanes, value: Value, dtype: str, positions: list[int]) -> Value:
    if dtype != "bfloat16" or lanes.count == 1:
        return value
    return lanes.build.shuffle_vector(value, value, ir.Constant(lanes.vector(INT32), positions))


def as_double(lanes: Lanes, stored: Value, dtype: str) -> Value:
    """Any float as float64, exactly."""
    if dtype == "float64":
        return stored
    single = stored if dtype == "float32" else as_single(lanes, stored, dtype)
    return lanes.build.fpext(single, lanes.vector(DOUBLE))


def from_single(lanes: Lanes, single: Value, dtype: str) -> Value:
    """float32 rounded to nearest even into a narrower float; NaNs become the quiet one, but for float16."""
    build = lanes.build
    if dtype in SHORT_FORMATS:
        return short_of_single(lanes, single, dtype)
    if dtype == "float16":
        return build.fptrunc(single, lanes.vector(HALF))
    bits = lanes.bits(single)
    sixteen = lanes.constant(INT32, 16)
    last = build.and_(build.lshr(bits, sixteen), lanes.constant(INT32, 1))
    carried = build.add(bits, build.add(last, lanes.constant(INT32, 0x7FFF)))
    rounded = build.select(lanes.is_nan(single), lanes.constant(INT32, 0x7FC00000), carried)
    if lanes.count == 1:
        return build.trunc(build.lshr(rounded, sixteen), lanes.vector(INT16))
    half = Lanes(build, lanes.count // 2)
    even, odd = (
        build.shuffle_vector(
            rounded, rounded, ir.Constant(half.vector(INT32), list(range(start, start + half.count)))
        )
        for start in (0, half.count)
    )
    even = build.lshr(even, half.constant(INT32, 16))
    pairs = build.or_(even, build.and_(odd, half.constant(INT32, 0xFFFF0000)))
    return build.bitcast(pairs, lanes.vector(INT16))


def from_double(lanes: Lanes, wide: Value, dtype: str) -> Value:
    """float64 rounded once, to nearest even, into any float; NaNs become the quiet one."""
    match dtype:
        case "float64":
            return lanes.with_one_nan(wide)
        case "float32":
            return lanes.with_one_nan(lanes.build.fptrunc(wide, lanes.vector(SINGLE)))
        case "float16" | "float8_e4m3fn" | "float8_e5m2":
            # A float32 that is subnormal is zero as one of these, rounded as it may be.
            return from_single(lanes, lanes.with_one_nan(lanes.odd_single(wide)), dtype)
        case _:
            return from_single(lanes, lanes.odd_single_or_subnormal(wide), dtype)
