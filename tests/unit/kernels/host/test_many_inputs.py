"""Many inputs are read in blocks over tiles, and have the bits of those that are read all at once."""

from __future__ import annotations

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.kernels.host.fused_pass import fused_batch, fused_pass
from crossdevice.kernels.host.reference.numpy_pass import numpy_pass
from crossdevice.kernels.host.work_list import MANY_INPUTS, SCRATCH_BYTES
from crossdevice.values.recipe import Recipe
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import weights_for
from unit.kernels.host.adversarial import adversarial, dtype_named, misaligned, same_bits

SUM, PROD, MIN = ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MIN
KINDS = [
    ("float32", Recipe(SUM, "accurate", 7)),
    ("float32", Recipe(SUM, "exact", 7)),
    ("float32", Recipe(SUM, "fast")),
    ("float32", Recipe(PROD, "accurate")),
    ("bfloat16", Recipe(SUM, "accurate")),
    ("bfloat16", Recipe(SUM, "fast", 3)),
    ("float16", Recipe(SUM, "exact", 3)),
    ("float64", Recipe(SUM, "accurate", 7)),
    ("float64", Recipe(SUM, "exact")),
    ("float64", Recipe(MIN, "accurate")),
    ("int16", Recipe(SUM, "accurate", 5)),
    ("uint8", Recipe(SUM, "fast")),
    ("complex64", Recipe(SUM, "accurate")),
]


def into_of(dtype, recipe):
    return np.dtype("float32") if dtype == "int16" and recipe.divisor else dtype_named(dtype)


@pytest.mark.parametrize(("dtype", "recipe"), KINDS)
def test_blocks_of_inputs_have_the_bits_of_the_reference(dtype, recipe):
    chosen = np.random.default_rng(1)
    for count, size, offset in ((MANY_INPUTS - 1, 300, 0), (MANY_INPUTS, 300, 8), (25, 1111, 16)):
        inputs = [misaligned(adversarial(chosen, dtype_named(dtype), size), offset) for _ in range(count)]
        outputs = [misaligned(np.zeros(size, into_of(dtype, recipe)), offset) for _ in range(2)]
        expected = np.empty_like(outputs[0])
        numpy_pass(inputs, [expected], recipe)
        fused_pass(inputs, outputs, recipe)
        for output in outputs:
            assert same_bits(output, expected, any_nan=recipe.precision == "fast"), (count, size)


@pytest.mark.parametrize("precision", ["accurate", "exact"])
def test_tiles_end_anywhere_and_results_may_replace_inputs(precision):
    chosen = np.random.default_rng(2)
    recipe = Recipe(SUM, precision, 13)
    tasks = []
    for size in (SCRATCH_BYTES // 8 + 5, SCRATCH_BYTES // 3, 17):
        inputs = [chosen.standard_normal(size).astype(np.float32) for _ in range(13)]
        inputs[3][: size // 2] *= 1e20  # so that exact sums are left open, too many to be listed
        tasks.append(inputs)
    expected = [np.empty_like(inputs[0]) for inputs in tasks]
    for inputs, result in zip(tasks, expected, strict=True):
        numpy_pass(inputs, [result], recipe)
    fused_batch([(inputs, [inputs[12], inputs[0]]) for inputs in tasks], recipe)
    for inputs, result in zip(tasks, expected, strict=True):
        assert same_bits(inputs[0], result)
        assert same_bits(inputs[12], result)


def test_weights_of_many_inputs_go_with_their_inputs():
    chosen = np.random.default_rng(3)
    inputs = [chosen.standard_normal(500).astype(np.float32) for _ in range(30)]
    for precision in ("accurate", "exact"):
        weights = weights_for(tuple(chosen.uniform(0.1, 9, 30).tolist()), ReduceOp.MEAN)
        recipe = Recipe(SUM, precision, weights=weights)
        found, expected = np.empty(500, np.float32), np.empty(500, np.float32)
        fused_pass(inputs, [found], recipe)
        numpy_pass(inputs, [expected], recipe)
        assert same_bits(found, expected)


@pytest.mark.parametrize("precision", ["fast", "accurate", "exact"])
def test_a_thousand_inputs_are_reduced(precision):
    arrays = [np.full(3, k, np.float32) for k in range(1000)]
    options = cd.CommunicationOptions(precision=precision)
    assert cd.reduce(arrays, "mean", options=options).tolist() == [499.5] * 3
    weighted = cd.reduce(arrays, "sum", options=options, weights=[1, *[0] * 998, 2])
    assert weighted.tolist() == [1998.0] * 3
