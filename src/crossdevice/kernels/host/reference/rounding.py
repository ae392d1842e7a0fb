"""Rounding wide values once, to nearest even, into the result's dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from crossdevice.values.dtypes import SHORT_FLOATS

Floats = NDArray[np.float64]

Number = TypeVar("Number", bound=Any)
"""Whatever has operators: arrays of any library, and vectors in code that is emitted."""

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def rounded(wide: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Rounds `wide` (float64 or complex128) to `dtype` once; NaNs become the one quiet NaN."""
    if dtype == BFLOAT16:
        return with_one_nan(_bfloat16_of(wide))
    # ml_dtypes goes by way of float32 itself, and would round twice.
    narrow = _odd_single(wide) if dtype.name in SHORT_FLOATS else wide
    return with_one_nan(narrow.astype(dtype))


def with_one_nan(array: NDArray[Any]) -> NDArray[Any]:
    """Replaces every NaN, in place, by the positive quiet one, so bits are defined; complex by its parts."""
    parts = array.view(array.real.dtype) if array.dtype.kind == "c" else array
    unordered = np.isnan(parts)
    if unordered.any():
        parts[unordered] = np.nan
    return array


def two_sum(left: Number, right: Number) -> tuple[Number, Number]:
    """Returns the rounded sum and its error (Knuth); exact, and not finite where anything overflows."""
    total = left + right
    of_right = total - left
    return total, (left - (total - of_right)) + (right - of_right)


SMALLEST_PRODUCT, LARGEST_PRODUCT = 2.0**-900, 2.0**1020
"""Bounds within which the error of a rounded product is a float64 and nothing overflows on the way."""


def two_product(left: Floats, right: float) -> tuple[Floats, Floats]:
    """Returns the rounded product and its error (Dekker); the error counts as 0 where it may be no float64.

    Factors are cut by their bits into 26 and (signed) 26: all partial products are then exact.
    """
    product = left * right
    (upper, lower), (first, second) = _halves(left), _halves(np.float64(right))
    error = ((upper * first - product) + upper * second + lower * first) + lower * second
    return product, np.where(is_error_known(left, product), error, 0.0)


def is_error_known(left: Number, product: Number) -> Any:
    """Masks where `two_product` gives the error of a rounded product of `left`."""
    size = abs(product)
    return (size >= SMALLEST_PRODUCT) & (size <= LARGEST_PRODUCT) & (abs(left) <= LARGEST_PRODUCT)


def _halves(values: Any) -> tuple[Any, Any]:
    upper = ((values.view(np.int64) + (1 << 26)) & ~((1 << 27) - 1)).view(np.float64)
    return upper, values - upper


def neutral(part: Floats) -> Floats:
    """Returns zeros as -0.0, which leaves every number and every zero unchanged when added."""
    return np.where(part == 0, -0.0, part)


def exact_remainder(dividend: Floats, quotient: Floats, number: float) -> Floats:
    """Returns dividend - quotient * number exactly, for the rounded quotient and whole numbers up to 2**26.

    In units of the quotient's last place, 2**-1074 at least, all of these are whole numbers: upper * number
    has 27 + 26 bits, dividend - upper * number is below 2**26 * number + number / 2, and the remainder is at
    most number / 2. A fused multiply-add, which NumPy does not have, gives the same.
    """
    upper = (quotient.view(np.int64) & ~((1 << 26) - 1)).view(np.float64)
    return (dividend - upper * number) - (quotient - upper) * number


def remainder_of(dividend: Floats, quotient: Floats, number: float) -> Floats:
    """Returns dividend - quotient * number, without rounding, for the rounded quotient."""
    product, error = two_product(quotient, number)
    return (dividend - product) - error


def with_errors(
    total: Number,
    errors: Number,
    divisor: float | None,
    remainder: Callable[[Number, Number, float], Number],
    xp: Any = np,
    divisor_rest: float = 0.0,
) -> Number:
    """Adds the rounding errors back to a sum and divides if there is a divisor, by functions of `xp`.

    `divisor_rest` is what float64 lacks of the divisor.
    """
    # Errors that are 0 would turn -0 into +0. Those of infinities are NaN, and next to the largest numbers
    # two_sum overflows on the way to an error: neither counts.
    counts = (abs(errors) > 0) & xp.isfinite(errors)
    near, rest = two_sum(total, errors)
    near = xp.where(counts, near, total)
    if divisor is None:
        return near
    # The quotient of near, and what is left of it, of the sum and of the divisor, divided too.
    first = near / divisor
    rest = xp.where(counts & xp.isfinite(rest), rest, xp.zeros_like(rest))
    left = remainder(near, first, divisor) + rest
    if divisor_rest:
        left = left - first * divisor_rest
    second = left / divisor
    return xp.where(abs(second) > 0, first + second, first)


def _bfloat16_of(wide: NDArray[np.float64]) -> NDArray[Any]:
    bits = _odd_single(wide).view(np.uint32)
    upper = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    upper[np.isnan(wide)] = 0x7FC0
    return upper.view(BFLOAT16)


def _odd_single(wide: NDArray[np.float64]) -> NDArray[np.float32]:
    """Rounds float64 to float32, to odd, on the way to a narrower dtype, so that only one rounding counts."""
    near = wide.astype(np.float32)
    back = near.astype(np.float64)
    bits = near.view(np.uint32)
    bits -= np.abs(back) > np.abs(wide)
    bits |= back != wide
    return near
