"""Rounding wide values once, to nearest even, into the result's dtype."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def rounded(wide: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """`wide` (float64 or complex128) in `dtype`, rounded once; NaNs become the one quiet NaN."""
    narrow = _bfloat16_of(wide) if dtype == BFLOAT16 else wide.astype(dtype)
    return with_one_nan(narrow)


def with_one_nan(array: NDArray[Any]) -> NDArray[Any]:
    """Replaces every NaN, in place, by the positive quiet one, so bits are defined; complex by its parts."""
    parts = array.view(array.real.dtype) if array.dtype.kind == "c" else array
    unordered = np.isnan(parts)
    if unordered.any():
        parts[unordered] = np.nan
    return array


def two_sum(left: Floats, right: Floats) -> tuple[Floats, Floats]:
    """The rounded sum and its error (Knuth); exact, and not finite where anything overflows."""
    total = left + right
    of_right = total - left
    return total, (left - (total - of_right)) + (right - of_right)


def exact_remainder(dividend: Floats, quotient: Floats, number: float) -> Floats:
    """dividend - quotient * number, without rounding, for the rounded quotient and whole numbers up to 2**26.

    In units of the quotient's last place, 2**-1074 at least, all of these are whole numbers: upper * number
    has 27 + 26 bits, dividend - upper * number is below 2**26 * number + number / 2, and the remainder is at
    most number / 2. A fused multiply-add, which NumPy does not have, gives the same.
    """
    upper = (quotient.view(np.int64) & ~((1 << 26) - 1)).view(np.float64)
    return (dividend - upper * number) - (quotient - upper) * number


def _bfloat16_of(wide: NDArray[np.float64]) -> NDArray[Any]:
    """float64 to bfloat16 by way of float32 rounded to odd: two roundings would not be one."""
    near = wide.astype(np.float32)
    back = near.astype(np.float64)
    bits = near.view(np.uint32)
    bits -= np.abs(back) > np.abs(wide)
    bits |= back != wide
    upper = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    upper[np.isnan(wide)] = 0x7FC0
    return upper.view(BFLOAT16)
