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
from crossdevice.execution.processes import peer_reduction
from crossdevice.execution.processes.peer_reduction import PeerReduction, has_bits_of_the_host
from crossdevice.execution.reading.leaf_spec import LeafSpec
from crossdevice.kernels.cuda import peer_memory
from crossdevice.process_groups.thread_group import run_ranks
from crossdevice.values.device import host_device
from crossdevice.values.reduce_op import ReduceOp

HOST = host_device(0)
SHAPES = ((5,), (3, 40), (), (3000,))


class OneProcess:
    """Peers whose addresses are everybody's."""

    gpu, why_not = HOST, None
    found: ClassVar[list[tuple[int, int]]] = []

    def address_of(self, rank, place):
        self.found.append((rank, place.offset))
        return place.offset

    def forget_old(self):
        pass


@pytest.fixture(autouse=True)
def _threads_for_gpus(monkeypatch):
    interpreter = threading.Lock()  # which one thread at a time can use

    def run_alone(self, addresses, stream):
        with interpreter:
            run(self, addresses, stream)

    from crossdevice.kernels.cuda.gpu_pass import GpuPass

    run = GpuPass.run
    monkeypatch.setattr(GpuPass, "run", run_alone)
    monkeypatch.setattr(peer_reduction, "known_peers", lambda group: OneProcess())
    monkeypatch.setattr(
        peer_memory,
        "exported",
        lambda address: peer_memory.Exported(b"h" * peer_memory.HANDLE_BYTES, address),
    )
    monkeypatch.setattr(peer_memory, "wait_for_gpu", lambda device: None)
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
    reduction = PeerReduction(specs, ReduceOp(op), options, [tuple(counts)] * len(SHAPES), group)
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


@pytest.mark.parametrize("counts", [(1, 1), (1, 1, 1), (2, 1, 2)])
@pytest.mark.parametrize(("op", "dtype"), [("mean", "float32"), ("sum", "bfloat16"), ("max", "int32")])
def test_ranks_get_the_bits_of_one_process(counts, op, dtype):
    options = cd.CommunicationOptions()
    expected = right(counts, op, options, dtype)
    for results in run_ranks(len(counts), lambda group: reduced(group, counts, op, options, dtype)):
        for copies, total in zip(results, expected, strict=True):
            assert copies[0].data_ptr() != copies[1].data_ptr() or not copies[0].numel()
            assert all(torch.equal(copy, total) for copy in copies)


def test_arrays_that_stay_where_they_are_are_looked_for_once():
    options = cd.CommunicationOptions()
    outs = lambda columns: [(torch.empty_like(column[0]), torch.empty_like(column[0])) for column in columns]  # noqa: E731
    counts = (1, 1)
    run_ranks(2, lambda group: reduced(group, counts, "sum", options, "float32", outs, repeats=3))
    assert len(OneProcess.found) == 2 * 2 * len(SHAPES)  # of each other rank an input and a result per leaf


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
    assert has_bits_of_the_host(spec, ReduceOp.SUM, options, counts) is is_same
