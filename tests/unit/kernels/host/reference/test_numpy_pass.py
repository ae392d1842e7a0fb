"""The reference itself: one rounding, whatever the length of the array and the number of inputs."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from crossdevice.backends.registry import backend_named
from crossdevice.execution.local.combining import combine_with_array_functions
from crossdevice.kernels.host.fused_pass import fused_pass
from crossdevice.kernels.host.reference.numpy_pass import numpy_pass
from crossdevice.values.device import host_device
from crossdevice.values.recipe import Recipe
from crossdevice.values.reduce_op import ReduceOp
from unit.kernels.host.adversarial import same_bits

SUM, PROD = ReduceOp.SUM, ReduceOp.PROD
LARGEST = np.finfo(np.float64).max


def results(inputs, recipe, dtype):
    """From the reference, the compiled kernels and array functions, which must be the same."""
    first, second = np.empty(inputs[0].size, dtype), np.empty(inputs[0].size, dtype)
    numpy_pass(inputs, [first], recipe)
    fused_pass(inputs, [second], recipe)
    with np.errstate(all="ignore"):
        third = combine_with_array_functions(backend_named("numpy"), inputs, recipe, dtype, host_device(0))
    assert first.tobytes() == second.tobytes()
    assert same_bits(first, third, any_nan=True)
    return first


@pytest.mark.parametrize("scale", [0, -1060, 1005])
@pytest.mark.parametrize("number", [3, 5, 7, 12])
def test_means_of_float64_are_rounded_once(number, scale):
    random = np.random.default_rng(number)
    inputs = [random.standard_normal(500) * 2.0 ** random.integers(-9, 9, 500) for _ in range(number)]
    inputs = [array * 2.0**scale for array in inputs]
    found = results(inputs, Recipe(SUM, "accurate", number), "float64")
    columns = zip(*(array.tolist() for array in inputs), strict=True)
    assert found.tolist() == [float(sum(map(Fraction, column)) / number) for column in columns]


def test_means_of_special_numbers_keep_what_they_are():
    inputs = [np.array([-0.0, np.inf, np.inf, LARGEST, 5e-324]), np.array([-0.0, 1.0, -np.inf, LARGEST, 0.0])]
    found = results([*inputs, inputs[0]], Recipe(SUM, "accurate", 3), "float64")
    assert repr(found.tolist()) == "[-0.0, inf, nan, inf, 5e-324]"


@pytest.mark.parametrize(("dtype", "value"), [("int16", 32767), ("int16", -32767), ("uint16", 65535)])
def test_means_of_16_bit_integers_are_rounded_once_beyond_24_bits(dtype, value):
    number = 1001
    column = [value - k % 3 * (1 if value > 0 else -1) for k in range(number)]
    found = results([np.array([item], dtype) for item in column], Recipe(SUM, "accurate", number), "float32")
    assert found[0] == np.float32(float(Fraction(sum(column), number)))


def test_a_sum_next_to_the_largest_number_stays_finite():
    column = [LARGEST, -LARGEST / 2**55, LARGEST / 2**60]
    for recipe in (Recipe(SUM, "accurate"), Recipe(SUM, "accurate", 3)):
        assert np.isfinite(results([np.array([item]) for item in column], recipe, "float64")).all()


@pytest.mark.parametrize("precision", ["fast", "accurate"])
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_products_of_complex_numbers_do_not_depend_on_the_length(dtype, precision):
    random = np.random.default_rng(2)
    inputs = [random.standard_normal(2 * 40).view(np.complex128).astype(dtype) for _ in range(3)]
    recipe, whole = Recipe(PROD, precision), np.empty(40, dtype)
    numpy_pass(inputs, [whole], recipe)
    for length in (1, 2, 3, 7, 16):
        part = np.empty(length, dtype)
        numpy_pass([array[:length] for array in inputs], [part], recipe)
        assert part.tobytes() == whole[:length].tobytes()
