"""Weighted passes: the compiled kernels have the bits of the reference, for any bits and any weights."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from crossdevice.kernels.host.fused_pass import fused_batch, fused_pass
from crossdevice.kernels.host.llvm import numba_pass
from crossdevice.kernels.host.reference.numpy_pass import numpy_pass
from crossdevice.kernels.recipe import Recipe
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
