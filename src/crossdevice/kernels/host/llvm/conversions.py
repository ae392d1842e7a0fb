"""Conversions between float dtypes, 8-bit ones included, as LLVM code."""

from __future__ import annotations

from typing import NamedTuple

from crossdevice.kernels.host.llvm.lanes import DOUBLE, HALF, INT8, INT16, INT32, SINGLE, Lanes, Vector


class ShortFormat(NamedTuple):
    """Bit layout of a short float, below its sign."""

    fraction_bits: int
    bias: int
    first_special: int
    """The smallest magnitude that is not finite: an infinity, else NaN."""
    nan: int


SHORT_FORMATS = {
    "float8_e4m3fn": ShortFormat(3, 7, 0x7F, 0x7F),
    "float8_e5m2": ShortFormat(2, 15, 0x7C, 0x7E),
}

SINGLE_FRACTION_BITS, SINGLE_BIAS, SINGLE_INFINITY, SINGLE_NAN = 23, 127, 0x7F800000, 0x7FC00000


def single_of_short(stored: Vector, dtype: str) -> Vector:
    """Converts to float32, exactly."""
    form = SHORT_FORMATS[dtype]
    bits = stored.converted("zext", INT32)
    magnitude = bits & 0x7F
    # With the fields in place, exponents differ by the biases; subnormal numbers are subnormal there too.
    placed = magnitude << SINGLE_FRACTION_BITS - form.fraction_bits
    value = (placed.converted("bitcast", SINGLE) * 2.0 ** (SINGLE_BIAS - form.bias)).bits()
    special = stored.lanes.constant(INT32, SINGLE_NAN)
    if form.nan != form.first_special:
        special = (magnitude == form.first_special).select(SINGLE_INFINITY, special)
    joined = (magnitude >= form.first_special).select(special, value) | (bits & 0x80) << 24
    return joined.converted("bitcast", SINGLE)


def short_of_single(single: Vector, dtype: str) -> Vector:
    """Rounds float32 to nearest even; overflow becomes infinity, or NaN where there is no infinity."""
    form = SHORT_FORMATS[dtype]
    bits = single.bits()
    magnitude = bits & 0x7FFFFFFF
    shift = SINGLE_FRACTION_BITS - form.fraction_bits
    carried = magnitude + ((magnitude >> shift & 1) + ((1 << (shift - 1)) - 1))
    normal = (carried >> shift) - ((SINGLE_BIAS - form.bias) << form.fraction_bits)
    # Added to a number with the last place of subnormals, these are rounded to it.
    exponent = 1 - form.bias - form.fraction_bits + SINGLE_FRACTION_BITS
    place = single.lanes.constant(SINGLE, 2.0**exponent)
    subnormal = (magnitude.converted("bitcast", SINGLE) + place).bits() - place.bits()
    smallest_normal = (1 - form.bias + SINGLE_BIAS) << SINGLE_FRACTION_BITS
    rounded = (magnitude >= smallest_normal).select(normal, subnormal)
    rounded = (rounded < form.first_special).select(rounded, form.first_special)
    is_nan = magnitude > SINGLE_INFINITY
    if form.nan == form.first_special:
        is_nan = rounded == form.first_special
    return is_nan.select(form.nan, rounded | bits >> 24 & 0x80).converted("trunc", INT8)


def as_single(stored: Vector, dtype: str) -> Vector:
    """Converts a narrower float to float32, exactly; for bfloat16 even elements first, then odd ones."""
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
    """Restores the order in memory of elements widened by `as_single` or `as_double`."""
    count = widened.lanes.count
    return _taken(widened, dtype, [lane // 2 + lane % 2 * (count // 2) for lane in range(count)])


def in_widened_order(ordered: Vector, dtype: str) -> Vector:
    """Reorders elements from memory's order to that of `as_single` and `as_double`."""
    count = ordered.lanes.count
    return _taken(ordered, dtype, [*range(0, count, 2), *range(1, count, 2)])


def _taken(value: Vector, dtype: str, positions: list[int]) -> Vector:
    return value if dtype != "bfloat16" or value.lanes.count == 1 else value.shuffled(positions)


def as_double(stored: Vector, dtype: str) -> Vector:
    """Converts any float to float64, exactly."""
    if dtype == "float64":
        return stored
    single = stored if dtype == "float32" else as_single(stored, dtype)
    return single.converted("fpext", DOUBLE)


def from_single(single: Vector, dtype: str) -> Vector:
    """Rounds float32 to nearest even into a narrower float; NaNs become the quiet one, except for float16."""
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
    """Rounds float64 once, to nearest even, into any float; NaNs become the quiet one."""
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
