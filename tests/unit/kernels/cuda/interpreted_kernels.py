"""The kernels in Triton's interpreter: the bits of the host's reference, whatever the dtype and the order.

Collected only by test_triton_kernels.py, in a process in which TRITON_INTERPRET is set.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from crossdevice.kernels.cuda.families import (
    BLOCK_BYTES,
    MAX_ARRAYS,
    Arrangement,
    arranged,
    block_elements,
    parts_in,
)
from crossdevice.kernels.cuda.triton_launching import is_interpreted, launch_by_arguments, launch_by_table
from crossdevice.kernels.host.reference.numpy_pass import numpy_pass
from crossdevice.values.dtypes import COMPLEXES, ITEM_BYTES, SHORT_FLOATS, result_dtype
from crossdevice.values.recipe import Recipe
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import weights_for
from unit.kernels.host.adversarial import adversarial, dtype_named, misaligned, same_bits

# The interpreter computes in NumPy, which has something to say about infinities.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TREES = (((0, 1), (2, (3, 4)), (5, 6)), (6, (5, (4, (3, (2, (1, 0)))))), ((0, 1, 2), 3, (4, 5), 6))
CHAINS = (None, (6, 2, 1, 0, 3, 4, 5))


def recipes(dtype, count, precision):
    """Every operation, with the dtype of its result."""
    for op in (op for op in ReduceOp if not op.is_order_statistic):
        if dtype in COMPLEXES and op in (ReduceOp.MIN, ReduceOp.MAX):
            continue
        recipe = Recipe(ReduceOp.SUM, precision, count) if op is ReduceOp.MEAN else Recipe(op, precision)
        orders = (*CHAINS, *TREES) if precision == "fast" and count == 7 else (None,)
        for order in orders:
            yield recipe._replace(order=order), result_dtype(dtype, op)


def addresses(arrays):
    return tuple(array.ctypes.data for array in arrays)


def bits_of_weights(recipe):
    weights = recipe.weights
    return (
        ()
        if weights is None
        else tuple(np.array([*weights.factors, weights.divisor, weights.rest]).view(np.int64).tolist())
    )


def run_kernel(recipe, dtype, inputs, outputs):
    """Combines arrays into all outputs; kernels without a limit of arrays are launched by a table."""
    arithmetic, positions = arranged(recipe, dtype, outputs[0].dtype.name)
    places = [
        *addresses([inputs[position] for position in positions or range(len(inputs))]),
        *bits_of_weights(recipe),
        *addresses(outputs),
    ]
    num_numbers, num_outputs = len(places) - len(outputs), len(outputs)
    num_elements = outputs[0].size * parts_in(dtype)
    num_programs = -(-num_elements // block_elements(arithmetic))
    if arithmetic.max_arrays is None:
        table = np.array(places)
        rows = np.array([(0, block, num_elements) for block in range(num_programs)])
        launch = launch_by_table(arithmetic, num_numbers, num_outputs, num_programs)
        launch((table.ctypes.data, rows.ctypes.data))(0)
    else:
        launch = launch_by_arguments(arithmetic, num_numbers, num_outputs, num_programs)
        launch([*places, num_elements])(0)


def check(recipe, dtype, into, count, size, offset=0):
    """One pass to two outputs; False if there is no kernel."""
    if not isinstance(arranged(recipe, dtype, into), Arrangement):
        return False
    random = np.random.default_rng(count + size)
    inputs = [misaligned(adversarial(random, dtype_named(dtype), size), offset) for _ in range(count)]
    outputs = [misaligned(np.zeros(size, dtype_named(into)), offset) for _ in range(2)]
    expected = np.empty(size, dtype_named(into))
    numpy_pass(inputs, [expected], recipe)
    run_kernel(recipe, dtype, inputs, outputs)
    for output in outputs:
        assert same_bits(output, expected, any_nan=recipe.precision == "fast"), (recipe, into, count)
    return True


def test_kernels_are_interpreted():
    assert is_interpreted


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES.keys() - {"bool", *SHORT_FLOATS}))
@pytest.mark.parametrize("precision", ["fast", "accurate", "exact"])
def test_kernels_have_the_bits_of_the_host(dtype, precision):
    lacking = set()
    size = 100 if precision == "exact" else 300  # float64 of any bits is added up as integers: slow here
    for count in (1, 3, 7):
        for recipe, into in recipes(dtype, count, precision):
            if not check(recipe, dtype, into, count, size):
                lacking.add((recipe.op.name, recipe.divisor is not None))
    if dtype in COMPLEXES or "float" in dtype:
        assert lacking == ({("PROD", False)} if dtype in COMPLEXES or precision == "exact" else set())
    else:
        is_mean_of_64_bits = dtype.endswith("64") and precision != "fast"
        assert lacking == ({("SUM", True)} if is_mean_of_64_bits else set())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "complex128"])
def test_whole_blocks_tails_and_odd_addresses_are_right(dtype):
    recipe, into = Recipe(ReduceOp.SUM, "accurate", 2), result_dtype(dtype, ReduceOp.MEAN)
    block = BLOCK_BYTES // ITEM_BYTES[dtype]
    for size in (1, block - 1, block, 2 * block + 3):
        for offset in (0, ITEM_BYTES[dtype]):
            assert check(recipe, dtype, into, 2, size, offset)


def test_divisors_are_those_of_the_result():
    for dtype in ("float16", "bfloat16", "float32", "int16"):
        for precision in ("fast", "accurate", "exact"):
            for divisor in (3, 4, 257, 70_001):
                recipe = Recipe(ReduceOp.SUM, precision, divisor)
                assert check(recipe, dtype, result_dtype(dtype, ReduceOp.MEAN), 2, size=300)


FORMATS_OF_FLOATS = {
    "float16": (11, -24),
    "bfloat16": (8, -133),
    "float32": (24, -149),
    "float64": (53, -1074),
}


@pytest.mark.parametrize("dtype", FORMATS_OF_FLOATS)
def test_exact_sums_that_cancel_and_means_near_ties_are_rounded_once(dtype):
    random = np.random.default_rng(3)
    for count, divisor in ((2, None), (5, 3), (9, 9), (2, 1 << 20), (1, 1 << 31)):
        arrays = [adversarial(random, dtype_named(dtype), 256) for _ in range(count)]
        arrays[-1][:90] = -arrays[0][:90]  # so that what is small counts
        near_ties(arrays, divisor or 1)
        recipe = Recipe(ReduceOp.SUM, "exact", divisor)
        expected, found = np.empty_like(arrays[0]), np.empty_like(arrays[0])
        numpy_pass(arrays, [expected], recipe)
        run_kernel(recipe, dtype, arrays, [found])
        assert same_bits(found, expected), (count, divisor)


def near_ties(arrays, divisor):
    """Makes means of some elements lie at, or hardly beside, the middle of two numbers of their dtype."""
    bits, smallest = FORMATS_OF_FLOATS[arrays[0].dtype.name]
    places = np.arange(100, 250)
    for array in arrays[1:]:
        array[places] = 0
    arrays[0][places] = divisor * (2.0 ** (bits - 1) + places % 64)
    if len(arrays) > 1:
        arrays[1][places] = divisor * 0.5 * (-1.0) ** places
    if len(arrays) > 2:
        arrays[2][places] = 2.0**smallest * (places % 3 - 1)


@pytest.mark.parametrize("dtype", FORMATS_OF_FLOATS)
def test_exact_sums_of_any_number_of_arrays_go_to_any_number_in_one_launch(dtype):
    random = np.random.default_rng(4)
    for count, divisor in ((MAX_ARRAYS + 1, None), (MAX_ARRAYS + 1, MAX_ARRAYS + 1)):
        kind = dtype_named(dtype)
        arrays = [random.standard_normal(20).astype(kind) for _ in range(count)]
        arrays[7][:4] = [np.inf, -np.inf, np.nan, -0.0]
        for array in arrays:
            array[3] = -0.0
        if dtype != "float16":
            arrays[-2][4:9] = 1e30
            arrays[-1][4:9] = -arrays[-2][4:9]  # whose rest has fewer bits than the errors of additions
        recipe = Recipe(ReduceOp.SUM, "exact", divisor)
        expected = np.empty_like(arrays[0])
        numpy_pass(arrays, [expected], recipe)
        run_kernel(recipe, dtype, arrays, arrays)  # in place
        assert all(same_bits(array, expected) for array in arrays)


def test_exact_float64_is_what_fractions_round_to():
    """Columns that no enclosure decides: the kernel adds them up as integers."""
    smallest, largest = 2.0**-1074, np.finfo(np.float64).max
    columns = [
        (2.0**1023, 2.0**1023, -(2.0**1023), -smallest),
        (largest, largest, -largest, -largest),
        (largest, 2.0**969, 2.0**-1000, smallest),
        (largest, 2.0**970, -smallest, 0.0),
        (2.0**53, 1.0, smallest, 0.0),
        (-(2.0**53), -1.0, -(2.0**-600), 2.0**-600 - 2.0**-653),
        (1e300, 1.0, -1e300, 2.0**-200),
        (1e300, 2.0**-1022, -1e300, -smallest),
        (smallest, smallest, smallest, 2.0**-1022),
        (3 * smallest, 0.0, -smallest, 0.0),
        (-smallest, 0.0, 0.0, 0.0),
        (1e16, 1.0 + 2.0**-52, -1e16, 2.0**-160),
        (1.0, 2.0**-53, 2.0**-160, -(2.0**-160)),
        (1.0, 2.0**-53, 2.0**-160, -(2.0**-161)),
        (2.0**200, 2.0**-40, -(2.0**200), 2.0**-93),
        (-0.0, -0.0, -0.0, -0.0),
        (1e300, -1e300, 1e-300, -1e-300),
    ]
    arrays = [np.array(array) for array in zip(*columns, strict=True)]
    for divisor in (None, 3, 10, 1 << 31):
        found = np.empty(len(columns))
        run_kernel(Recipe(ReduceOp.SUM, "exact", divisor), "float64", arrays, [found])
        for column, number in zip(columns, found.tolist(), strict=True):
            true = sum(map(Fraction, column), Fraction(0)) / (divisor or 1)
            try:
                right = float(true)
            except OverflowError:
                right = math.copysign(math.inf, true)
            is_negative = true < 0 or (true == 0 and all(math.copysign(1, value) < 0 for value in column))
            assert (number, math.copysign(1, number)) == (right, -1 if is_negative else 1), (column, divisor)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_weighted_kernels_have_the_bits_of_the_host(dtype):
    for op, factors in itertools.product(
        (ReduceOp.SUM, ReduceOp.MEAN), ((0.1, 0.0, 7.0), (1.0, 1.0, 1.0), (3.0,))
    ):
        recipe = Recipe(ReduceOp.SUM, "accurate", weights=weights_for(factors, op))
        assert check(recipe, dtype, dtype, len(factors), size=300)
        assert not check(recipe._replace(precision="exact"), dtype, dtype, len(factors), size=300)


def test_results_may_have_another_float_dtype():
    recipe, weights = Recipe(ReduceOp.SUM, "accurate", 3), weights_for((0.1, 2.0, 3.0), ReduceOp.MEAN)
    for dtype, into in itertools.permutations(("float16", "bfloat16", "float32"), 2):
        assert check(recipe, dtype, into, 3, size=300)
        assert check(recipe._replace(divisor=None, weights=weights), dtype, into, 3, size=300)


def test_a_table_serves_many_arrays_in_one_launch():
    random = np.random.default_rng(5)
    arithmetic = arranged(Recipe(ReduceOp.SUM, "accurate", 3), "float32", "float32").arithmetic
    sizes = (1, 1024, 3000, 7)
    inputs = [[adversarial(random, np.dtype("float32"), size) for _ in range(3)] for size in sizes]
    outputs = [[misaligned(np.zeros(size, np.float32), 4 * (size == 7)) for _ in range(2)] for size in sizes]
    table = np.array([(*addresses(i), *addresses(o)) for i, o in zip(inputs, outputs, strict=True)])
    rows = np.array(
        [(task, block, size) for task, size in enumerate(sizes) for block in range(-(-size // 1024))]
    )
    launch_by_table(arithmetic, 3, 2, len(rows))((table.ctypes.data, rows.ctypes.data))(0)
    for arrays, results in zip(inputs, outputs, strict=True):
        expected = np.empty_like(arrays[0])
        numpy_pass(arrays, [expected], Recipe(ReduceOp.SUM, "accurate", 3))
        assert all(same_bits(result, expected) for result in results)
