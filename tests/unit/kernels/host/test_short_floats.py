"""Floats of 8 bits in compiled kernels: every pair of them, with the bits of the reference."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from crossdevice.kernels.host.fused_pass import fused_pass, select_kernels
from crossdevice.kernels.host.reference.numpy_pass import numpy_pass
from crossdevice.values.recipe import Recipe
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import weights_for

RECIPES = {
    "sum": Recipe(ReduceOp.SUM, "accurate"),
    "mean": Recipe(ReduceOp.SUM, "accurate", 3),
    "weighted mean": Recipe(ReduceOp.SUM, "accurate", weights=weights_for((3.0, 0.7), ReduceOp.MEAN)),
    "weighted sum": Recipe(ReduceOp.SUM, "accurate", weights=weights_for((1e-3, -40.0), ReduceOp.SUM)),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_all_pairs_have_the_bits_of_the_reference(name, recipe, monkeypatch):
    dtype = np.dtype(getattr(ml_dtypes, name))
    values = np.arange(256, dtype=np.uint8).view(dtype)
    inputs = [np.repeat(values, 256), np.tile(values, 256)]
    right, found = np.empty_like(inputs[0]), np.empty_like(inputs[0])
    numpy_pass(inputs, [right], recipe)
    select_kernels("numba")
    try:
        monkeypatch.setattr("crossdevice.kernels.host.fused_pass.numpy_pass", None)
        fused_pass(inputs, [found], recipe)
    finally:
        select_kernels(None)
    np.testing.assert_array_equal(found.view(np.uint8), right.view(np.uint8))
