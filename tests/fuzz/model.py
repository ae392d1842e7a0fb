"""Whether results are what an independent model says.

The model is the conformance tests' oracle: exact integers and fractions, none of the library's kernels.
Under `fast`, whose order is the algorithm's, results must lie within the bound of any order.
"""

from __future__ import annotations

import functools
from fractions import Fraction
from typing import Any

import numpy as np

from conformance.oracle import FORMATS, NUMPY_DTYPES, expected, result_dtype, rounded, weighted
from conformance.rows import same_numbers
from fuzz.inputs import Inputs, columns_of, weights_of

ALL = slice(None)


def result_dtype_of(case: Any) -> str:
    """A sum of integers with weights is a float, as their mean is."""
    return result_dtype(case.dtype, case.op if case.weights == "none" else "MEAN")


def wrong_result(case: Any, leaf: int, found: np.ndarray, at: Any = ALL) -> str | None:
    """What is wrong with a leaf of a result, or with those of its elements; None if nothing is."""
    flat = np.ascontiguousarray(found).reshape(-1)
    dtype = result_dtype_of(case)
    if flat.dtype != NUMPY_DTYPES[dtype]:
        return f"dtype {flat.dtype}, expected {dtype}"
    inputs = Inputs.of(case)
    is_float = case.dtype in FORMATS or case.dtype.startswith("complex")
    if case.weights != "none":
        right = _weighted(inputs, leaf, case.op, case.precision, case.weights)
    elif case.op == "PROD" and case.dtype.startswith("complex"):
        right = _complex_products(inputs, leaf, case.precision)
    elif case.precision == "fast" and is_float and case.op in ("SUM", "MEAN", "PROD"):
        return _outside(bounds(inputs, leaf, case.op)[at], flat)
    else:
        right = _expected(inputs, leaf, case.op, case.precision)
    return None if right is None or same_numbers(flat, right[at]) else f"{flat} instead of {right[at]}"


@functools.lru_cache(maxsize=32)
def _expected(inputs: Inputs, leaf: int, op: str, precision: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return expected(op, columns_of(inputs, leaf), inputs.dtype, precision)


@functools.lru_cache(maxsize=32)
def _weighted(inputs: Inputs, leaf: int, op: str, precision: str, kind: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return weighted(op, columns_of(inputs, leaf), weights_of(inputs, kind), inputs.dtype, precision)


@functools.lru_cache(maxsize=32)
def _complex_products(inputs: Inputs, leaf: int, precision: str) -> np.ndarray | None:
    """By their parts, in replica order (`accurate`), or the true ones of finite numbers (`exact`)."""
    if precision == "fast" or (precision == "exact" and inputs.numbers in ("special", "bits")):
        return None
    part = "float32" if inputs.dtype == "complex64" else "float64"
    results = []
    for column in zip(*(array.tolist() for array in columns_of(inputs, leaf)), strict=True):
        kind = float if precision == "accurate" else Fraction
        real, imaginary = kind(column[0].real), kind(column[0].imag)
        for number in column[1:]:
            c, d = kind(number.real), kind(number.imag)
            real, imaginary = real * c - imaginary * d, real * d + imaginary * c
        if precision == "exact":
            if not real or not imaginary:
                return None  # zeros' signs have rules of their own
            real, imaginary = rounded(real, part), rounded(imaginary, part)
        results.append((real, imaginary))
    with np.errstate(all="ignore"):
        return np.array(results, np.float64).astype(part).reshape(-1).view(inputs.dtype)


@functools.lru_cache(maxsize=32)
def bounds(inputs: Inputs, leaf: int, op: str) -> np.ndarray:
    """The true sums or products, and how far from them those in the dtype, in any order, can be.

    For each element one pair, or two for its parts; None where these may overflow.
    """
    replicas = columns_of(inputs, leaf)
    part = replicas[0].real.dtype
    form = FORMATS[part.name]
    least = Fraction(2) ** (form.least_exponent - form.precision + 1)
    parts = [array.view(part) for array in replicas]
    found = np.empty(parts[0].size, object)
    for element, column in enumerate(zip(*(array.tolist() for array in parts), strict=True)):
        numbers = [Fraction(float(number)) for number in column]
        steps = len(numbers) + 1
        if op == "PROD":
            true = scale = Fraction(1)
            for number in numbers:
                true, scale = true * number, scale * max(abs(number), Fraction(1))
        else:
            share = len(numbers) if op == "MEAN" else 1
            true, scale = sum(numbers) / share, sum(map(abs, numbers)) / share
        bound = 2 * steps * (scale / 2**form.precision + least) * (steps if op == "PROD" else 1)
        found[element] = None if steps * scale * 2 > form.greatest else (Fraction(true), bound)
    return found.reshape(replicas[0].size, parts[0].size // max(replicas[0].size, 1))


def _outside(known: np.ndarray, found: np.ndarray) -> str | None:
    """Where a result cannot be."""
    numbers = found.view(found.real.dtype)
    for element, (near, number) in enumerate(zip(known.reshape(-1), numbers, strict=True)):
        if near is None:
            continue
        true, bound = near
        if not np.isfinite(float(number)) or abs(Fraction(float(number)) - true) > bound:
            return f"element {element} is {number}, expected {float(true)} +- {float(bound)}"
    return None
