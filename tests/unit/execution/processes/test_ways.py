"""Leaves of one call that go different ways, and which of them may be brought to the host as they are."""

from __future__ import annotations

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.backends.registry import backend_named
from crossdevice.execution.processes import dense_call
from crossdevice.execution.processes.agreement import Description, LeafDescription
from crossdevice.execution.processes.dense_call import DenseCall
from crossdevice.execution.processes.reduction import ProcessReduction
from crossdevice.execution.processes.staged_reduction import travels_as_it_is
from crossdevice.execution.processes.ways import Part
from crossdevice.execution.reading.leaf_spec import LeafSpec
from crossdevice.process_groups.thread_group import run_ranks
from crossdevice.values.device import host_device
from crossdevice.values.reduce_op import ReduceOp

HOST = host_device(0)
OPTIONS = cd.CommunicationOptions()


def spec(dtype, shape=(4,), **more):
    return LeafSpec(backend_named("numpy"), dtype, shape, (HOST,), (HOST,), **more)


def test_a_call_whose_leaves_go_two_ways_has_its_results_in_order(monkeypatch):
    specs = (spec("float32", (3,)), spec("float64", (5,)), spec("float32", (2,)))

    def two_ways(specs, op, options, counts, group, prepare):
        return [
            Part(
                leaves,
                ProcessReduction(
                    [specs[leaf] for leaf in leaves], op, options, counts[: len(leaves)], group.rank
                ),
            )
            for leaves in ([1], [0, 2])
        ]

    monkeypatch.setattr(dense_call, "parts_of", two_ways)
    leaves = tuple(LeafDescription("", "array", each.dtype, each.shape) for each in specs)

    def program(group):
        call = DenseCall(group, Description("reduce", (), leaves), None, specs, ReduceOp.SUM, OPTIONS, None)
        columns = [
            (np.full(each.shape, number + group.rank, each.dtype),) for number, each in enumerate(specs)
        ]
        outs = [tuple(np.zeros_like(array) for array in column) for column in columns]
        call.bound(columns, outs)()
        return call.run(columns, [None] * 3), outs

    for results, outs in run_ranks(2, program):
        for number, ((array,), (out,), each) in enumerate(zip(results, outs, specs, strict=True)):
            assert (array.dtype, array.tolist()) == (each.dtype, [2.0 * number + 1] * each.shape[0])
            assert out.tolist() == array.tolist()


@pytest.mark.parametrize(
    ("leaf", "op", "counts", "is_weighted", "expected"),
    [
        (spec("float32"), ReduceOp.SUM, (2, 1), False, True),
        (spec("float32"), ReduceOp.SUM, (3, 1), False, False),
        (spec("float32"), ReduceOp.SUM, (3, 1), True, True),
        (spec("int64"), ReduceOp.MEAN, (2, 1), False, True),
        (spec("int64", own_op=ReduceOp.MAX), ReduceOp.MEAN, (2, 1), False, False),
        (spec("int64", own_op=ReduceOp.MAX), ReduceOp.MEAN, (2, 1), True, False),
    ],
)
def test_arrays_are_staged_if_no_partial_result_of_them_would_travel(leaf, op, counts, is_weighted, expected):
    assert travels_as_it_is(leaf, op, OPTIONS, counts, is_weighted) is expected
