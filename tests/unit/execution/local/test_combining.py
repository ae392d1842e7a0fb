"""The array functions used off the host give the host pass's bits, shown on host arrays of both libraries."""

import itertools

import numpy as np
import pytest

from conformance import array_libraries
from crossdevice import ReduceOp
from crossdevice.backends.protocol import dtype_named
from crossdevice.backends.registry import backend_named
from crossdevice.execution.local.combining import combine_with_array_functions
from crossdevice.kernels.host.reference.numpy_pass import numpy_pass
from crossdevice.values.device import host_device
from crossdevice.values.dtypes import COMPLEXES, result_dtype
from crossdevice.values.recipe import Recipe

DTYPES = (
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "int8",
    "int32",
    "int64",
    "uint8",
    "complex64",
    "complex128",
)
PREPARE = {"jax": array_libraries.jax_devices, "tensorflow": array_libraries.tensorflow_devices}
OPERATIONS = tuple(itertools.product(ReduceOp, ("fast", "accurate", "exact")))


def arrays_of(dtype, count):
    generator = np.random.default_rng(count)
    wide = generator.normal(size=(count, 200)) * 2.0 ** generator.integers(-12, 12, size=(count, 200))
    if dtype.startswith(("int", "uint")):
        return [row.astype(np.int64).astype(dtype) for row in wide * 50]
    wide[0, :4] = np.inf, np.nan, -0.0, 0.0
    wide[-1, :4] = 1.0, 1.0, -0.0, -0.0
    with np.errstate(all="ignore"):
        return [row.astype(np.float32).astype(dtype_named(dtype)) for row in wide]


def bits(array):
    return (
        array.view(f"u{array.dtype.itemsize}")
        if array.dtype.kind in "iuf" or array.dtype.itemsize == 2
        else array
    )


@pytest.mark.parametrize(
    "library",
    [
        *("numpy", "torch", "array_api_strict"),
        *(pytest.param(library, marks=pytest.mark.more(library)) for library in PREPARE),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_array_functions_give_the_bits_of_the_host_pass(library, dtype):
    if (library, dtype) == ("numpy", "bfloat16"):
        pytest.skip("NumPy's own functions are never used for bfloat16: its arrays are always on the host")
    if library == "array_api_strict" and dtype.endswith("float16"):
        pytest.skip("the standard has no 16-bit floats")
    pytest.importorskip(library)
    if library in PREPARE:
        PREPARE[library]()
    backend = backend_named(library)
    for (op, precision), count in itertools.product(OPERATIONS, (1, 2, 3, 7)):
        if dtype in COMPLEXES and op not in (ReduceOp.SUM, ReduceOp.MEAN):
            continue
        is_mean = op is ReduceOp.MEAN
        recipe = Recipe(ReduceOp.SUM if is_mean else op, precision, count if is_mean else None)
        inputs = arrays_of(dtype, count)
        into = result_dtype(dtype, op)
        expected = np.empty(200, dtype_named(into))
        numpy_pass(inputs, [expected], recipe)
        given = [backend.from_host(array.copy(), array.shape, host_device(0)) for array in inputs]
        with np.errstate(all="ignore"):
            combined = combine_with_array_functions(backend, given, recipe, into, host_device(0))
        found = backend.host_view(combined)
        assert found.dtype == expected.dtype
        same = (bits(found) == bits(expected)) | (np.isnan(found) & np.isnan(expected))
        if op in (ReduceOp.MIN, ReduceOp.MAX):  # which zero wins is the library's choice
            same |= (found == 0) & (expected == 0)
        assert same.all(), (op, precision, count, found[~same][:3], expected[~same][:3])
        for array, original in zip(given, inputs, strict=True):
            assert (bits(backend.host_view(array)) == bits(original)).all() or np.isnan(original).any()
