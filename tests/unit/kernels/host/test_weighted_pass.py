"""Weighted passes: the compiled kernels have the bits of the reference, for any bits and any weights."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.kernels.host.fused_pass import fused_batch, fused_pass, select_kernels
from crossdevice.kernels.host.llvm import numba_pass
from crossdevice.kernels.host.reference.numpy_pass import numpy_pass
from crossdevice.values.recipe import Recipe
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import weights_for
from unit.kernels.host.adversarial import adversarial, dtype_named, same_bits

WEIGHTS = (
    (1.0, 1.0, 1.0, 1.0, 1.0),
    (3.0, 0.0, 80.0, 1.0, 12.0),
    (0.1, 0.2, 0.3, 0.15, 0.25),
    (1e-60, 1e60, 1.0, 1e-3, 1e7),
)
SIGNED = (*WEIGHTS, (-0.1, 0.5, -3e15, 1e-20, 1.0))


def weighted(op, factors, precision):
    return Recipe(ReduceOp.SUM, precision, weights=weights_for(factors, op))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("precision", ["accurate", "exact"])
def test_compiled_kernels_have_the_bits_of_the_reference(dtype, precision):
    chosen = np.random.default_rng(3)
    inputs = [adversarial(chosen, dtype_named(dtype), 700) for _ in range(5)]
    found, expected = np.empty_like(inputs[0]), np.empty_like(inputs[0])
    for op, factors in [
        *itertools.product([ReduceOp.SUM], SIGNED),
        *itertools.product([ReduceOp.MEAN], WEIGHTS),
    ]:
        recipe = weighted(op, factors, precision)
        fused_pass(inputs, [found], recipe)
        numpy_pass(inputs, [expected], recipe)
        assert same_bits(found, expected), (op, factors)


@pytest.mark.parametrize("kernels", ["numba", "numpy"])
@pytest.mark.parametrize("dtype", ["float64", "complex128", "int32"])
def test_accurate_means_of_64_bits_are_rounded_once(dtype, kernels, kernels_restored):
    """Neither the sum of the weights nor the products are rounded on the way."""
    select_kernels(kernels)
    chosen = np.random.default_rng(7)
    for _ in range(50):
        factors = tuple(chosen.random(3).tolist())
        columns = (chosen.standard_normal((3, 20)) * 1000).astype(dtype)
        found = np.empty(20, "complex128" if dtype == "complex128" else "float64")
        recipe = weighted(ReduceOp.MEAN, factors, "accurate")
        fused_pass(list(columns), [found], recipe)
        assert found.real.tolist() == [_mean(column, factors) for column in columns.real.T]
        assert found.imag.tolist() == [_mean(column, factors) for column in columns.imag.T]
        fused_pass([columns[0]] * 3, [found], recipe)
        assert found.tolist() == columns[0].tolist()


def _mean(column, factors):
    total = sum(
        Fraction(float(number)) * Fraction(factor) for number, factor in zip(column, factors, strict=True)
    )
    return float(total / sum(map(Fraction, factors)))


@pytest.fixture
def kernels_restored():
    yield
    select_kernels(None)


def test_weights_of_others_may_be_finer_than_those_of_one():
    """Sparse rows are weighted one replica at a time, and divided by the weights of all."""
    for dtype, values in (("float64", [1e-300, 0.0]), ("float32", [np.nan, np.inf]), ("float32", [1.0, 3.0])):
        rows = [cd.IndexedSlices(np.array([value], dtype), np.array([0]), (4,)) for value in values]
        options = cd.CommunicationOptions(precision="exact")
        found = cd.reduce(rows, "mean", weights=[1.0, 0.3], options=options).values
        divisor = Fraction(1) + Fraction(0.3)
        expected = [
            value if not np.isfinite(value) else float(Fraction(value) * Fraction(weight) / divisor)
            for value, weight in zip(values, [1.0, 0.3], strict=True)
        ]
        assert same_bits(found, np.array(expected, dtype))


def test_one_kernel_serves_all_weights():
    inputs = [np.ones(10, np.float32)] * 3
    output = np.empty(10, np.float32)
    fused_pass(inputs, [output], weighted(ReduceOp.MEAN, (1.0, 2.0, 3.0), "accurate"))
    before = numba_pass.compiled_kernel.cache_info().currsize
    for factors in ((3.0, 2.0, 1.0), (0.5, 0.25, 0.0)):
        for op in (ReduceOp.SUM, ReduceOp.MEAN):
            fused_pass(inputs, [output], weighted(op, factors, "accurate"))
    assert numba_pass.compiled_kernel.cache_info().currsize == before


def test_large_and_many_arrays_are_shared_by_threads():
    chosen = np.random.default_rng(4)
    for precision in ("accurate", "exact"):
        recipe = weighted(ReduceOp.MEAN, (0.1, 2.0, 3.0), precision)
        tasks = []
        for size in (3, 1 << 20, 70_001):
            inputs = [chosen.standard_normal(size).astype(np.float32) for _ in range(3)]
            tasks.append((inputs, [np.empty(size, np.float32) for _ in range(2)]))
        fused_batch(tasks, recipe)
        for inputs, outputs in tasks:
            expected = np.empty_like(outputs[0])
            numpy_pass(inputs, [expected], recipe)
            assert all(same_bits(output, expected) for output in outputs)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_exact_sums_fall_to_the_right_side_of_the_middle_of_two_results(dtype):
    step = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}[dtype]
    lower = 1 + step * np.random.default_rng(5).integers(0, round(0.9 / step), 500)
    # It says on which side of the middle the sum is, and float64 loses it, next to what is taken away again.
    tiny = np.resize([0.0, 2.0**-14, -(2.0**-14)], lower.size)
    columns = (lower, lower + step, np.ones(lower.size), tiny, np.ones(lower.size))
    inputs = [values.astype(dtype_named(dtype)) for values in columns]
    factors = (0.5, 0.5, 2.0**-60, 2.0**-130, -(2.0**-60))
    found = np.empty_like(inputs[0])
    fused_pass(inputs, [found], weighted(ReduceOp.SUM, factors, "exact"))
    is_even = np.round(lower / step) % 2 == 0
    goes_up = np.where(tiny == 0, ~is_even, tiny > 0)
    assert same_bits(found, np.where(goes_up, inputs[1], inputs[0]))
