"""True results of reductions, by Python's integers and fractions: no kernel and no array arithmetic."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import dtype_named
from crossdevice.values.dtypes import FLOATS, INTEGERS, PARTS, result_dtype
from crossdevice.values.options import Precision
from crossdevice.values.reduce_op import ReduceOp


class FloatFormat(NamedTuple):
    """Bits of precision, the least exponent of a normal number, and the greatest finite number."""

    precision: int
    least_exponent: int
    greatest: Fraction

    @classmethod
    @functools.cache
    def of(cls, dtype: str) -> FloatFormat:
        """Returns the format of a dtype."""
        info = ml_dtypes.finfo(dtype_named(dtype))
        return cls(int(info.nmant) + 1, int(info.minexp), Fraction(float(info.max)))

    def unit_at(self, number: Fraction) -> Fraction:
        """Returns the distance between neighbouring numbers of this format, near a non-zero number."""
        exponent = number.numerator.bit_length() - number.denominator.bit_length()
        if abs(number) < Fraction(2) ** exponent:
            exponent -= 1
        return Fraction(2) ** (max(exponent, self.least_exponent) - self.precision + 1)

    def rounded(self, number: Fraction) -> float:
        """Rounds to the nearest number of this format, ties to even."""
        unit = self.unit_at(number) if number else Fraction(1)
        near = round(number / unit) * unit
        return math.copysign(math.inf, near) if abs(near) > self.greatest else float(near)


def random_replicas(
    random: np.random.Generator, dtype: str, op: ReduceOp, precision: Precision, count: int, size: int
) -> list[NDArray[Any]]:
    """Makes flat arrays with exact wide sums and products, so that `accurate` leaves one rounding.

    Those for `exact` are further apart.
    """
    return [_array(random, dtype, op, precision, size) for _ in range(count)]


def _array(
    random: np.random.Generator, dtype: str, op: ReduceOp, precision: Precision, size: int
) -> NDArray[Any]:
    if dtype in PARTS:
        if op is ReduceOp.PROD:  # all products are small whole numbers
            return (random.integers(-1, 2, size) + 1j * random.integers(-1, 2, size)).astype(dtype)
        return _array(random, PARTS[dtype], op, precision, 2 * size).view(dtype)
    if dtype in INTEGERS:
        info = np.iinfo(dtype)
        low, high = (0, 10) if op is ReduceOp.MEAN and precision == "fast" else (info.min, info.max)
        return random.integers(low, high, size, dtype=np.dtype(dtype), endpoint=True)
    if dtype not in FLOATS:
        return random.integers(0, 2, size).astype(dtype_named(dtype))
    if op is ReduceOp.PROD:
        return random.choice([0.5, 1.0, -1.0, 1.5, -1.5, -2.0], size).astype(dtype_named(dtype))
    form = FloatFormat.of(dtype)
    bits, reach = (40, 4) if dtype == "float64" and precision != "exact" else (form.precision, 8)
    if precision == "exact" and form.least_exponent < -64:
        reach = 40
    whole = random.integers(-(1 << bits), 1 << bits, size, endpoint=True)
    numbers = whole * 2.0 ** (random.integers(-reach, reach, size, endpoint=True) - bits)
    # Some below the least normal number, which processors can be told to take for 0.
    numbers[:4] = random.integers(-9, 9, min(size, 4)) * 2.0 ** (form.least_exponent - form.precision + 1)
    return numbers.astype(dtype_named(dtype))


Range: TypeAlias = "tuple[Any, Any]"
"""Bounds of an element; mostly both are one number."""


def right_ranges(op: ReduceOp, replicas: Sequence[NDArray[Any]], precision: Precision) -> list[Range]:
    """Computes the range of each element; complex numbers by their parts, except for products."""
    dtype = replicas[0].dtype.name
    if dtype in PARTS and op is ReduceOp.PROD:
        return [(math.prod(each),) * 2 for each in zip(*(array.tolist() for array in replicas), strict=True)]
    into = result_dtype(PARTS.get(dtype, dtype), op)
    is_bounded = precision == "fast" and op not in (ReduceOp.MIN, ReduceOp.MAX)
    form = FloatFormat.of(into) if into in FLOATS else None
    ranges: list[Range] = []
    for column in zip(*map(_numbers, replicas), strict=True):
        true = _true_value(op, column)
        if form is None:
            ranges.append((_wrapped(int(true), into),) * 2)
            continue
        scale = max(abs(true), sum(map(abs, map(Fraction, column)))) if is_bounded else Fraction(0)
        bound = 2 * len(column) * form.unit_at(scale) if scale else None
        ranges.append((form.rounded(true),) * 2 if bound is None else (true - bound, true + bound))
    return ranges


def first_wrong(ranges: Sequence[Range], found: NDArray[Any], dtype: str) -> str | None:
    """Returns the first element of a result that is out of bounds; None if there is none."""
    if found.dtype.name != dtype:
        return f"the dtype is {found.dtype.name}, expected {dtype}"
    numbers = found.tolist() if isinstance(ranges[0][0], complex) else _numbers(found)
    for number, ((low, high), got) in enumerate(zip(ranges, numbers, strict=True)):
        if got != low and not (low != high and low <= got <= high):
            expected = repr(low) if low == high else f"{float(low)!r} to {float(high)!r}"
            return f"element {number} is {got!r}, expected {expected}"
    return None


def _numbers(array: NDArray[Any]) -> list[Any]:
    """Converts to Python's own numbers; complex ones to their parts."""
    if array.dtype.name in PARTS:
        array = array.view(PARTS[array.dtype.name])
    numbers: list[Any] = (array.astype(np.float64) if array.dtype.name in FLOATS else array).tolist()
    return numbers


def _true_value(op: ReduceOp, numbers: Sequence[Any]) -> Fraction:
    match op:
        case ReduceOp.MIN:
            return Fraction(min(numbers))
        case ReduceOp.MAX:
            return Fraction(max(numbers))
        case ReduceOp.PROD:
            return math.prod(map(Fraction, numbers), start=Fraction(1))
    if op.is_order_statistic:
        numbers = sorted(numbers)[slice(*op.sorted_range(len(numbers)))]
    ratios = [number.as_integer_ratio() for number in numbers]
    common = max(denominator for _, denominator in ratios)  # they are powers of 2
    total = sum(numerator * (common // denominator) for numerator, denominator in ratios)
    return Fraction(total, common * (1 if op is ReduceOp.SUM else len(numbers)))


def _wrapped(number: int, dtype: str) -> int | bool:
    if dtype == "bool":
        return bool(number)
    info = np.iinfo(dtype)
    return (number - int(info.min)) % (1 << info.bits) + int(info.min)
