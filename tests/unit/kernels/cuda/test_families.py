"""Which arithmetic a GPU does, and what it leaves to steps."""

from __future__ import annotations

import pytest

from crossdevice.kernels.cuda.families import MAX_ARRAYS, Arrangement, arranged, parts_in
from crossdevice.kernels.families import START, WITH_INPUT
from crossdevice.values.dtypes import COMPLEXES, INTEGERS, ITEM_BYTES, result_dtype
from crossdevice.values.recipe import Recipe
from crossdevice.values.reduce_op import ReduceOp

SUM, MEAN, MIN, PROD = ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MIN, ReduceOp.PROD


def family(op, precision, dtype, order=None):
    recipe = Recipe(SUM, precision, 3, order) if op is MEAN else Recipe(op, precision, None, order)
    arrangement = arranged(recipe, dtype, result_dtype(dtype, op))
    return arrangement if isinstance(arrangement, str) else arrangement.arithmetic.family


@pytest.mark.parametrize(
    ("op", "precision", "dtype", "expected"),
    [
        (SUM, "accurate", "bfloat16", "wide"),
        (SUM, "accurate", "float64", "compensated"),
        (PROD, "accurate", "float64", "wide"),
        (SUM, "fast", "float16", "rounded"),
        (SUM, "fast", "complex64", "native"),
        (MEAN, "accurate", "complex128", "compensated"),
        (MIN, "exact", "float32", "extreme"),
        (SUM, "exact", "int8", "wrapping"),
        (MEAN, "fast", "int64", "wrapping_mean"),
        (MEAN, "exact", "uint32", "true_mean"),
        (MEAN, "accurate", "int64", "means without wrap-around of int64 have no GPU kernel"),
        (SUM, "exact", "float16", "exact"),
        (SUM, "exact", "complex128", "exact"),
        (MEAN, "exact", "float64", "exact"),
        (PROD, "exact", "float16", "exact products of float16 have no GPU kernel"),
        (PROD, "fast", "complex64", "products of complex64 have no GPU kernel"),
    ],
)
def test_families(op, precision, dtype, expected):
    assert family(op, precision, dtype) == expected


def test_orders_that_are_chains_only_permute_the_inputs():
    for order, positions in (((2, 0, 1), (2, 0, 1)), (((2, 0), 1), (2, 0, 1))):
        arrangement = arranged(Recipe(SUM, "fast", None, order), "float32", "float32")
        assert arrangement == Arrangement(arrangement.arithmetic, positions)
        assert arrangement.arithmetic.program == ()


def test_trees_of_any_depth_become_programs():
    order = 0
    for replica in range(1, MAX_ARRAYS):
        order = (replica, order)
    arithmetic = arranged(Recipe(SUM, "fast", None, order), "bfloat16", "bfloat16").arithmetic
    read = sorted(step >> 16 for step in arithmetic.program if step & 255 in (START, WITH_INPUT))
    assert read == list(range(MAX_ARRAYS))


def test_order_counts_for_rounded_sums_only():
    for dtype, precision in (("int32", "fast"), ("float32", "accurate")):
        arrangement = arranged(Recipe(SUM, precision, None, ((0, 1), (2, 3))), dtype, dtype)
        assert (arrangement.positions, arrangement.arithmetic.program) == (None, ())


def test_fast_means_divide_by_what_the_dtype_makes_of_the_divisor():
    fast = arranged(Recipe(SUM, "fast", 257), "bfloat16", "bfloat16").arithmetic
    accurate = arranged(Recipe(SUM, "accurate", 257), "bfloat16", "bfloat16").arithmetic
    assert (fast.divisor, accurate.divisor) == (256, 257)


def test_complex_numbers_are_two_of_their_parts():
    assert {dtype for dtype in ITEM_BYTES if parts_in(dtype) == 2} == set(COMPLEXES)
    assert {family(SUM, "fast", dtype) for dtype in INTEGERS} == {"wrapping"}
