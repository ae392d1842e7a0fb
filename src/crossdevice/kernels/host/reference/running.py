"""Running sums in NumPy: weighted inputs added to the parts of a sum, and parts rounded once.

| family | parts of an element |
| --- | --- |
| wide | its sum in float64 |
| compensated | its sum in float64, and the sum of the rounding errors |
| expansion2 to expansion6 | float64 numbers that add up to the true sum; exceptions are listed |
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.kernels.host.reference.exact import (
    Enclosure,
    enclosed_quotient,
    enclosed_sum,
    is_decided,
    quotient_bits,
    rounded_enclosure,
    rounded_integers,
)
from crossdevice.kernels.host.reference.long_accumulator import Floats, Mask
from crossdevice.kernels.host.reference.rounding import (
    exact_remainder,
    is_error_known,
    neutral,
    remainder_of,
    rounded,
    two_product,
    two_sum,
    with_errors,
    with_one_nan,
)
from crossdevice.values.weights import Weights

NUM_PARTS = {"wide": 1, "compensated": 2, **{f"expansion{parts}": parts for parts in range(2, 7)}}
"""Six float64 hold any sum of floats narrower than float64."""


def add_weighted(
    parts: Sequence[Floats], inputs: Sequence[NDArray[Any]], weights: Sequence[float], family: str
) -> Mask:
    """Adds inputs times weights to the parts, in place; elements in the returned mask stay unchanged."""
    with np.errstate(all="ignore"):
        state = list(parts)
        lost = np.zeros(parts[0].shape, np.bool_)
        for array, weight in zip(inputs, weights, strict=True):
            state = _grown(state, array.astype(np.float64), weight, family, lost)
        for part, grown in zip(parts, state, strict=True):
            np.copyto(part, grown, where=~lost)
    return lost


def _grown(state: list[Floats], element: Floats, weight: float, family: str, lost: Mask) -> list[Floats]:
    if family == "wide":
        return [state[0] + element * weight]
    product, rest = two_product(element, weight)
    if family == "compensated":
        total, error = two_sum(state[0], product)
        return [total, (state[1] + error) + rest]
    lost |= ~is_error_known(element, product) & (element != 0) & (weight != 0)
    parts = list(state)
    for term in (product, neutral(rest)):
        left = term
        for number, part in enumerate(parts):
            parts[number], left = two_sum(part, left)
        lost |= left != 0
    return parts


def with_neutral_rests(parts: Sequence[Floats]) -> list[Floats]:
    """Replaces zero and non-finite rests by -0.0: a first part of -0.0 or infinity then stays as it is."""
    return [parts[0], *(neutral(np.where(np.isfinite(part), part, 0.0)) for part in parts[1:])]


def rounded_parts(
    parts: Sequence[Floats], family: str, divisor: Weights, dtype: np.dtype[Any]
) -> tuple[NDArray[Any], NDArray[np.intp]]:
    """Returns the sums over a divisor, rounded once, and which elements `rounded_fraction` has to decide.

    Sums that are not exact anyway are divided by the divisor as float64 has it.
    """
    decided = np.empty(0, np.intp)
    with np.errstate(all="ignore"):
        if family == "wide":
            return rounded(parts[0] / divisor.divisor, dtype), decided
        if family == "compensated":
            number = None if divisor.exact_divisor == 1 else divisor.divisor
            is_whole = divisor.rest == 0 and divisor.divisor.is_integer() and divisor.divisor <= 1 << 26
            remainder = exact_remainder if is_whole else remainder_of  # as in one pass over all inputs
            quotient = with_errors(parts[0], parts[1], number, remainder, divisor_rest=divisor.rest)
            return rounded(quotient, dtype), decided
        enclosure = enclosed_sum(with_neutral_rests(parts))
        if divisor.exact_divisor != 1:
            enclosure = enclosed_quotient(enclosure, divisor.divisor, *divisor.words[-2:])
        undecided = np.flatnonzero(~is_decided(enclosure))
        if dtype.kind in "iub":
            return _rounded_to_integers(enclosure, dtype, undecided)
        return with_one_nan(rounded_enclosure(enclosure, dtype)), undecided


def _rounded_to_integers(
    enclosure: Enclosure, dtype: np.dtype[Any], undecided: NDArray[np.intp]
) -> tuple[NDArray[Any], NDArray[np.intp]]:
    """Rounds to nearest even; returns also the elements that need more bits than float64 has."""
    near, rest, doubt = enclosure
    whole = np.rint(near)
    is_inside = (np.abs((near - whole) + rest) < 0.5 - 2.0**-20) & (doubt < 2.0**-30)
    is_sure = (np.abs(near) < 2.0**31) & (is_inside | ((rest == 0) & (doubt == 0)))
    if dtype.kind != "b":
        whole = whole.clip(np.iinfo(dtype).min, np.iinfo(dtype).max)
    return whole.astype(dtype), np.union1d(np.flatnonzero(~is_sure), undecided)


def rounded_fraction(value: Fraction, dtype: np.dtype[Any]) -> Any:
    """Returns a number of the dtype, rounded once to nearest even; of integers the nearest that there is."""
    if dtype.kind == "b":
        return bool(round(value))
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return dtype.type(min(max(round(value), int(limits.min)), int(limits.max)))
    quotient, exponent = quotient_bits(abs(value.numerator), value.denominator)
    integers = np.array([quotient], object)
    return rounded_integers(integers, np.array([exponent]), np.array([value < 0]), dtype)[0]
