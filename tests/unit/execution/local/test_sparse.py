"""Sparse rows beside dense arrays: rounded once where that was asked for, and read anew by bound calls."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

import crossdevice as cd
from conformance.oracle import rounded
from crossdevice.errors import ConversionError
from crossdevice.testing import run_ranks

EXACT = cd.CommunicationOptions(precision="exact")


def rows(dtype, values, indices, num_rows=1):
    values = np.array(values, dtype).reshape(len(indices), -1)
    return cd.IndexedSlices(values, np.array(indices), (num_rows, values.shape[1]))


def test_repeated_rows_beside_dense_arrays_are_rounded_once():
    dense = [np.array([[number]], "float16") for number in (0.0, -65504.0)]
    repeated = rows("float16", [65504, 65504], [0, 0])
    assert cd.reduce([repeated, *dense], options=EXACT).tolist() == [[65504]]
    assert cd.reduce([repeated, dense[0]], "mean", options=EXACT).tolist() == [[65504]]
    assert cd.reduce([repeated, dense[0]], "mean", weights=[1, 3], options=EXACT).tolist() == [[32752]]
    out = dense[0]  # in place
    assert cd.reduce([repeated, dense[0], dense[1]], options=EXACT, out=out) is out
    assert out.tolist() == [[65504]]


@pytest.mark.parametrize("weights", [None, [0.1, 3.0, 0.7, 2.0]])
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_random_rows_beside_dense_arrays_have_their_true_sums(dtype, op, weights):
    random = np.random.default_rng(5)

    def numbers(*shape):
        return random.standard_normal(shape) * 10.0 ** random.integers(-3, 3, shape)

    indices = [random.integers(0, 6, length) for length in (9, 0, 14)]
    values = [
        rows(dtype, numbers(len(each), 3).reshape(-1, 3), each, 6)
        if len(each)
        else cd.IndexedSlices(np.zeros((0, 3), dtype), each, (6, 3))
        for each in indices
    ]
    values.insert(1, numbers(6, 3).astype(dtype))
    factors = weights or [1] * 4
    total = np.full((6, 3), Fraction(0), object)
    for value, factor in zip(values, factors, strict=True):
        if isinstance(value, np.ndarray):
            total += np.vectorize(Fraction, otypes=[object])(value.astype(float)) * Fraction(factor)
        else:
            for row, number in zip(value.values.astype(float), value.indices, strict=True):
                total[number] += np.vectorize(Fraction, otypes=[object])(row) * Fraction(factor)
    divisor = 1 if op == "sum" else sum(map(Fraction, factors))
    expected = [[float(rounded(each / divisor, dtype)) for each in line] for line in total]
    for lowering in ("auto", "off"):
        options = cd.CommunicationOptions(precision="exact", lowering=lowering)
        found = cd.reduce(values, op, options=options, weights=weights)
        assert found.dtype == dtype
        assert found.astype(float).tolist() == expected


def test_a_function_that_takes_the_place_of_the_sum_is_given_dense_arrays():
    values = cd.PerReplica([rows("float32", [1, 2], [0, 0]), np.float32([[4]])])
    ops = cd.ReductionToOneDevice(accumulation_fn=lambda arrays: arrays[0] * arrays[1])
    assert ops.reduce("sum", values, "cpu:0", EXACT).tolist() == [[12]]


@pytest.mark.parametrize("precision", ["accurate", "exact"])
def test_bound_reductions_read_rows_anew(precision):
    sparse, dense = rows("float32", [1, 2], [0, 0]), np.float32([[4]])
    bound = cd.bind([sparse, dense], options=cd.CommunicationOptions(precision=precision))
    assert [each.tolist() for each in bound()] == [[[7]]] * 2
    sparse.values[:] = 10
    assert [each.tolist() for each in bound()] == [[[24]]] * 2


def test_between_processes_repeated_rows_beside_dense_arrays_are_refused():
    def reduce(group):
        values = cd.PerReplica([rows("float32", [1, 2], [0, 0]), np.float32([[4]])])
        with pytest.raises(ConversionError, match="add repeated rows up first, or use precision accurate"):
            cd.CollectiveAllReduce(group=group).reduce("sum", values, "cpu:0", EXACT)
        return cd.CollectiveAllReduce(group=group).reduce("sum", values, "cpu:0").tolist()

    assert run_ranks(2, reduce) == [[[14]]] * 2
