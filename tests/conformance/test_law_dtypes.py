"""Results in another float dtype, replicas of several, floats of 8 bits, and integers that stay integers."""

from __future__ import annotations

import functools
import itertools
import operator

import ml_dtypes
import numpy as np
import pytest
import torch

import crossdevice as cd
from conformance.oracle import FORMATS, NUMPY_DTYPES, Format, exact_sum, rounded_float
from conformance.rows import LOWERINGS, NUMPY, TORCH, wild_arrays
from crossdevice.errors import DtypeMismatchError, OptionError, OutError

PAIRS = [pair for pair in itertools.product(FORMATS, FORMATS) if pair[0] != pair[1]]
SHORT = {"float8_e4m3fn": Format(4, -6, 8), "float8_e5m2": Format(3, -14, 15)}


@pytest.mark.parametrize(("dtype", "into"), PAIRS)
@pytest.mark.parametrize("backend", [NUMPY, TORCH], ids=["numpy", "torch"])
def test_results_may_have_another_float_dtype(dtype, into, backend):
    arrays = wild_arrays(dtype, 3, 40, 5)
    columns = [list(column) for column in zip(*(a.astype(np.float64).tolist() for a in arrays), strict=True)]
    ops = cd.TreeAllReduce()
    for op, precision, lowering in itertools.product(
        ("sum", "mean"), ("fast", "accurate", "exact"), LOWERINGS
    ):
        divisor = 3 if op == "mean" else None
        if precision == "exact":
            right = [exact_sum(column, into, divisor) for column in columns]
        elif dtype == "float64":
            right = None  # compensated: compared with the sum in float64, rounded once more, only by size
        else:
            totals = [functools.reduce(operator.add, column) for column in columns]
            right = [rounded_float(total / (divisor or 1), into) for total in totals]
        options = cd.CommunicationOptions(precision=precision, lowering=lowering)
        value, out = backend.per_replica(arrays), backend.make(np.zeros(40, NUMPY_DTYPES[into]))
        for _ in range(2):
            found = ops.reduce(op, value, "cpu:0", options, out=out)
            assert found is out
        memory = backend.memory(out)
        if right is None:
            np.testing.assert_allclose(
                memory.astype(np.float64),
                [exact_sum(column, into, divisor) for column in columns],
                rtol=float(ml_dtypes.finfo(NUMPY_DTYPES[into]).eps),
            )
        else:
            assert memory.tobytes() == np.array(right, NUMPY_DTYPES[into]).tobytes(), (
                op,
                precision,
                lowering,
            )
        assert NUMPY_DTYPES[dtype] == backend.memory(ops.reduce(op, value, "cpu:0", options)).dtype


def test_every_operation_and_weights_go_into_another_dtype():
    arrays = wild_arrays("bfloat16", 4, 50, 1)
    singles = [array.astype(np.float32) for array in arrays]
    for op, more in (("max", {}), ("min", {}), ("median", {}), ("mean", {"weights": [0.1, 2, 3, 4]})):
        out = np.empty(50, np.float32)
        cd.reduce(arrays, op, out=out, **more)
        assert out.tobytes() == cd.reduce(singles, op, **more).tobytes(), op
    outs = [np.empty(50, np.float32) for _ in range(4)]
    assert cd.bind(arrays, "sum", out=outs)()[2] is outs[2]
    assert outs[2].tobytes() == cd.reduce(singles, "sum").tobytes()


def test_only_floats_go_into_other_floats():
    for array, out in (
        (np.ones(3, np.int32), np.ones(3, np.float32)),
        (np.ones(3, np.float32), np.ones(3, np.int32)),
        (np.ones(3, np.complex64), np.ones(3, np.float32)),
    ):
        with pytest.raises(OutError, match=f"has dtype {out.dtype}; expected {array.dtype}"):
            cd.reduce([array, array], "sum", out=out)


def test_replicas_of_several_float_dtypes_are_widened_if_that_is_asked_for():
    options = cd.CommunicationOptions(widen_inputs=True)
    for dtypes, widest in (
        (("bfloat16", "float32"), "float32"),
        (("float16", "bfloat16"), "float32"),
        (("float16", "float64", "float32"), "float64"),
    ):
        arrays = [np.arange(5).astype(NUMPY_DTYPES[dtype]) for dtype in dtypes]
        tensors = TORCH.arrays(arrays)
        with pytest.raises(DtypeMismatchError):
            cd.reduce(arrays)
        for result in (cd.reduce(arrays, options=options), TORCH.memory(cd.reduce(tensors, options=options))):
            assert result.dtype == NUMPY_DTYPES[widest]
            assert result.tolist() == [len(dtypes) * k for k in range(5)]
    with pytest.raises(DtypeMismatchError):
        cd.reduce([np.ones(1, np.int32), np.ones(1)], options=options)


@pytest.mark.parametrize("dtype", SHORT)
def test_floats_of_8_bits_are_summed_wide_and_rounded_once(dtype, monkeypatch):
    monkeypatch.setitem(FORMATS, dtype, SHORT[dtype])
    kind = np.dtype(getattr(ml_dtypes, dtype))
    chosen = np.random.default_rng(3)
    arrays = [chosen.uniform(-9, 9, 300).astype(kind) for _ in range(3)]
    columns = zip(*(array.astype(np.float64).tolist() for array in arrays), strict=True)
    right = np.array([exact_sum(column, dtype, 3) for column in columns]).astype(kind)
    tensors = [torch.from_numpy(array.view(np.uint8)).view(getattr(torch, dtype)) for array in arrays]
    for precision, lowering in itertools.product(("accurate", "exact"), LOWERINGS):
        options = cd.CommunicationOptions(precision=precision, lowering=lowering)
        found = cd.reduce(arrays, "mean", options=options)
        assert found.dtype == kind
        assert found.tobytes() == right.tobytes()
        tensor = cd.reduce(tensors, "mean", options=options)
        assert tensor.dtype == getattr(torch, dtype)
        assert tensor.view(torch.uint8).numpy().tobytes() == right.tobytes()
    wide = np.empty(300, np.float32)
    cd.reduce(arrays, "sum", out=wide)
    assert wide.tolist() == sum(array.astype(np.float32) for array in arrays).tolist()
    for op, same in (("max", np.maximum), ("min", np.minimum)):
        expected = same.reduce([array.astype(np.float32) for array in arrays])
        assert cd.reduce(arrays, op).astype(np.float32).tolist() == expected.tolist()
    median = cd.reduce(arrays, "median").astype(np.float32)
    assert median.tolist() == np.median([array.astype(np.float32) for array in arrays], axis=0).tolist()


def test_integers_of_a_model_stay_integers_by_policy():
    models = [
        {"weight": np.float32([k]), "num_batches_tracked": np.array(10 * k), "steps": torch.tensor(k)}
        for k in (1, 2, 4)
    ]
    for policy, counted in (("max", 40), ("min", 10)):
        for options in (
            cd.CommunicationOptions(integers=policy),
            cd.CommunicationOptions(integers=policy, precision="fast", lowering="off"),
        ):
            for more in ({}, {"weights": [1, 1, 2]}):
                mean = cd.reduce(models, "mean", options=options, **more)
                assert mean["weight"].dtype == np.float32
                assert mean["num_batches_tracked"].dtype == np.int64
                assert int(mean["num_batches_tracked"]) == counted
                assert mean["steps"].dtype == torch.int64
            assert int(cd.reduce(models, "median", options=options)["num_batches_tracked"]) == counted
            assert int(cd.reduce(models, "sum", options=options)["num_batches_tracked"]) == 70
    assert cd.reduce(models, "mean")["num_batches_tracked"].dtype == np.float64
    with pytest.raises(OptionError, match="integers must be one of mean, max, min; got 'first'"):
        cd.CommunicationOptions(integers="first")
