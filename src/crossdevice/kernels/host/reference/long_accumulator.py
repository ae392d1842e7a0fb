"""Sums and means in integers as wide as the whole float64 range, rounded once: always right, not fast."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Words = NDArray[np.uint64]
Mask = NDArray[np.bool_]

HEAD_BITS = 62
LIMB_BITS = 32
LIMB_MASK = (1 << LIMB_BITS) - 1
SMALLEST_EXPONENT = -1074
GUARD_LIMBS = 3
"""Zero limbs below the sum: divided by up to 2**31 it still has 96 - 31 = 65 bits, or is 0."""

CHUNK_ELEMENTS = 1 << 11
"""Elements at a time: at most 70 limbs of 8 bytes for each, 1.1 MiB."""


class FloatFormat(NamedTuple):
    """The bits of a significand, and the exponent of the smallest subnormal."""

    precision: int
    smallest_exponent: int


FORMATS = {
    "float16": FloatFormat(11, -24),
    "bfloat16": FloatFormat(8, -133),
    "float32": FloatFormat(24, -149),
    "float64": FloatFormat(53, SMALLEST_EXPONENT),
    "float8_e4m3fn": FloatFormat(4, -9),
    "float8_e5m2": FloatFormat(3, -16),
}


def scaled_integers(values: Floats) -> tuple[Integers, Integers]:
    """Splits finite values into whole numbers m < 2**53 and exponents e: |value| = m * 2**e.

    >>> scaled_integers(np.array([-3.0]))
    (array([6755399441055744]), array([-51]))
    """
    bits = values.view(np.int64)
    field = (bits >> 52) & 0x7FF
    return (bits & ((1 << 52) - 1)) | ((field > 0).astype(np.int64) << 52), np.maximum(field, 1) - 1075


def rounded_once(negative: Mask, heads: Words, exponents: Integers, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Rounds heads * 2**exponents, with the signs, to nearest even; handles subnormals and overflow.

    A head is 0 or has HEAD_BITS bits; its lowest bit is 1 if any bit below it was: it is then
    never mistaken for a tie, since at least HEAD_BITS - 53 = 9 bits are dropped.
    """
    precision, smallest_exponent = FORMATS[dtype.name]
    # 63 dropped bits put the half above every head, so more would leave the same zero.
    dropped = np.clip(smallest_exponent - exponents, HEAD_BITS - precision, HEAD_BITS + 1)
    # What is kept is 0 below -1074 and infinite above 1100 whatever the exponent; a C int holds these.
    scales = np.clip(exponents + dropped, SMALLEST_EXPONENT, 1100).astype(np.intc)
    shifts = dropped.astype(np.uint64)
    one = np.uint64(1)
    kept = heads >> shifts
    tail = heads & ((one << shifts) - one)
    half = one << (shifts - one)
    kept += (tail > half) | ((tail == half) & ((kept & one) == one))
    # `kept` has at most `precision` bits, or is a power of two: ldexp and the cast round nothing.
    with np.errstate(over="ignore"):
        magnitudes = np.ldexp(kept.astype(np.float64), scales)
        return np.where(negative, -magnitudes, magnitudes).astype(dtype)


def rounded_long_sum(columns: Floats, divisor: int | None, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns the sum of each column of finite values, rounded once; `divisor` is at most 2**31."""
    result = np.empty(columns.shape[1], dtype)
    for start in range(0, result.size, CHUNK_ELEMENTS):
        chunk = slice(start, start + CHUNK_ELEMENTS)
        result[chunk] = _rounded_chunk(np.ascontiguousarray(columns[:, chunk]), divisor, dtype)
    return result


def _rounded_chunk(columns: Floats, divisor: int | None, dtype: np.dtype[Any]) -> NDArray[Any]:
    limbs, exponent = _accumulated(columns)
    _carry(limbs)
    negative = limbs[-1] < 0
    np.negative(limbs, out=limbs, where=negative)
    _carry(limbs)
    if divisor is not None:
        _divide(limbs, divisor)
    heads, exponents = _heads(limbs)
    # A sum of nothing but -0.0 is -0.0; any other zero is positive.
    negative |= np.signbit(columns).all(axis=0)
    return rounded_once(negative, heads, exponents + exponent, dtype)


def _accumulated(columns: Floats) -> tuple[Integers, int]:
    """Adds up 32-bit limbs (lowest first, one row each): sum of limb * 2**(32 * row) = sum / 2**exponent.

    Every addition puts less than 2**33 into a limb, so 64 bits hold 2**30 of them; and the top limb
    leaves 44 bits above the largest value, so it holds the sum of as many and its sign.
    """
    mantissas, exponents = scaled_integers(columns)
    positions = exponents - SMALLEST_EXPONENT
    counts = mantissas != 0
    origin = int(positions.min(where=counts, initial=2045)) // LIMB_BITS
    # A zero may go anywhere.
    positions = np.where(counts, positions - origin * LIMB_BITS, 0)
    mantissas = np.where(np.signbit(columns), -mantissas, mantissas)
    rows = (positions >> 5) + GUARD_LIMBS
    limbs = np.zeros((int(rows.max()) + 4, columns.shape[1]), np.int64)
    elements = np.arange(columns.shape[1])
    for mantissa, row, shift in zip(mantissas, rows, positions & (LIMB_BITS - 1), strict=True):
        # 32 + 31 bits and (signed) 22 + 31 bits.
        lower, upper = (mantissa & LIMB_MASK) << shift, (mantissa >> LIMB_BITS) << shift
        limbs[row, elements] += lower & LIMB_MASK
        limbs[row + 1, elements] += (lower >> LIMB_BITS) + (upper & LIMB_MASK)
        limbs[row + 2, elements] += upper >> LIMB_BITS
    return limbs, (origin - GUARD_LIMBS) * LIMB_BITS + SMALLEST_EXPONENT


def _carry(limbs: Integers) -> None:
    """Brings every limb but the top one, which keeps the sign, into 0 ... 2**32 - 1, in place."""
    for row in range(len(limbs) - 1):
        limbs[row + 1] += limbs[row] >> LIMB_BITS
        limbs[row] &= LIMB_MASK


def _divide(limbs: Integers, divisor: int) -> None:
    """Divides in place by long division; remainders stay below 2**31, so 63 bits suffice.

    The last remainder is not needed: if the division is inexact, at least 2**-31 is left after the
    point, which stands above the guard limbs, so they are not all zero.
    """
    remainder = np.zeros_like(limbs[0])
    for limb in limbs[::-1]:
        limb |= remainder << LIMB_BITS
        quotient = limb // divisor
        remainder = limb - quotient * divisor
        limb[:] = quotient


def _heads(limbs: Integers) -> tuple[Words, Integers]:
    """Returns the leading HEAD_BITS bits of each number, with a sticky lowest bit, and its exponent."""
    elements = np.arange(limbs.shape[1])
    present = limbs != 0
    # The guard limbs keep the leading limb of a number that is not zero at row 2 or above.
    top = np.maximum(len(limbs) - 1 - present[::-1].argmax(axis=0), GUARD_LIMBS - 1)
    high, middle, low = (limbs[top - depth, elements].astype(np.uint64) for depth in range(3))
    width = np.frexp(high.astype(np.float64))[1].astype(np.int64)
    below = width.astype(np.uint64)
    word = np.uint64(LIMB_BITS)
    leading = (((high << word) | middle) << (word - below)) | (low >> below)
    follows = (low << (word - below)) & np.uint64(LIMB_MASK)
    inexact = (follows != 0) | (leading & np.uint64(3) != 0) | (present.argmax(axis=0) < top - 2)
    return (leading >> np.uint64(2)) | (inexact & (high != 0)), (top - 2) * LIMB_BITS + width + 2
