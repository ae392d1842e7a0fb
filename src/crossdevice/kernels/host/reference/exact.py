"""Correctly rounded sums, means and products, independent of the order of the inputs.

A sum is first enclosed: float64 arithmetic also computes its own rounding errors. Nearly always one result
only lies in the enclosure. Elements with several possible results go to the long accumulator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from crossdevice.kernels.host.reference.long_accumulator import (
    HEAD_BITS,
    Floats,
    Integers,
    Mask,
    rounded_long_sum,
    rounded_once,
    scaled_integers,
)
from crossdevice.kernels.host.reference.rounding import (
    remainder_of,
    rounded,
    two_product,
    two_sum,
    with_one_nan,
)

Unbounded: TypeAlias = "NDArray[np.object_]"
"""Python integers, which have as many bits as a product needs."""

QUOTIENT_BITS = 66


class Enclosure(NamedTuple):
    """Real numbers known to lie in near + rest +- doubt, where near is near + rest, rounded.

    No doubt means that the number is near + rest. NaN in any part encloses nothing.
    """

    near: Floats
    rest: Floats
    doubt: Floats


def exact_sum(inputs: Sequence[NDArray[Any]], divisor: int | None, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns the true sum of floats, or the true mean if there is a divisor (1 to 2**31), rounded once.

    >>> exact_sum([np.array([1e308]), np.array([1e308]), np.array([-1e308])], None, np.dtype("float64"))
    array([1.e+308])
    """
    with np.errstate(all="ignore"):
        enclosure = enclosed_sum(inputs)
        if divisor is not None:
            enclosure = enclosed_quotient(enclosure, float(divisor))
        return decided_sum(inputs, enclosure, dtype, lambda columns: _decided(columns, divisor, dtype))


def decided_sum(
    inputs: Sequence[NDArray[Any]],
    enclosure: Enclosure,
    dtype: np.dtype[Any],
    decide: Callable[[Floats], NDArray[Any]],
) -> NDArray[Any]:
    """Rounds enclosed values once; uses `decide` on the inputs where the enclosure is not decisive."""
    result = rounded_enclosure(enclosure, dtype)
    undecided = np.flatnonzero(~is_decided(enclosure))
    if undecided.size:
        result[undecided] = decide(np.stack([array[undecided].astype(np.float64) for array in inputs]))
    return with_one_nan(result)


def enclosed_sum(inputs: Sequence[NDArray[Any]]) -> Enclosure:
    """Adds in float64, adds up the errors of these additions separately, and bounds what that loses."""
    total = inputs[0].astype(np.float64)
    low, doubt = np.zeros_like(total), np.zeros_like(total)
    for array in inputs[1:]:
        total, error = two_sum(total, array.astype(np.float64, copy=False))
        # Narrow dtypes of like magnitude add up in 53 bits without any error.
        if error.any():
            low, lost = two_sum(low, error)
            doubt += np.abs(lost)
    near, rest = two_sum_keeping_zero(total, low)
    # Twice, because adding N of them up may have lost (N - 1) * 2**-53 of it.
    return Enclosure(near, rest, 2 * doubt)


def two_sum_keeping_zero(high: Floats, low: Floats) -> tuple[Floats, Floats]:
    """Acts like two_sum, but keeps -0.0, since the +0.0 of an absent error was never an input."""
    total, error = two_sum(high, low)
    return np.where(low == 0, high, total), error


def enclosed_quotient(
    dividend: Enclosure, number: float, divisor_rest: float = 0.0, divisor_doubt: float = 0.0
) -> Enclosure:
    """Does one step of long division in float64 by number + divisor_rest +- divisor_doubt."""
    first = dividend.near / number
    taken, of_taken = two_product(first, divisor_rest)
    remainder, lost = two_sum(remainder_of(dividend.near, first, number), dividend.rest)
    remainder, more = two_sum(remainder, -taken)
    second = remainder / number
    near, rest = two_sum_keeping_zero(first, second)
    wrong = np.abs(lost) + np.abs(more) + np.abs(of_taken) + dividend.doubt + np.abs(first) * divisor_doubt
    left = np.abs(remainder_of(remainder, second, number)) + np.abs(second * divisor_rest)
    sizes = np.abs(first), np.abs(dividend.near)
    is_extreme = (np.minimum(*sizes) < 2.0**-600) | (np.maximum(*sizes) > 2.0**1000)
    is_extreme &= dividend.near != 0
    # A second part that is tiny may be inexact without a trace.
    is_exact = (wrong + left == 0) & ((second == 0) | (np.abs(second) > 2.0**-600))
    doubt = 2 * wrong / number + np.abs(second) * 2.0**-51 + 2.0**-1000
    return Enclosure(near, rest, np.where(is_extreme, np.inf, np.where(is_exact, 0.0, doubt)))


def is_decided(enclosure: Enclosure) -> Mask:
    """Marks where the enclosure is exact, or finite and strictly between near and one tie beside it.

    Then near is the rounded float64, and the sign of rest says on which side of it the number lies.
    """
    near, rest, doubt = enclosure
    decided = doubt == 0
    if not decided.all():
        # Wider than the doubt by more than the rounding of rest +- margin.
        margin = 2 * doubt + np.abs(rest) * 2.0**-51
        alike = (near + (rest + margin) == near) & (near + (rest - margin) == near)
        decided |= alike & (np.abs(rest) > margin)
    return decided & np.isfinite(near)


def rounded_enclosure(enclosure: Enclosure, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Rounds decided numbers once: float64 is near itself, narrower dtypes round near rounded to odd.

    Rounding to odd (towards zero, then setting the last bit if inexact) and then to a format with at
    least two bits less, as all of them have, subnormals included, is rounding once (Boldo, Melquiond).
    """
    near, rest, _ = enclosure
    if dtype == np.float64:
        return near
    if rest.any():
        bits = near.view(np.int64).copy()
        inexact = rest != 0
        bits -= inexact & (np.signbit(rest) != np.signbit(near))
        bits |= inexact
        near = bits.view(np.float64)
    return rounded(near, dtype)


def _decided(columns: Floats, divisor: int | None, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns the sum or mean of each column, special values included."""
    finite = np.isfinite(columns)
    # Finite values next to an infinity do not count, and might overflow to the other one.
    result = np.where(finite, 0.0, columns).sum(axis=0).astype(dtype)
    whole = finite.all(axis=0)
    result[whole] = rounded_long_sum(columns.compress(whole, axis=1), divisor, dtype)
    return result


def exact_product(inputs: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns the true product of floats or complex numbers, each part rounded once.

    >>> exact_product([np.array([1e200]), np.array([1e200]), np.array([1e-200])], np.dtype("float64"))
    array([1.e+200])
    """
    with np.errstate(all="ignore"):
        if dtype.kind == "c":
            return _complex_product(inputs, dtype)
        return _real_product(np.stack([array.astype(np.float64) for array in inputs]), dtype)


def _real_product(columns: Floats, dtype: np.dtype[Any]) -> NDArray[Any]:
    # Beside an infinity only zeros, infinities and signs count; the rest might overflow or underflow.
    plain = np.isfinite(columns) & (columns != 0)
    result = np.where(plain, np.copysign(1.0, columns), columns).prod(axis=0).astype(dtype)
    whole = np.isfinite(columns).all(axis=0)
    columns = columns.compress(whole, axis=1)
    mantissas, exponents = scaled_integers(columns)
    negative = np.signbit(columns).sum(axis=0) % 2 == 1
    product = mantissas.astype(object).prod(axis=0)
    result[whole] = rounded_integers(product, exponents.sum(axis=0), negative, dtype)
    return with_one_nan(result)


def _complex_product(inputs: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    # Elements that are not finite are multiplied natively, in an order that only their bits decide.
    stacked = np.stack(inputs)
    words = stacked.view(f"u{stacked.dtype.itemsize // 2}").reshape(*stacked.shape, 2)
    order = np.lexsort((words[..., 1], words[..., 0]), axis=0)
    result = np.array(reduce(np.multiply, np.take_along_axis(stacked, order, axis=0)), dtype)
    parts = result.view(result.real.dtype).reshape(-1, 2)
    columns = np.stack([array.astype(np.complex128) for array in inputs])
    whole = np.isfinite(columns).all(axis=0)
    columns = columns.compress(whole, axis=1)
    *products, exponents = _gaussian_products(columns)
    for position, (product, zeros) in enumerate(zip(products, _zero_signs(columns), strict=True)):
        negative = (product < 0).astype(np.bool_) | ((product == 0).astype(np.bool_) & zeros)
        parts[whole, position] = rounded_integers(abs(product), exponents, negative, parts.dtype)
    with_one_nan(parts)
    return result


def _gaussian_products(columns: NDArray[np.complex128]) -> tuple[Unbounded, Unbounded, Integers]:
    """Returns the product of each column as integer real and imaginary parts with one exponent."""
    parts = columns.view(np.float64).reshape(*columns.shape, 2)
    mantissas, exponents = scaled_integers(parts)
    lower = exponents.min(axis=2)
    mantissas = np.where(np.signbit(parts), -mantissas, mantissas)
    factors = mantissas.astype(object) << (exponents - lower[..., None])
    real, imaginary = factors[0, :, 0], factors[0, :, 1]
    for a, b in factors[1:].transpose(0, 2, 1):
        real, imaginary = real * a - imaginary * b, real * b + imaginary * a
    return real, imaginary, lower.sum(axis=0)


def _zero_signs(columns: NDArray[np.complex128]) -> tuple[Mask, Mask]:
    """Marks zero real and imaginary parts that are -0.0: all terms of the expanded product are negative.

    1 and -1 stand for terms of one sign, 0 for terms of both. Expanding has no order, so neither do these.
    """

    def joined(left: Integers, right: Integers) -> Integers:
        return np.where(left == right, left, 0)

    signs_of_real = np.where(np.signbit(columns.real), -1, 1)
    signs_of_imaginary = np.where(np.signbit(columns.imag), -1, 1)
    real, imaginary = signs_of_real[0], signs_of_imaginary[0]
    for c, d in zip(signs_of_real[1:], signs_of_imaginary[1:], strict=True):
        real, imaginary = joined(real * c, -imaginary * d), joined(real * d, imaginary * c)
    return real < 0, imaginary < 0


def quotient_bits(dividend: int, divisor: int) -> tuple[int, int]:
    """Returns a quotient's leading bits with a sticky bit at the end, and the exponent."""
    shift = max(0, divisor.bit_length() + QUOTIENT_BITS - dividend.bit_length())
    quotient, left = divmod(dividend << shift, divisor)
    return quotient << 1 | (left != 0), -shift - 1


def rounded_integers(
    integers: Unbounded, exponents: Integers, negative: Mask, dtype: np.dtype[Any]
) -> NDArray[Any]:
    """Rounds integers * 2**exponents, all non-negative, once, and applies the signs."""
    heads = np.empty(integers.shape, np.uint64)
    shifts = np.empty(integers.shape, np.int64)
    for element, integer in enumerate(integers):
        shift = integer.bit_length() - HEAD_BITS
        head = integer >> shift if shift > 0 else integer << -shift
        heads[element] = head | (shift > 0 and integer != head << shift)
        shifts[element] = shift
    return rounded_once(negative, heads, exponents + shifts, dtype)
