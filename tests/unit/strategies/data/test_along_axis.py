"""Reductions over replicas and axes count every element once."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

import crossdevice as cd
from crossdevice.errors import ConversionError, ReduceOpError


@pytest.fixture
def strategy():
    return cd.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])


PARTS = [np.float32([[1, 2], [3, 4]]), np.float32([[5, 60]]), np.float32(np.empty((0, 2)))]
WHOLE = np.concatenate(PARTS)


@pytest.mark.parametrize("make", [np.asarray, torch.tensor], ids=["numpy", "torch"])
@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "prod"])
@pytest.mark.parametrize("axis", [0, -2, (0,), (0, 1), [1, 0]])
def test_uneven_and_empty_parts_give_what_the_whole_gives(strategy, make, op, axis):
    value = cd.PerReplica([make(part) for part in PARTS])
    axes = tuple(axis) if isinstance(axis, list) else axis
    right = getattr(WHOLE, op)(axis=axes)
    found = strategy.reduce(op, value, axis=axis)
    assert np.allclose(found, right)
    assert str(found.dtype).endswith("float32")


def test_an_axis_that_all_replicas_share_is_reduced_inside_each_first(strategy):
    value = cd.PerReplica([np.arange(6).reshape(2, 3)] * 3)
    assert strategy.reduce("sum", value, axis=1).tolist() == [9, 36]
    assert strategy.reduce("mean", value, axis=1).tolist() == [1, 4]


@pytest.mark.parametrize(
    ("dtype", "mean"), [("int32", "float64"), ("int8", "float32"), ("float16", "float16")]
)
def test_dtypes_are_those_of_a_reduction_without_axes(strategy, dtype, mean):
    value = cd.PerReplica([np.ones(2, dtype)] * 3)
    assert strategy.reduce("sum", value, axis=0).dtype == dtype
    assert strategy.reduce("mean", value, axis=0).dtype == mean


def test_narrow_floats_do_not_stick(strategy):
    value = cd.PerReplica([np.ones(1000, ml_dtypes.bfloat16)] * 3)
    assert float(strategy.reduce("sum", value, axis=0)) == 3008  # 3000, rounded once to 8 bits
    assert float(strategy.reduce("mean", value, axis=0)) == 1


def test_a_value_that_is_not_distributed_counts_for_every_replica(strategy):
    assert float(strategy.reduce("sum", np.ones(2), axis=0)) == 6
    assert float(strategy.reduce("mean", np.ones(2), axis=0)) == 1


def test_structures_are_reduced_leaf_by_leaf(strategy):
    value = {"a": cd.PerReplica([{"b": np.ones(2)}] * 3), "c": [cd.PerReplica([np.ones(1)] * 3)]}
    result = strategy.reduce("sum", value, axis=0)
    assert float(result["a"]["b"]) == 6
    assert float(result["c"][0]) == 3


@pytest.mark.parametrize("make", [np.empty, torch.empty], ids=["numpy", "torch"])
@pytest.mark.parametrize("op", ["min", "max"])
def test_nothing_has_no_least_element(strategy, make, op):
    with pytest.raises(ReduceOpError, match=f"{op.upper()} of nothing: no replica has elements along axis 0"):
        strategy.reduce(op, cd.PerReplica([make((0, 2))] * 3), axis=0)


def test_the_mean_of_nothing_is_nan(strategy):
    assert np.isnan(strategy.reduce("mean", cd.PerReplica([np.empty(0)] * 3), axis=0))
    assert float(strategy.reduce("sum", cd.PerReplica([np.empty(0)] * 3), axis=0)) == 0


def test_bad_axes_are_refused(strategy):
    value = cd.PerReplica([np.ones((2, 2))] * 3)
    for axis in (2, -3, (0, 2)):
        with pytest.raises(ValueError, match="out of range"):
            strategy.reduce("sum", value, axis=axis)
    for axis in (0.5, "0", (0, None)):
        with pytest.raises(TypeError, match="axis must be an integer"):
            strategy.reduce("sum", value, axis=axis)
    slices = cd.IndexedSlices(np.ones((1, 1)), np.array([0]))
    with pytest.raises(ConversionError, match="has no dense_shape"):
        strategy.reduce("sum", cd.PerReplica([slices] * 3), axis=0)


def test_sparse_rows_are_made_dense_to_be_reduced_along_an_axis(strategy):
    slices = cd.IndexedSlices(np.float32([[1], [2]]), np.array([1, 1]), (4, 1))
    value = cd.PerReplica([slices, slices, np.float32([[3], [0], [0], [3]])])
    assert strategy.reduce("sum", value, axis=0).tolist() == [12.0]
    assert strategy.reduce("mean", value, axis=0).tolist() == [1.0]


def test_without_an_axis_the_result_is_on_the_first_host_device(strategy):
    assert float(strategy.reduce("mean", cd.PerReplica([1.0, 2.0, 6.0]), axis=None)) == 3
