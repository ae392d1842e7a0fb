"""Sums and means of weights times values in NumPy: wide, compensated, or correctly rounded."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.kernels.host.reference.exact import (
    Enclosure,
    decided_sum,
    enclosed_quotient,
    enclosed_sum,
    quotient_bits,
    rounded_integers,
)
from crossdevice.kernels.host.reference.long_accumulator import Floats, Integers, scaled_integers
from crossdevice.kernels.host.reference.rounding import (
    is_error_known,
    neutral,
    remainder_of,
    rounded,
    two_product,
    two_sum,
    with_errors,
)
from crossdevice.values.options import Precision
from crossdevice.values.weights import Weights


def weighted_combination(
    inputs: Sequence[NDArray[Any]], weights: Weights, precision: Precision, dtype: np.dtype[Any]
) -> NDArray[Any]:
    """Returns the sum of weights times inputs over the divisor, rounded once; `fast` is `accurate` here."""
    if inputs[0].dtype in (np.int64, np.uint64):
        # float64 cannot represent all 64-bit integers.
        columns = np.stack([array.astype(object) for array in inputs])
        return _by_integers(columns, np.zeros(columns.shape, np.int64), weights, dtype)
    wide = [array.astype(np.float64) for array in inputs]
    if precision == "exact":
        return _exact(wide, weights, dtype)
    divisor = None if weights.exact_divisor == 1 else weights.divisor
    if inputs[0].dtype == np.float64 or (inputs[0].dtype.kind in "iu" and dtype == np.float64):
        return rounded(_compensated(wide, weights, divisor), dtype)
    products = (array * factor for array, factor in zip(wide, weights.factors, strict=True))
    total = functools.reduce(np.add, products)
    return rounded(total if divisor is None else total / divisor, dtype)


def _compensated(inputs: Sequence[Floats], weights: Weights, divisor: float | None) -> Floats:
    total, errors = two_product(inputs[0], weights.factors[0])
    # Kernels start from 0 and add this error to it, which turns -0 into 0.
    errors = 0.0 + errors
    for array, factor in zip(inputs[1:], weights.factors[1:], strict=True):
        product, of_product = two_product(array, factor)
        total, error = two_sum(total, product)
        errors = (errors + error) + of_product
    return with_errors(total, errors, divisor, remainder_of, divisor_rest=weights.rest)


def _exact(inputs: Sequence[Floats], weights: Weights, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns the true sum or mean, from an enclosure in float64 where that decides, else from integers."""
    enclosure = _enclosed_sum(inputs, weights.factors)
    if weights.divisor != 1 or weights.rest != 0:
        enclosure = enclosed_quotient(enclosure, weights.divisor, *weights.words[-2:])
    return decided_sum(inputs, enclosure, dtype, lambda columns: _decided(columns, weights, dtype))


def _enclosed_sum(inputs: Sequence[Floats], factors: Sequence[float]) -> Enclosure:
    """Encloses the sum of all products and their errors; the doubt is infinite where an error is unknown."""
    terms: list[Floats] = []
    unknown = np.zeros(inputs[0].shape, np.bool_)
    for array, factor in zip(inputs, factors, strict=True):
        product, error = two_product(array, factor)
        terms += [product, neutral(error)]
        unknown |= ~is_error_known(array, product) & (array != 0) if factor else ~np.isfinite(array)
    enclosure = enclosed_sum(terms)
    return enclosure._replace(doubt=np.where(unknown, np.inf, enclosure.doubt))


def _decided(columns: Floats, weights: Weights, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns the result for each column, special values included."""
    finite = np.isfinite(columns)
    factors = np.array(weights.factors)[:, None]
    # Finite values next to an infinity do not count, and might overflow to the other one.
    result = np.where(finite, 0.0, columns * factors).sum(axis=0).astype(dtype)
    whole = finite.all(axis=0)
    columns = columns.compress(whole, axis=1)
    mantissas, exponents = scaled_integers(columns)
    signed = np.where(np.signbit(columns), -mantissas, mantissas).astype(object)
    decided = _by_integers(signed, exponents, weights, dtype)
    # A sum of nothing but -0.0 is -0.0; any other zero is positive.
    decided[np.signbit(columns * factors).all(axis=0) & (decided == 0)] = -0.0
    result[whole] = decided
    return result


def _by_integers(
    columns: NDArray[np.object_], exponents: Integers, weights: Weights, dtype: np.dtype[Any]
) -> NDArray[Any]:
    """Computes columns of integers * 2**exponents in Python's integers, which are never rounded."""
    # Denominators are powers of two. The divisor's may be the largest, since it includes weights of others.
    divisor = weights.exact_divisor
    unit = max(divisor.denominator, *(Fraction(factor).denominator for factor in weights.factors))
    factors = [int(Fraction(factor) * unit) for factor in weights.factors]
    lowest = exponents.min(axis=0)
    shifted = columns << (exponents - lowest).astype(object)
    totals = sum(row * factor for row, factor in zip(shifted, factors, strict=True))
    quotients = np.empty(lowest.shape, object)
    places = np.empty(lowest.shape, np.int64)
    for element, total in enumerate(totals):
        quotients[element], places[element] = quotient_bits(abs(total), int(divisor * unit))
    negative = np.array([total < 0 for total in totals], np.bool_)
    return rounded_integers(quotients, lowest + places, negative, dtype)
