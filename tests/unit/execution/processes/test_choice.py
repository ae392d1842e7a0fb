"""The first transport that is available carries a leaf; leaves of one call may take several."""

from __future__ import annotations

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.backends.registry import backend_named
from crossdevice.execution.processes import group_reduction
from crossdevice.execution.processes.agreement import Description, LeafDescription
from crossdevice.execution.processes.choice import TRANSPORTS, Part, transport_of, transport_of_copies
from crossdevice.execution.processes.group_reduction import GroupReduction
from crossdevice.execution.processes.host_reduction import HostReduction
from crossdevice.execution.processes.reduced_batch import ReducedBatch, Wanted, WantedCopies
from crossdevice.execution.processes.transports.messages import prepare_messages
from crossdevice.execution.reading.leaf_spec import LeafSpec
from crossdevice.process_groups.engines.thread_engine import run_ranks
from crossdevice.values.device import host_device
from crossdevice.values.reduce_op import ReduceOp

HOST = host_device(0)
OPTIONS = cd.CommunicationOptions()


def spec(dtype, shape=(4,), **more):
    return LeafSpec(backend_named("numpy"), dtype, shape, (HOST,), (HOST,), **more)


def test_a_call_whose_leaves_take_two_transports_has_its_results_in_order(monkeypatch):
    specs = (spec("float32", (3,)), spec("float64", (5,)), spec("float32", (2,)))

    def two_parts(batch):
        return [
            Part(leaves, HostReduction(batch.of_leaves(leaves), prepare_messages), "messages")
            for leaves in ([1], [0, 2])
        ]

    monkeypatch.setattr(group_reduction, "parts_of", two_parts)
    leaves = tuple(LeafDescription("", "array", each.dtype, each.shape) for each in specs)

    def program(group):
        batch = ReducedBatch(specs, ReduceOp.SUM, OPTIONS, (), group, None)
        call = GroupReduction(Description("reduce", (), leaves), (1,) * 3, batch, range(3))
        columns = [
            (np.full(each.shape, number + group.rank, each.dtype),) for number, each in enumerate(specs)
        ]
        outs = [tuple(np.zeros_like(array) for array in column) for column in columns]
        call.bind(columns, outs)()
        return call.run(columns, [None] * 3), outs

    for results, outs in run_ranks(2, program):
        for number, ((array,), (out,), each) in enumerate(zip(results, outs, specs, strict=True)):
            assert (array.dtype, array.tolist()) == (each.dtype, [2.0 * number + 1] * each.shape[0])
            assert out.tolist() == array.tolist()


def test_the_reasons_of_all_transports_before_the_chosen_one_are_known():
    def program(group):
        choice = transport_of(Wanted(spec("float32"), ReduceOp.SUM, OPTIONS, group, (1, 1)))
        return choice.name, list(choice.reasons), choice.reasons["windows"], choice.reasons["peer memory"]

    names = list(TRANSPORTS)
    for name, before, reason, of_peers in run_ranks(2, program):
        assert (name, before) == (names[-1], names[:-1])
        assert of_peers.endswith("expected elements of PyTorch's tensors")  # known before any reduction
        assert reason == "ranks do not all share memory: several ranks are threads of one process"


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_transport_has_every_kind_of_call_or_the_reason_in_its_row(name):
    """Whoever is asked for what it has no way to do says so in the words of the table."""
    row = TRANSPORTS[name]

    def program(group):
        found = transport_of_copies(WantedCopies(group, is_on_gpu=False))
        own = row.copies_unavailable(WantedCopies(group, is_on_gpu=False))
        return found.name, found.reasons, row.copies if isinstance(row.copies, str) else own

    for chosen, reasons, own in run_ranks(2, program):
        assert reasons.get(name) == own
        assert (own is None) == (name == chosen == "messages")


@pytest.mark.parametrize(
    ("leaf", "op", "counts", "is_weighted", "partial"),
    [
        (spec("float32"), ReduceOp.SUM, (2, 1), False, None),
        (spec("float32"), ReduceOp.SUM, (3, 1), False, "float64"),
        (spec("float32"), ReduceOp.SUM, (3, 1), True, None),
        (spec("complex64"), ReduceOp.SUM, (3, 1), False, "float64"),
        (spec("complex64"), ReduceOp.PROD, (3, 1), False, None),
        (spec("int64"), ReduceOp.MEAN, (2, 1), False, None),
        (spec("int64", own_op=ReduceOp.MAX), ReduceOp.MEAN, (2, 1), False, "int64"),
        (spec("int64", own_op=ReduceOp.MAX), ReduceOp.MEAN, (2, 1), True, "int64"),
    ],
)
def test_arrays_travel_if_no_partial_result_of_them_would_do(leaf, op, counts, is_weighted, partial):
    def program(group):
        (found,) = ReducedBatch([leaf], op, OPTIONS, [counts], group, None, is_weighted).leaves
        return found.partial, found.length

    reals = 2 if leaf.dtype == "complex64" and op is not ReduceOp.PROD else 1
    assert run_ranks(1, program) == [(partial, 4 * reals)]


def test_fast_sums_are_not_taken_for_copies_though_their_recipe_is_the_same():
    values = [np.float32([number, 1.0]) for number in range(1, 6)]

    def program(group):
        own = {0: values[:1], 1: values[1:4], 2: values[4:]}[group.rank]
        ops, options = cd.CollectiveAllReduce(group=group), cd.CommunicationOptions(precision="fast")
        return ops.reduce("sum", cd.PerReplica(own), "cpu:0", options).tolist()

    assert run_ranks(3, program) == [[15.0, 5.0]] * 3
