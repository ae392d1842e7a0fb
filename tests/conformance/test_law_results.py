"""Every algorithm gives the right numbers, in the right containers, and leaves everything else alone."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

import crossdevice as cd
from conformance.oracle import NUMPY_DTYPES, result_dtype, rounded
from conformance.rows import (
    ALGORITHM_ROWS,
    BACKEND_ROWS,
    COUNTS,
    OPS,
    each_algorithm,
    each_backend,
    each_option,
    is_defined,
    plain_arrays,
    plain_result,
    same_numbers,
)
from crossdevice.backends.registry import BACKENDS
from crossdevice.errors import ReduceOpError

TABLE_OPTIONS = [
    options for options in each_option() if (options.precision, options.lowering) != ("exact", "off")
]
"""Exact sums step by step have a law of their own; there they are also harder."""


ORDER_OPTIONS = list(each_option(("accurate",)))
"""Minima and maxima are not rounded: precision means nothing to them."""


def test_every_public_algorithm_has_a_row():
    public = {thing for thing in map(cd.__dict__.get, cd.__all__) if isinstance(thing, type)}
    algorithms = {thing for thing in public if issubclass(thing, cd.CrossDeviceOps)} - {cd.CrossDeviceOps}
    assert algorithms <= {type(row.make()) for row in ALGORITHM_ROWS}


def test_every_backend_has_a_row():
    on_gpus_only = {"cupy"}  # see tests/gpu
    assert set(BACKENDS) - on_gpus_only == {row.name for row in BACKEND_ROWS}


SAMPLED_LENGTHS = [
    *[(10, 9), (10, 20), (6, 20), (4, 2, 11), (10, 4, 4), (5, 9, 2), (8, 9, 5), (3, 3, 6, 7)],
    *[(3, 9, 2), (2, 2, 13), (10, 2, 5), (8, 2, 5), (8, 20), (8, 4, 4)],
]


@pytest.mark.parametrize("lengths", SAMPLED_LENGTHS)
def test_samples_meet_every_entry_of_every_column(lengths):
    (sampled,) = (row for row in BACKEND_ROWS if row.name == "jax")
    columns = zip(*sampled.product(*map(range, lengths)), strict=True)
    for column, length in zip(columns, lengths, strict=True):
        assert length > 10 or len(set(column)) == length


def test_the_oracle_rounds_as_numpy_does_where_numpy_rounds_once():
    chosen = np.random.default_rng(0)
    for dtype in ("float16", "float32"):
        exponents = chosen.integers(-30, 20, 500) if dtype == "float16" else chosen.integers(-155, 130, 500)
        numbers = np.ldexp(chosen.uniform(-1, 1, 500), exponents)
        with np.errstate(over="ignore", under="ignore"):
            right = numbers.astype(dtype)
        found = np.array([rounded(Fraction(number), dtype) for number in numbers.tolist()], dtype)
        assert same_numbers(found, right)


def check_all_reduce(ops, backend, value, op, options, right):
    """One all-reduce: numbers, bits, container, devices, memory, inputs."""
    before = [backend.bits(array) for array in value.values]
    result = ops.reduce(op, value, value, options)
    if len(value.values) == 1:
        components = (result,)
    else:
        assert type(result) is cd.Mirrored
        assert result.devices == value.devices
        components = result.values
    found = [backend.memory(array) for array in components]
    assert all(type(array) is backend.array_type for array in components)
    # Zero parts of a complex product have the sign that the order of its terms gives them.
    is_unsigned = right.dtype.kind == "c" and op == "PROD"
    if not (np.array_equal(found[0], right) if is_unsigned else same_numbers(found[0], right)):
        pytest.fail(f"{op} {options}: {found[0]!r} is not {right!r}, from {value}")
    assert len({backend.bits(array) for array in components}) == 1, "destinations hold different bits"
    assert [backend.bits(array) for array in value.values] == before, "an input was changed"
    assert backend.is_immutable or all(array.flags.writeable for array in found)
    assert backend.keeps_apart(components, value.values)


@each_backend("results")
@each_algorithm("results")
@pytest.mark.parametrize("op", OPS)
def test_results_equal_the_oracle(row, backend, op):
    ops = row.make()
    for dtype, count in backend.product(backend.dtypes, COUNTS):
        value = backend.per_replica(plain_arrays(dtype, count, op))
        for options in ORDER_OPTIONS if op in ("MIN", "MAX") else TABLE_OPTIONS:
            if is_defined(op, dtype):
                right = plain_result(dtype, count, op, options.precision)
                assert right.dtype == NUMPY_DTYPES[result_dtype(dtype, op)]
                check_all_reduce(ops, backend, value, op, options, right)
            else:
                with pytest.raises(ReduceOpError, match=f"{op} is not defined for {dtype}"):
                    ops.reduce(op, value, value, options)
