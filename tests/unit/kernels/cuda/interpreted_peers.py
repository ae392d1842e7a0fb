"""Ranks that reduce over each other's memory, as threads of one process, in Triton's interpreter.

Collected only by test_triton_kernels.py, in a process in which TRITON_INTERPRET is set.
"""

from __future__ import annotations

import threading
from typing import ClassVar

import pytest
import torch

import crossdevice as cd
from crossdevice.backends.registry import backend_named
from crossdevice.execution.processes import copied_rows, gpu_peers
from crossdevice.execution.processes.copied_rows import Copies, LeafRows
from crossdevice.execution.processes.gpu_peers import PeerAddresses, Peers
from crossdevice.execution.processes.reduced_batch import LeafParts, ReducedBatch
from crossdevice.execution.processes.transports import peer_memory as transport
from crossdevice.execution.processes.transports.peer_memory import (
    PeerReduceScatter,
    PeerReduction,
    host_bits_unavailable,
)
from crossdevice.execution.reading.leaf_spec import LeafSpec
from crossdevice.execution.reading.shards import part_lengths
from crossdevice.kernels.cuda import peer_memory
from crossdevice.process_groups.engines.thread_engine import run_ranks
from crossdevice.values.device import host_device
from crossdevice.values.reduce_op import ReduceOp

HOST = host_device(0)
SHAPES = ((5,), (3, 40), (), (3000,))


class OneProcess:
    """Another rank's memory, mapped: its addresses are everybody's."""

    found: ClassVar[list[int]] = []

    def address_of(self, place):
        self.found.append(place.offset)
        return place.offset

    def forget_old(self):
        return False

    def close(self):
        pass


@pytest.fixture(params=["all", "not the last"])
def workers(request, monkeypatch):
    """Which ranks reduce a part: as if each had a GPU, or the last two shared one."""

    def peers_of(group):
        addresses = PeerAddresses(group.rank, [OneProcess() for _ in range(group.size)])
        workers = range(group.size)
        if request.param == "not the last":
            workers = [min(rank, group.size - 2) for rank in workers]
        return Peers(HOST, addresses, workers)

    for module in (transport, gpu_peers, copied_rows):
        monkeypatch.setattr(module, "known_peers", peers_of)
    return request.param


@pytest.fixture(autouse=True)
def _threads_for_gpus(monkeypatch):
    interpreter = threading.Lock()  # which one thread at a time can use

    def bound_alone(self, addresses):
        start = bound(self, addresses)

        def run(stream):
            with interpreter:
                start(stream)

        return run

    from crossdevice.kernels.cuda.gpu_pass import GpuPass

    bound = GpuPass.bound
    monkeypatch.setattr(GpuPass, "bound", bound_alone)
    monkeypatch.setattr(
        peer_memory,
        "exported",
        lambda address: peer_memory.Exported(b"h" * peer_memory.HANDLE_BYTES, address),
    )
    monkeypatch.setattr(peer_memory, "allocation_of", lambda address: 1)
    OneProcess.found.clear()


def columns_of(rank, counts, dtype):
    generator = torch.Generator().manual_seed(rank)
    return [
        tuple(
            (torch.randn(shape, generator=generator) * 9).to(getattr(torch, dtype))
            for _ in range(counts[rank])
        )
        for shape in SHAPES
    ]


def reduced(group, counts, op, options, dtype, outs=None, repeats=1):
    backend = backend_named("torch")
    columns = columns_of(group.rank, counts, dtype)
    specs = [LeafSpec(backend, dtype, shape, (HOST,) * counts[group.rank], (HOST, HOST)) for shape in SHAPES]
    batch = ReducedBatch(specs, ReduceOp(op), options, [tuple(counts)] * len(SHAPES), group, None)
    reduction = PeerReduction(batch)
    given = [None] * len(SHAPES) if outs is None else outs(columns)
    for _ in range(repeats):
        with group.call("reduce", b"the same") as call:
            delivery = reduction.run(call, columns, given)
    return delivery()


def right(counts, op, options, dtype):
    columns = [columns_of(rank, counts, dtype) for rank in range(len(counts))]
    ops = cd.DirectAllReduce()
    return [
        ops.reduce(op, cd.PerReplica([array for rank in columns for array in rank[number]]), "cpu:0", options)
        for number in range(len(SHAPES))
    ]


@pytest.mark.parametrize(
    ("counts", "op", "dtype"),
    [((1, 1), "mean", "float32"), ((1, 1, 1), "sum", "bfloat16"), ((1, 1, 1), "max", "int32")],
)
@pytest.mark.usefixtures("workers")
def test_ranks_get_the_bits_of_one_process(counts, op, dtype):
    options = cd.CommunicationOptions()
    expected = right(counts, op, options, dtype)
    for results in run_ranks(len(counts), lambda group: reduced(group, counts, op, options, dtype)):
        for made, total in zip(results, expected, strict=True):
            assert made[0].data_ptr() != made[1].data_ptr() or not made[0].numel()
            assert all(torch.equal(copy, total) for copy in made)


@pytest.mark.usefixtures("workers")
def test_arrays_that_stay_where_they_are_are_looked_for_once():
    options = cd.CommunicationOptions()
    outs = lambda columns: [(torch.empty_like(column[0]), torch.empty_like(column[0])) for column in columns]  # noqa: E731
    counts = (1, 1)
    run_ranks(2, lambda group: reduced(group, counts, "sum", options, "float32", outs, repeats=3))
    assert len(OneProcess.found) == 2 * 2 * len(SHAPES)  # of each other rank an input and a result per leaf


@pytest.mark.usefixtures("workers")
def test_inputs_that_are_results_are_written_to_at_the_end():
    options, counts = cd.CommunicationOptions(), (2, 2)
    expected = right(counts, "sum", options, "float32")

    def program(group):
        kept = []

        def outs(columns):
            kept.extend(columns)
            return columns

        results = reduced(group, counts, "sum", options, "float32", outs)
        assert all(result[0] is column[0] for result, column in zip(results, kept, strict=True))
        return results

    for results in run_ranks(2, program):
        assert all(
            torch.equal(copy, total) for each, total in zip(results, expected, strict=True) for copy in each
        )


@pytest.mark.parametrize(
    ("precision", "counts", "is_same"),
    [
        ("fast", (1, 1), True),
        ("fast", (2, 1), False),
        ("accurate", (2, 2), True),
        ("accurate", (3, 3), False),
    ],
)
def test_where_bits_would_differ_the_host_does_it(precision, counts, is_same):
    spec = LeafSpec(backend_named("torch"), "float32", (4,), (HOST,), (HOST,))
    options = cd.CommunicationOptions(precision=precision)
    assert (host_bits_unavailable(spec, ReduceOp.SUM, options, counts) is None) is is_same


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("is_in_place", [False, True])
def test_bound_reductions_read_what_is_there_when_they_are_called(is_in_place):
    def program(group):
        specs = [LeafSpec(backend_named("torch"), "float32", (600,), (HOST,), (HOST,))]
        batch = ReducedBatch(specs, ReduceOp.SUM, cd.CommunicationOptions(), [(1, 1)], group, None)
        reduction = PeerReduction(batch)
        array = torch.empty(600)
        out = array if is_in_place else torch.empty(600)
        run = reduction.bound([(array,)], [(out,)])
        answers = []
        for factor in (1.0, 5.0):
            array[:] = factor * (group.rank + 1)
            with group.call("reduce", b"the same") as call:
                run(call)
            answers.append(bool((out == 3 * factor).all()))
        return answers

    assert run_ranks(2, program) == [[True, True]] * 2


SCATTERED = (((7, 3), 0, None), ((2, 9), 1, (5, 0, 1, 3)), ((300,), 0, (0, 201, 99, 0)), ((6,), 0, None))
"""Shapes, axes, and the lengths of parts."""


def scattered_leaf(dtype, shape, axis, sizes, counts, rank):
    devices = (HOST,) * counts[rank]
    spec = LeafSpec(backend_named("torch"), dtype, shape, devices, devices)
    return LeafParts(spec, axis, part_lengths(shape[axis], sum(counts), sizes), counts, rank)


@pytest.mark.parametrize(
    ("counts", "op", "dtype", "into"),
    [((1, 2, 1), "mean", "float32", "out"), ((2, 2), "sum", "complex64", "inputs")],
)
@pytest.mark.usefixtures("workers")
def test_ranks_get_their_own_parts(counts, op, dtype, into):
    replicas = [
        [(torch.randn(shape) * 9).to(getattr(torch, dtype)) for shape, _, _ in SCATTERED]
        for _ in range(sum(counts))
    ]
    rights = [
        cd.reduce_scatter([replica[number].clone() for replica in replicas], op, axis=axis, sizes=sizes)
        for number, (_, axis, sizes) in enumerate(SCATTERED)
    ]

    def program(group):
        own = slice(sum(counts[: group.rank]), sum(counts[: group.rank + 1]))
        columns = [tuple(column) for column in zip(*replicas[own], strict=True)]
        expected = [right[own] for right in rights]
        leaves = [scattered_leaf(dtype, *how, counts, group.rank) for how in SCATTERED]
        if into == "out":
            outs = [tuple(map(torch.zeros_like, parts)) for parts in expected]
        else:  # from which other ranks still read
            outs = [None] * len(SCATTERED)
            pairs = zip(columns[0], expected[0], strict=True)
            outs[0] = tuple(array[len(array) - len(part) :] for array, part in pairs)
        specs, all_counts = [leaf.spec for leaf in leaves], [counts] * len(leaves)
        options = cd.CommunicationOptions()
        batch = ReducedBatch(specs, ReduceOp(op), options, all_counts, group, None, parts=leaves)
        reduction = PeerReduceScatter(batch)
        with group.call("reduce_scatter", b"the same") as call:
            delivery = reduction.run(call, columns, outs)
        for found, right, out in zip(delivery(), expected, outs, strict=True):
            assert all(map(torch.equal, found, right))
            assert all(array.is_contiguous() for array in found)
            assert out is None or all(one is other for one, other in zip(found, out, strict=True))

    run_ranks(len(counts), program)


@pytest.mark.usefixtures("workers")
def test_arrays_of_a_call_that_failed_are_kept_for_those_who_may_still_use_them(monkeypatch):
    kept = []
    monkeypatch.setattr(gpu_peers, "_left_behind", kept)
    monkeypatch.setattr(
        gpu_peers, "meet", lambda call: (_ for _ in ()).throw(cd.errors.DeadlineError("late"))
    )

    def program(group):
        with pytest.raises(cd.errors.DeadlineError):
            reduced(group, (1, 1), "sum", cd.CommunicationOptions(), "float32")

    run_ranks(2, program)
    assert [len(arrays) for arrays in kept] == [2 * len(SHAPES)] * 2


@pytest.fixture
def _offered(monkeypatch):
    """Tensors on the host, offered as if they were on a GPU that all ranks reach."""
    monkeypatch.setattr(copied_rows, "offered_gpu", lambda arrays, group: HOST)
    monkeypatch.setattr(gpu_peers, "find_peers", lambda call, gpu: None)


@pytest.mark.usefixtures("workers", "_offered")
def test_arrays_of_all_ranks_are_copied_from_where_they_are():
    def program(group):
        copying = Copies(group)
        for _ in range(2):
            own = [torch.arange(group.rank * 3), torch.full((5, 2), float(group.rank)), torch.zeros(0)]
            with group.call("gather", b"the same") as call:
                first, second, third = copying.gathered(call, own)
            assert first.tolist() == [element for rank in range(group.size) for element in range(rank * 3)]
            assert torch.equal(second[:, 1], torch.arange(3.0).repeat_interleave(5))
            assert third.shape == (0,)
            with group.call("broadcast", b"the same") as call:
                (copy,) = copying.of_rank(call, [torch.full((3,), group.rank, dtype=torch.int16)], 1)
            assert copy.tolist() == [1] * 3

    run_ranks(3, program)


@pytest.mark.usefixtures("workers", "_offered")
def test_parts_for_other_ranks_are_copied_from_where_they_are():
    counts = (1, 2, 1)

    def program(group):
        first = sum(counts[: group.rank])
        own = range(first, first + counts[group.rank])
        sizes = [[(replica + 2 * part) % 4 for part in range(4)] for replica in own]
        leaves = []
        for dtype, width in ((torch.bfloat16, 3), (torch.int64, 1)):
            rows = [
                torch.arange(sum(lengths) * width).reshape(-1, width).to(dtype) + 10 * replica
                for replica, lengths in zip(own, sizes, strict=True)
            ]
            leaves.append(LeafRows(rows, sizes, counts))
        lengths = [leaf.lengths() for leaf in leaves]
        with group.call("all_to_all", b"the same") as call:
            found = Copies(group).exchanged(call, leaves, lengths, HOST)
        flat = [leaf._replace(replicas=[rows.float().numpy() for rows in leaf.replicas]) for leaf in leaves]
        with group.call("all_to_all", b"the same") as call:
            rights = Copies(group).exchanged(call, flat, lengths)
        assert [buffers[0].dtype for buffers in found] == [torch.bfloat16, torch.int64]
        for buffers, expected in zip(found, rights, strict=True):
            assert [buffer.float().tolist() for buffer in buffers] == [each.tolist() for each in expected]

    run_ranks(3, program)
