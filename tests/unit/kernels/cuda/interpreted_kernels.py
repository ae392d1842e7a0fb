"""The kernels in Triton's interpreter: the bits of the host's reference, whatever the dtype and the order.

Collected only by test_triton_kernels.py, in a process in which TRITON_INTERPRET is set.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from crossdevice.kernels.cuda.families import (
    BLOCK_BYTES,
    MAX_ARRAYS,
    MAX_PARTS,
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


def check(recipe, dtype, into, count, size, offset=0):
    """One pass to two outputs; False if there is no kernel."""
    arrangement = arranged(recipe, dtype, into)
    if not isinstance(arrangement, Arrangement):
        return False
    random = np.random.default_rng(count + size)
    inputs = [misaligned(adversarial(random, dtype_named(dtype), size), offset) for _ in range(count)]
    outputs = [misaligned(np.zeros(size, dtype_named(into)), offset) for _ in range(2)]
    expected = np.empty(size, dtype_named(into))
    numpy_pass(inputs, [expected], recipe)
    read = [inputs[position] for position in arrangement.positions or range(count)]
    num_elements = size * parts_in(dtype)
    num_programs = -(-num_elements // block_elements(arrangement.arithmetic))
    num_numbers = count + len(bits_of_weights(recipe))
    launch = launch_by_arguments(arrangement.arithmetic, num_numbers, 2, num_programs)
    launch([*addresses(read), *bits_of_weights(recipe), *addresses(outputs), num_elements])(0)
    for output in outputs:
        assert same_bits(output, expected, any_nan=recipe.precision == "fast"), (recipe, into, count)
    return True


def test_kernels_are_interpreted():
    assert is_interpreted


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES.keys() - {"bool", *SHORT_FLOATS}))
@pytest.mark.parametrize("precision", ["fast", "accurate", "exact"])
def test_kernels_have_the_bits_of_the_host(dtype, precision):
    lacking = set()
    for count in (1, 3, 7):
        for recipe, into in recipes(dtype, count, precision):
            if not check(recipe, dtype, into, count, size=300):
                lacking.add((recipe.op.name, recipe.divisor is not None))
    sums = {("SUM", False), ("SUM", True)} if dtype in ("float64", "complex128") else set()
    if dtype in COMPLEXES or "float" in dtype:
        products = {("PROD", False)} if dtype in COMPLEXES or precision == "exact" else set()
        assert lacking == (sums | products if precision == "exact" else products)
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_exact_sums_that_cancel_and_means_near_ties_are_rounded_once(dtype):
    random = np.random.default_rng(3)
    counts = [(2, None), (5, None), (MAX_PARTS, None), (MAX_PARTS + 1, 7), (MAX_ARRAYS, None)]
    for count, divisor in (*counts, (5, 3), (9, 9), (2, 1 << 20)):
        arrays = [adversarial(random, dtype_named(dtype), 2000) for _ in range(count)]
        arrays[-1][:900] = -arrays[0][:900]  # so that what is small counts
        near_ties(arrays, divisor or 1)
        recipe = Recipe(ReduceOp.SUM, "exact", divisor)
        expected, found = np.empty_like(arrays[0]), np.empty_like(arrays[0])
        numpy_pass(arrays, [expected], recipe)
        arithmetic = arranged(recipe, dtype, dtype).arithmetic
        launch = launch_by_arguments(arithmetic, count, 1, -(-2000 // block_elements(arithmetic)))
        launch([*addresses(arrays), *addresses([found]), 2000])(0)
        assert same_bits(found, expected), (count, divisor)


def near_ties(arrays, divisor):
    """Makes means of some elements lie at, or hardly beside, the middle of two numbers of their dtype."""
    dtype = arrays[0].dtype
    bits = {"float16": 11, "bfloat16": 8, "float32": 24}[dtype.name]
    places = np.arange(1000, 1900)
    for array in arrays[1:]:
        array[places] = 0
    arrays[0][places] = divisor * (2.0 ** (bits - 1) + places % 64)
    arrays[1][places] = divisor * 0.5 * (-1.0) ** places
    if len(arrays) > 2:
        smallest = 2.0 ** {"float16": -24, "bfloat16": -133, "float32": -149}[dtype.name]
        arrays[2][places] = smallest * (places % 3 - 1)


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
