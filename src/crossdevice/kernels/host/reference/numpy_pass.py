"""The fused pass in NumPy, block by block: the reference for the bits of every faster kernel."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.kernels.host.reference.exact import exact_product, exact_sum
from crossdevice.kernels.host.reference.rounding import (
    exact_remainder,
    rounded,
    two_sum,
    with_errors,
)
from crossdevice.kernels.host.reference.sorting import extreme, sorted_values
from crossdevice.kernels.host.reference.weighted import weighted_combination
from crossdevice.values.recipe import Order, Recipe
from crossdevice.values.reduce_op import ReduceOp

Block = NDArray[Any]

BLOCK_ELEMENTS = 1 << 15
"""Elements at a time: the accumulator and one input stay in a 512 KiB second-level cache."""


def numpy_pass(inputs: Sequence[Block], outputs: Sequence[Block], recipe: Recipe) -> None:
    """Combines flat, contiguous, native `inputs` of one dtype and size into every output.

    An output may be one of the inputs; it may not overlap one otherwise.
    """
    if inputs[0].dtype.kind == "c" and recipe.op is not ReduceOp.PROD:
        part = inputs[0].real.dtype
        inputs = [array.view(part) for array in inputs]
        outputs = [array.view(part) for array in outputs]
    with np.errstate(all="ignore"):
        for start in range(0, inputs[0].size, BLOCK_ELEMENTS):
            block = slice(start, start + BLOCK_ELEMENTS)
            value = _combined([array[block] for array in inputs], recipe, outputs[0].dtype)
            for array in outputs:
                array[block] = value


def _combined(inputs: Sequence[Block], recipe: Recipe, dtype: np.dtype[Any]) -> Block:
    if recipe.op.is_order_statistic:
        count = len(inputs)
        return _combined(
            sorted_values(inputs, *recipe.op.sorted_range(count)), recipe.of_sorted(count), dtype
        )
    if recipe.op in (ReduceOp.MIN, ReduceOp.MAX):
        return extreme(inputs, recipe.op)
    if recipe.weights is not None:
        return weighted_combination(inputs, recipe.weights, recipe.precision, dtype)
    is_of_integers = inputs[0].dtype.kind in "iu"
    if is_of_integers and recipe.divisor is not None and recipe.precision != "fast":
        return _true_mean_of_integers(inputs, recipe.divisor, dtype)
    match "fast" if is_of_integers else recipe.precision:
        case "fast":
            return _combined_in_order(inputs, recipe, dtype)
        case "accurate":
            return _combined_wide(inputs, recipe, dtype)
        case "exact" if recipe.op is ReduceOp.PROD:
            return exact_product(inputs, dtype)
        case "exact":
            return exact_sum(inputs, recipe.divisor, dtype)


def _combined_in_order(inputs: Sequence[Block], recipe: Recipe, dtype: np.dtype[Any]) -> Block:
    """Combines in native arithmetic, rounded at every step, in the order of the recipe."""
    combine = _product if recipe.op is ReduceOp.PROD else np.add

    def evaluated(order: Order) -> Block:
        if isinstance(order, int):
            return inputs[order]
        total = evaluated(order[0])
        for child in order[1:]:
            total = combine(total, evaluated(child))
        return total

    total = evaluated(tuple(range(len(inputs))) if recipe.order is None else recipe.order)
    if recipe.divisor is None:
        return total
    return np.true_divide(total.astype(dtype, copy=False), dtype.type(recipe.divisor))


def _combined_wide(inputs: Sequence[Block], recipe: Recipe, dtype: np.dtype[Any]) -> Block:
    """Accumulates wide in the given order and rounds once."""
    if recipe.op is ReduceOp.SUM and inputs[0].dtype == np.float64:
        return rounded(_compensated(inputs, recipe.divisor), dtype)
    wide = np.dtype(np.complex128 if dtype.kind == "c" else np.float64)
    combine = _product if recipe.op is ReduceOp.PROD else np.add
    total = functools.reduce(combine, (array.astype(wide) for array in inputs))
    return rounded(total if recipe.divisor is None else total / recipe.divisor, dtype)


def _product(left: Block, right: Block) -> Block:
    """Returns left * right; complex numbers by parts, as NumPy fuses some steps for some array lengths."""
    if left.dtype.kind != "c":
        return left * right
    product = np.empty_like(left)
    product.real = left.real * right.real - left.imag * right.imag
    product.imag = left.real * right.imag + left.imag * right.real
    return product


def _compensated(inputs: Sequence[Block], divisor: int | None) -> Block:
    """Returns float64 sums or means; all errors of additions are added back before the one rounding."""
    total = inputs[0].copy()
    errors = np.zeros_like(total)
    for array in inputs[1:]:
        total, error = two_sum(total, array)
        errors += error
    return with_errors(total, errors, None if divisor is None else float(divisor), exact_remainder)


def _true_mean_of_integers(inputs: Sequence[Block], divisor: int, dtype: np.dtype[Any]) -> Block:
    """Returns the mean of the integers themselves, without wrap-around."""
    if inputs[0].dtype.itemsize == 8:
        columns = zip(*(array.tolist() for array in inputs), strict=True)
        return np.array([sum(column) / divisor for column in columns], dtype)
    total = inputs[0].astype(np.int64)
    for array in inputs[1:]:
        total += array
    # Through float64, which holds these sums: a quotient by up to 2**26 that is rounded there lies on the
    # same side of every tie of float32 as before.
    return (total / divisor).astype(dtype)
