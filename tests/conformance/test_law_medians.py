"""Medians and trimmed means: the middle of each sorted column, whatever the order of replicas."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest

import crossdevice as cd
from conformance.oracle import expected, result_dtype
from conformance.rows import (
    ALGORITHM_ROWS,
    BACKEND_ROWS,
    LOWERINGS,
    NUMPY,
    bits_of,
    plain_and_wild_arrays,
    with_gaps,
)
from crossdevice.errors import ReduceOpError
from crossdevice.kernels.host.fused_pass import fused_pass
from crossdevice.kernels.host.reference.numpy_pass import numpy_pass
from crossdevice.values.recipe import Recipe
from unit.kernels.host.adversarial import adversarial, dtype_named, same_bits

DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")
OPS = ("MEDIAN", "TRIMMED_MEAN(0)", "TRIMMED_MEAN(1)")


def arrays_of(dtype, count):
    return plain_and_wild_arrays(dtype, count, 20, 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_algorithm_takes_the_mean_of_the_middle(dtype):
    for count, op in itertools.product((3, 4), OPS):
        arrays = arrays_of(dtype, count)
        for precision in ("fast", "accurate", "exact"):
            right = NUMPY.bits(expected(op, arrays, dtype, precision))
            rows = (
                ALGORITHM_ROWS
                if (count, precision, op) == (4, "accurate", "MEDIAN")
                else ALGORITHM_ROWS[-3:-2]
            )
            for row, lowering in itertools.product(rows, LOWERINGS):
                options = cd.CommunicationOptions(precision=precision, lowering=lowering)
                order = arrays[::-1] if lowering == "off" else arrays
                found = bits_of(row.make(), op, order, options)
                assert found == right, (count, op, precision, row.name, lowering)


@pytest.mark.parametrize("backend", with_gaps(BACKEND_ROWS[:4]))
def test_every_library_has_the_same_bits(backend):
    if not backend.is_installed:
        pytest.skip(f"{backend.name} is not installed")
    arrays = arrays_of("float32", 5)
    right = NUMPY.bits(expected("MEDIAN", arrays, "float32", "accurate"))
    for lowering in LOWERINGS:
        options = cd.CommunicationOptions(lowering=lowering)
        assert bits_of(cd.TreeAllReduce(), "median", arrays, options, backend) == right


def test_compiled_sorts_have_the_bits_of_the_reference():
    chosen = np.random.default_rng(5)
    for dtype in ("float16", "bfloat16", "float32", "float64", "int16", "uint64"):
        for count, size in ((1, 50), (2, 50), (13, 40_000), (100, 1500)):
            inputs = [adversarial(chosen, dtype_named(dtype), size) for _ in range(count)]
            for op in (cd.ReduceOp.MEDIAN, cd.trimmed_mean((count - 1) // 3)):
                into = dtype_named(result_dtype(dtype, "MEAN"))
                found, right = np.empty(size, into), np.empty(size, into)
                fused_pass(inputs, [found], Recipe(op, "accurate"))
                numpy_pass(inputs, [right], Recipe(op, "accurate"))
                assert same_bits(found, right), (dtype, count, op)


def test_medians_are_those_of_numpy_and_may_replace_their_inputs():
    chosen = np.random.default_rng(6)
    arrays = [chosen.standard_normal(5000) for _ in range(7)]
    right = np.median(arrays, axis=0)
    assert cd.bind(arrays, "median", "cpu:0")().tolist() == right.tolist()
    results = cd.all_reduce(arrays, "median", out=arrays)
    assert results[3] is arrays[3]
    assert arrays[3].tolist() == right.tolist()


def test_what_has_no_ranks_is_refused():
    arrays = [np.float32([1])] * 4
    value = cd.PerReplica(arrays)
    with pytest.raises(
        ReduceOpError, match=r"TRIMMED_MEAN\(2\) leaves out .* 4 replicas; expected at least 5"
    ):
        cd.reduce(arrays, cd.trimmed_mean(2))
    with pytest.raises(ReduceOpError, match="MEDIAN is not defined for complex64"):
        cd.reduce([np.complex64([1])] * 3, "median")
    with pytest.raises(ReduceOpError, match="MEDIAN takes no weights"):
        cd.reduce(arrays, "median", weights=[1] * 4)
    with pytest.raises(ReduceOpError, match="not defined for IndexedSlices"):
        cd.reduce([cd.IndexedSlices(np.ones((1, 1)), np.array([0]), (2, 1))] * 3, "median")
    with pytest.raises(ReduceOpError, match="MEDIAN along an axis"):
        cd.MirroredStrategy([f"cpu:{k}" for k in range(4)]).reduce("median", value, axis=0)
    for k in (-1, 1.0, True):
        with pytest.raises(ReduceOpError, match="trimmed_mean takes a whole number"):
            cd.trimmed_mean(k)
    with pytest.raises(ReduceOpError, match=r"'trimmed_mean' is not .* TRIMMED_MEAN\(k\)"):
        cd.reduce(arrays, "trimmed_mean")


def test_trimmed_means_are_operations_like_others():
    op = cd.trimmed_mean(2)
    assert op is cd.ReduceOp("Trimmed_Mean(2)") is pickle.loads(pickle.dumps(op))
    assert op != cd.trimmed_mean(3)
    assert repr(op) == "<ReduceOp.TRIMMED_MEAN(2): 'TRIMMED_MEAN(2)'>"
    assert isinstance(op, cd.ReduceOp)
    assert op not in list(cd.ReduceOp)
    strategy = cd.MirroredStrategy([f"cpu:{k}" for k in range(5)])
    value = cd.PerReplica([1.0, 9.0, 3.0, 2.0, -100.0])
    assert float(strategy.reduce(op, value, axis=None)) == 2.0
    assert float(strategy.reduce("median", 3.0, axis=None)) == 3.0
