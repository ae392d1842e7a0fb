"""Started and captured reductions on a GPU: the right order on streams, and the bits of a plain call."""

from __future__ import annotations

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.errors import BoundError

CYCLES = 200_000_000  # that a slow GPU takes: some 0.1 s
LENGTHS = (100_003, 7, 50_000)


@pytest.fixture(scope="module")
def torch():
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    return module


@pytest.fixture
def values(torch):
    random = np.random.default_rng(3)
    return [
        cd.PerReplica(
            [
                torch.tensor(random.standard_normal(length), dtype=torch.float32, device="cuda")
                for _ in range(4)
            ]
        )
        for length in LENGTHS
    ]


def pairs_of(values):
    return [(value, "cuda:0") for value in values]


def bits(results):
    return [result.cpu().numpy().tobytes() for result in results]


def test_what_is_started_neither_waits_for_the_host_nor_holds_it_up(torch, values):
    ops = cd.DirectAllReduce()
    bound = ops.bind("mean", pairs_of(values))
    expected = bits(ops.batch_reduce("mean", pairs_of(values)))
    doubled = bits(
        ops.batch_reduce("mean", pairs_of([cd.PerReplica([2 * a for a in v.values]) for v in values]))
    )
    bound.start().wait()  # the first time a table of addresses is sent, for which PyTorch pins memory
    for _ in range(3):
        torch.cuda._sleep(CYCLES)  # gradients that come late
        for value in values:
            for array in value.values:
                array.mul_(2)
        pending = bound.start()
        assert not pending.done()
        results = pending.wait()
        assert not pending.done()  # `wait` orders the streams only
        copies = [result.clone() for result in results]
        for value in values:
            for array in value.values:
                array.div_(2)  # after the reduction has read them
        assert bits(copies) == doubled
        assert pending.done()
    assert bits(bound()) == expected


def test_a_started_reduction_that_is_not_bound(torch, values):
    ops = cd.DirectAllReduce()
    expected = bits(ops.batch_reduce("mean", pairs_of(values)))
    for _ in range(20):
        torch.cuda._sleep(CYCLES // 100)
        results = ops.start_reduce("mean", pairs_of(values)).wait()
        assert bits([result + 0 for result in results]) == expected
        del results


def test_memory_that_nobody_waited_for_is_not_used_too_early(torch, values):
    ops = cd.DirectAllReduce()
    for _ in range(20):
        fresh = [cd.PerReplica([array.clone() for array in value.values]) for value in values]
        torch.cuda._sleep(CYCLES // 100)
        kept = ops.start_reduce("mean", pairs_of(fresh), out=[value.values[0] for value in values])
        del fresh, kept
        for length in LENGTHS * 4:
            torch.full((length,), float("nan"), device="cuda")
        assert all(bool(value.values[0].isfinite().all()) for value in values)


def test_a_bound_reduction_can_be_captured_and_replayed(torch, values):
    ops = cd.DirectAllReduce()
    bound = ops.bind("sum", pairs_of(values))
    bound()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = bound()
    for scale in (3, 5):
        for value in values:
            for array in value.values:
                array.mul_(scale)
        graph.replay()
        assert bits(results) == bits(ops.batch_reduce("sum", pairs_of(values)))


def test_a_tensor_that_moved_is_named_and_keeps_what_it_has(torch, values):
    bound = cd.DirectAllReduce().bind("mean", [(value, value) for value in values], out=values)
    moved = values[1].values[2]
    moved.set_(torch.full((LENGTHS[1],), 9.0, device="cuda"))
    new = [torch.full_like(moved, 7.0) for _ in range(8)]  # not in the memory that the reduction still writes
    with pytest.raises(BoundError, match=r"replica 2 \(cuda:0\) of value 1 has another address"):
        bound()
    assert moved.tolist() == [9.0] * LENGTHS[1]
    assert all(bool((tensor == 7.0).all()) for tensor in new)
