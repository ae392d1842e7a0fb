"""What a reduction must give, element by element, in whole numbers and fractions.

Written from the definitions alone: nothing here imports crossdevice, and no array arithmetic is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import reduce
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

NUMPY_DTYPES = {
    **{name: np.dtype(name) for name in ("float16", "float32", "float64", "complex64", "complex128")},
    **{f"{kind}{bits}": np.dtype(f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
MEAN_OF_INTEGERS = {
    **dict.fromkeys(("int8", "int16", "uint8", "uint16"), "float32"),
    **dict.fromkeys(("int32", "int64", "uint32", "uint64"), "float64"),
}


class Format(NamedTuple):
    """A binary floating-point format: bits of precision, and the exponents of its normal numbers."""

    precision: int
    least_exponent: int
    greatest_exponent: int

    @property
    def greatest(self) -> Fraction:
        """The greatest finite number."""
        return (2 - Fraction(2) ** (1 - self.precision)) * Fraction(2) ** self.greatest_exponent


FORMATS = {
    "float16": Format(11, -14, 15),
    "bfloat16": Format(8, -126, 127),
    "float32": Format(24, -126, 127),
    "float64": Format(53, -1022, 1023),
}


def rounded(number: Fraction, dtype: str) -> float:
    """The nearest number of a float dtype, ties to even; infinity from half a unit beyond the greatest."""
    if number == 0:
        return 0.0
    form = FORMATS[dtype]
    numerator, denominator = abs(number.numerator), number.denominator
    exponent = numerator.bit_length() - denominator.bit_length()
    if abs(number) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, form.least_exponent) - form.precision + 1)
    near = round(abs(number) / unit) * unit
    magnitude = math.inf if near > form.greatest else float(near)
    return -magnitude if number < 0 else magnitude


def rounded_float(wide: float, dtype: str) -> float:
    """A float64 rounded once to a narrower dtype."""
    if not math.isfinite(wide) or wide == 0:
        return wide
    return rounded(Fraction(wide), dtype)


def is_of_ranks(op: str) -> bool:
    """Whether it is the mean of the middle of sorted numbers."""
    return op == "MEDIAN" or op.startswith("TRIMMED_MEAN")


def result_dtype(dtype: str, op: str) -> str:
    """A mean of integers is float32 up to 16 bits and float64 beyond; everything else keeps its dtype."""
    return MEAN_OF_INTEGERS.get(dtype, dtype) if op == "MEAN" or is_of_ranks(op) else dtype


def expected(op: str, replicas: Sequence[np.ndarray], dtype: str, precision: str) -> np.ndarray:
    """The result for flat arrays of all replicas."""
    columns = list(zip(*(array.tolist() for array in replicas), strict=True))
    if is_of_ranks(op):
        results = [_mean_of_middle(op, column, dtype, precision) for column in columns]
    elif dtype.startswith("complex"):
        part = {"complex64": "float32", "complex128": "float64"}[dtype]
        results = [_complex(op, column, part, precision) for column in columns]
    elif dtype in FORMATS:
        results = [_one_nan(_real(op, [float(x) for x in column], dtype, precision)) for column in columns]
    else:
        results = [_whole(op, column, dtype, precision) for column in columns]
    return np.array(results, NUMPY_DTYPES[result_dtype(dtype, op)])


def _one_nan(number: float) -> float:
    return math.nan if math.isnan(number) else number


def _mean_of_middle(op: str, column: Sequence[Any], dtype: str, precision: str) -> float:
    """The median, or the mean of all but the k least and the k greatest; -0.0 is less than 0.0."""
    count = len(column)
    if dtype in FORMATS:
        column = [float(number) for number in column]
        if any(map(math.isnan, column)):
            return math.nan
    ordered = sorted(column, key=lambda number: (number, math.copysign(1.0, number)))
    if op == "MEDIAN":
        middle = ordered[(count - 1) // 2 : count // 2 + 1]
    else:
        k = int(op.removeprefix("TRIMMED_MEAN(").removesuffix(")"))
        middle = ordered[k : count - k]
    if dtype not in FORMATS:
        return rounded(Fraction(sum(middle), len(middle)), MEAN_OF_INTEGERS[dtype])
    mean = exact_sum if precision == "exact" else accurate_sum
    return _one_nan(mean(middle, dtype, len(middle)))


def _whole(op: str, column: Sequence[int], dtype: str, precision: str) -> Any:
    if op in ("MIN", "MAX"):
        return min(column) if op == "MIN" else max(column)
    if op == "MEAN":
        total = _wrapped(sum(column), dtype) if precision == "fast" else sum(column)
        if precision == "fast" and dtype.endswith("64"):
            return float(total) / len(column)
        return rounded(Fraction(total, len(column)), MEAN_OF_INTEGERS[dtype])
    return _wrapped(sum(column) if op == "SUM" else math.prod(column), dtype)


def _wrapped(number: int, dtype: str) -> int:
    bits = NUMPY_DTYPES[dtype].itemsize * 8
    number %= 1 << bits
    return number - (1 << bits) if dtype.startswith("int") and number >= 1 << (bits - 1) else number


def _complex(op: str, column: Sequence[complex], part: str, precision: str) -> complex:
    if op == "PROD":
        # Only for numbers whose products are exact: then every order and precision agrees.
        return reduce(lambda left, right: left * right, column)
    return complex(
        _one_nan(_real(op, [number.real for number in column], part, precision)),
        _one_nan(_real(op, [number.imag for number in column], part, precision)),
    )


def _real(op: str, column: Sequence[float], dtype: str, precision: str) -> float:
    if op in ("MIN", "MAX"):
        return extreme(column, is_min=op == "MIN")
    if op == "PROD":
        return exact_product(column, dtype) if precision == "exact" else wide_product(column, dtype)
    divisor = len(column) if op == "MEAN" else None
    if precision == "accurate":
        return accurate_sum(column, dtype, divisor)
    return exact_sum(column, dtype, divisor)


def extreme(column: Sequence[float], *, is_min: bool) -> float:
    """NaN wins, and -0.0 is less than 0.0."""
    if any(math.isnan(number) for number in column):
        return math.nan

    def place(number: float) -> tuple[float, float]:
        return number, math.copysign(1.0, number)

    return (min if is_min else max)(column, key=place)


def exact_sum(column: Sequence[float], dtype: str, divisor: int | None = None) -> float:
    """The true sum or mean, rounded once."""
    if not all(map(math.isfinite, column)):
        return sum(number for number in column if not math.isfinite(number))
    total = sum(map(Fraction, column), Fraction(0)) / (divisor or 1)
    if total == 0:
        return -0.0 if all(math.copysign(1.0, number) < 0 for number in column) else 0.0
    return rounded(total, dtype)


def accurate_sum(column: Sequence[float], dtype: str, divisor: int | None = None) -> float:
    """Added in replica order in float64 (which for float64 collects its errors), rounded once."""
    total, errors = column[0], 0.0
    for number in column[1:]:
        grown = total + number
        if dtype == "float64" and math.isfinite(grown):
            errors += float(Fraction(total) + Fraction(number) - Fraction(grown))
        total = grown
    if dtype == "float64" and math.isfinite(total) and (errors or divisor is not None):
        true = Fraction(total) + Fraction(errors)
        # A zero keeps its sign: -0.0 + 0.0 would be 0.0.
        return rounded(true / (divisor or 1), dtype) if true else total
    return rounded_float(total if divisor is None else total / divisor, dtype)


def weighted(
    op: str, replicas: Sequence[np.ndarray], weights: Sequence[float], dtype: str, precision: str
) -> np.ndarray:
    """The weighted result for flat arrays of all replicas: a sum of integers is a float, as their mean is."""
    into = result_dtype(dtype, "MEAN")
    if dtype in ("int64", "uint64"):  # which float64 cannot hold
        precision = "exact"
    part = {"complex64": "float32", "complex128": "float64"}.get(into, into)
    total = sum(map(Fraction, weights)) if op == "MEAN" else Fraction(1)
    is_wide = part == "float64"

    def result(column: Sequence[Any]) -> float:
        found = weighted_sum(column, weights, part, total, precision, is_wide=is_wide)
        return _one_nan(found)

    columns = list(zip(*(array.tolist() for array in replicas), strict=True))
    if dtype.startswith("complex"):
        results = [complex(*(result([getattr(x, p) for x in c]) for p in ("real", "imag"))) for c in columns]
    else:
        results = [result(column) for column in columns]
    return np.array(results, NUMPY_DTYPES[into])


def weighted_sum(
    column: Sequence[float],
    weights: Sequence[float],
    dtype: str,
    divisor: Fraction,
    precision: str,
    *,
    is_wide: bool,
) -> float:
    """Under "exact" the true one, rounded; else added in float64, and with its errors if is_wide.

    What is wide is divided by the true sum of the weights and rounded once.
    """
    if not all(map(math.isfinite, column)):
        return sum(x * w for x, w in zip(column, weights, strict=True) if not math.isfinite(x))
    if precision == "exact":
        total = sum(Fraction(x) * Fraction(w) for x, w in zip(column, weights, strict=True)) / divisor
        if total == 0:
            return (
                -0.0
                if all(math.copysign(1.0, x * w) < 0 for x, w in zip(column, weights, strict=True))
                else 0.0
            )
        return rounded(total, dtype)
    products = [x * w for x, w in zip(column, weights, strict=True)]
    total, errors = products[0], float(Fraction(column[0]) * Fraction(weights[0]) - Fraction(products[0]))
    for x, w, product in list(zip(column, weights, products, strict=True))[1:]:
        grown = total + product
        errors += float(Fraction(total) + Fraction(product) - Fraction(grown))
        errors += float(Fraction(x) * Fraction(w) - Fraction(product))
        total = grown
    if is_wide:
        true = Fraction(total) + Fraction(errors)
        return rounded(true / divisor, dtype) if true else total
    return rounded_float(total / float(divisor), dtype)


def exact_product(column: Sequence[float], dtype: str) -> float:
    """The true product, rounded once."""
    sign = math.prod(math.copysign(1.0, number) for number in column)
    if any(math.isnan(number) for number in column):
        return math.nan
    if any(math.isinf(number) for number in column):
        return math.nan if 0 in column else math.copysign(math.inf, sign)
    return math.copysign(rounded(math.prod(map(Fraction, column)), dtype), sign)


def wide_product(column: Sequence[float], dtype: str) -> float:
    """Multiplied in replica order in float64, rounded once."""
    return rounded_float(reduce(lambda left, right: left * right, column), dtype)


def left_to_right(column: Sequence[float], dtype: str, divisor: int | None = None) -> float:
    """Added one after another, each sum rounded to the dtype; a mean divides the last one."""

    def plus(left: float, right: float) -> float:
        return exact_sum([left, right], dtype)

    total = reduce(plus, column)
    if divisor is None or not math.isfinite(total) or total == 0:
        return total
    return rounded(Fraction(total) / divisor, dtype)


def in_two_halves(column: Sequence[float], dtype: str, divisor: int | None = None) -> float:
    """The two halves added apart, then to one another, rounded at every step."""
    half = len(column) // 2
    parts = [left_to_right(part, dtype) for part in (column[:half], column[half:]) if part]
    return left_to_right(parts, dtype, divisor)


def elementwise(
    function: Callable[..., float], replicas: Sequence[np.ndarray], dtype: str, *arguments: Any
) -> np.ndarray:
    """A function of a column over all columns of flat float arrays."""
    columns = zip(*(array.tolist() for array in replicas), strict=True)
    results = [function([float(x) for x in column], dtype, *arguments) for column in columns]
    return np.array(results, NUMPY_DTYPES[dtype])
