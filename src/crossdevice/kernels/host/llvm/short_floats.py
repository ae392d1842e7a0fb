"""Floats of 8 bits to and from float32, emitted as LLVM code."""

from __future__ import annotations

from typing import NamedTuple

from crossdevice.kernels.host.llvm.lanes import INT8, INT32, SINGLE, Vector


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
    """As float32, exactly."""
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
    """float32 rounded to nearest even; what is too large is infinite or, where there is no infinity, NaN."""
    form = SHORT_FORMATS[dtype]
    bits = single.bits()
    magnitude = bits & 0x7FFFFFFF
    shift = SINGLE_FRACTION_BITS - form.fraction_bits
    carried = magnitude + ((magnitude >> shift & 1) + ((1 << (shift - 1)) - 1))
    normal = (carried >> shift) - ((SINGLE_BIAS - form.bias) << form.fraction_bits)
    # Added to a number whose last place is that of the subnormal ones, these are rounded to it.
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
