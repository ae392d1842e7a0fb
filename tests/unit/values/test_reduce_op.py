"""Operations as people and other libraries write them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import crossdevice as cd
from crossdevice.errors import DtypeError, ReduceOpError

OTHERS = {"AVG": "MEAN", "PRODUCT": "PROD", "SUM": "SUM", "MIN": "MIN", "MAX": "MAX"}


@pytest.mark.parametrize(("name", "op"), [*OTHERS.items(), ("average", "MEAN"), ("Maximum", "MAX")])
def test_names_that_people_type_are_understood(name, op):
    assert cd.ReduceOp(name) is cd.ReduceOp[op]
    assert cd.ReduceOp(name.lower()) is cd.ReduceOp[op]


@pytest.mark.parametrize(("name", "op"), OTHERS.items())
def test_pytorchs_operations_are_understood(name, op):
    distributed = pytest.importorskip("torch.distributed")
    assert cd.ReduceOp(getattr(distributed.ReduceOp, name)) is cd.ReduceOp[op]
    with pytest.raises(ReduceOpError, match="BAND"):
        cd.ReduceOp(distributed.ReduceOp.BAND)


def test_mpis_operations_are_understood(monkeypatch):
    monkeypatch.setattr(pytest.importorskip("mpi4py").rc, "initialize", False)
    mpi = pytest.importorskip("mpi4py.MPI")
    names = ["SUM", "PROD", "MIN", "MAX"]
    assert [cd.ReduceOp(getattr(mpi, name)).name for name in names] == names
    with pytest.raises(ReduceOpError):
        cd.ReduceOp(mpi.BAND)


@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["numpy", "torch"])
@pytest.mark.parametrize("lowering", ["auto", "off"])
def test_booleans_have_a_minimum_and_a_maximum(make, lowering):
    arrays = [make([True, True, False]), make([True, False, False])]
    options = cd.CommunicationOptions(lowering=lowering)
    for algorithm in (cd.RingAllReduce(), cd.ReductionToOneDevice(), cd.TreeAllReduce()):
        smallest, largest = (
            cd.reduce(arrays, op, algorithm=algorithm, options=options) for op in ("min", "max")
        )
        assert (smallest.tolist(), largest.tolist()) == ([True, False, False], [True, True, False])
        assert smallest.dtype == arrays[0].dtype
    for op in ("sum", "mean", "prod"):
        with pytest.raises(DtypeError, match="dtype bool"):
            cd.reduce(arrays, op)


@pytest.mark.parametrize("value", [np.ones((2, 2)), np.ma.masked_array([1, 2]), [1, 2], {"sum": 1}], ids=type)
def test_an_array_in_the_place_of_an_operation_is_refused_by_its_kind(value):
    with pytest.raises(ReduceOpError, match=r"is not a reduce operation; expected one of SUM, MEAN"):
        cd.ReduceOp(value)
    with pytest.raises(ReduceOpError, match=r"is not a reduce operation"):
        cd.ReductionToOneDevice().reduce(value, "sum", "cpu:0")


def test_a_tensor_of_tensorflow_in_the_place_of_an_operation_is_refused_by_its_kind():
    tf = pytest.importorskip("tensorflow")
    for value in (tf.ones((2, 2)), tf.Variable([1.0]), tf.constant(["sum"])):
        with pytest.raises(ReduceOpError, match=r"^an array of shape \(\d.*\) is not a reduce operation"):
            cd.ReduceOp(value)
