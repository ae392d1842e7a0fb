"""Floats of 8 bits to and from float32, emitted as LLVM code."""

from __future__ import annotations

from typing import NamedTuple

from crossdevice.kernels.host.llvm.lanes import INT8, INT32, SINGLE, Lanes, Value


class ShortFormat(NamedTuple):
    """How one of them is laid out, below its sign."""

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


def single_of_short(lanes: Lanes, stored: Value, dtype: str) -> Value:
    """As float32, exactly."""
    build, form = lanes.build, SHORT_FORMATS[dtype]
    bits = build.zext(stored, lanes.vector(INT32))
    magnitude = build.and_(bits, lanes.constant(INT32, 0x7F))
    # With the fields in place, exponents differ by the biases; subnormal numbers are subnormal there too.
    placed = build.shl(magnitude, lanes.constant(INT32, SINGLE_FRACTION_BITS - form.fraction_bits))
    scale = lanes.constant(SINGLE, 2.0 ** (SINGLE_BIAS - form.bias))
    value = lanes.bits(build.fmul(build.bitcast(placed, lanes.vector(SINGLE)), scale))
    special = lanes.constant(INT32, SINGLE_NAN)
    if form.nan != form.first_special:
        is_infinite = build.icmp_unsigned("==", magnitude, lanes.constant(INT32, form.first_special))
        special = build.select(is_infinite, lanes.constant(INT32, SINGLE_INFINITY), special)
    is_special = build.icmp_unsigned(">=", magnitude, lanes.constant(INT32, form.first_special))
    sign = build.shl(build.and_(bits, lanes.constant(INT32, 0x80)), lanes.constant(INT32, 24))
    joined = build.or_(build.select(is_special, special, value), sign)
    return build.bitcast(joined, lanes.vector(SINGLE))


def short_of_single(lanes: Lanes, single: Value, dtype: str) -> Value:
    """float32 rounded to nearest even; what is too large is infinite or, where there is no infinity, NaN."""
    build, form = lanes.build, SHORT_FORMATS[dtype]
    bits = lanes.bits(single)
    magnitude = build.and_(bits, lanes.constant(INT32, 0x7FFFFFFF))
    shift = SINGLE_FRACTION_BITS - form.fraction_bits
    last = build.and_(build.lshr(magnitude, lanes.constant(INT32, shift)), lanes.constant(INT32, 1))
    carried = build.add(magnitude, build.add(last, lanes.constant(INT32, (1 << (shift - 1)) - 1)))
    rebias = (SINGLE_BIAS - form.bias) << form.fraction_bits
    normal = build.sub(build.lshr(carried, lanes.constant(INT32, shift)), lanes.constant(INT32, rebias))
    # Added to a number whose last place is that of the subnormal ones, these are rounded to it.
    exponent = 1 - form.bias - form.fraction_bits + SINGLE_FRACTION_BITS
    place = lanes.constant(SINGLE, 2.0**exponent)
    shifted = build.fadd(build.bitcast(magnitude, lanes.vector(SINGLE)), place)
    subnormal = build.sub(lanes.bits(shifted), lanes.bits(place))
    smallest_normal = (1 - form.bias + SINGLE_BIAS) << SINGLE_FRACTION_BITS
    is_normal = build.icmp_unsigned(">=", magnitude, lanes.constant(INT32, smallest_normal))
    rounded = build.select(is_normal, normal, subnormal)
    largest = lanes.constant(INT32, form.first_special)
    rounded = build.select(build.icmp_unsigned("<", rounded, largest), rounded, largest)
    sign = build.and_(build.lshr(bits, lanes.constant(INT32, 24)), lanes.constant(INT32, 0x80))
    result = build.or_(rounded, sign)
    is_nan = build.icmp_unsigned(">", magnitude, lanes.constant(INT32, SINGLE_INFINITY))
    if form.nan == form.first_special:
        is_nan = build.icmp_unsigned("==", rounded, largest)
    result = build.select(is_nan, lanes.constant(INT32, form.nan), result)
    return build.trunc(result, lanes.vector(INT8))
