"""Replicas with random streams of their own: the same numbers in every run, whatever the threads do."""

import random
import threading
import time

import numpy as np
import pytest
import torch

from crossdevice import (
    CommunicationOptions,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    get_replica_context,
)
from crossdevice.errors import DeadlineError
from crossdevice.process_groups.engines.thread_engine import run_ranks

THREE = ["cpu:0", "cpu:1", "cpu:2"]


def seed(number):
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def draw():
    """Numbers drawn before and after replicas meet, with pauses in which others could draw."""
    context = get_replica_context()
    numbers = [torch.rand(()).item(), np.random.rand(), random.random()]
    time.sleep(0.0005 * (3 - context.replica_id_in_sync_group))
    numbers.append(context.all_reduce("sum", torch.rand(())).item())
    numbers.append(torch.nn.functional.dropout(torch.ones(64)).sum().item())
    return repr(numbers)


def drawn(strategy):
    return [strategy.run(draw).values for _ in range(2)]


def test_the_same_seed_gives_the_same_numbers_in_every_run():
    runs = []
    for _ in range(10):
        strategy = MirroredStrategy(THREE, own_random_streams=True)
        seed(5)
        runs.append((drawn(strategy), torch.rand(()).item(), np.random.rand()))
    assert runs == [runs[0]] * 10
    first, second = runs[0][0]
    assert len({*first, *second}) == 6, "replicas and runs draw different numbers"


def test_a_replicas_stream_does_not_depend_on_what_others_draw():
    strategy = MirroredStrategy(THREE, own_random_streams=True)

    def last_draw(num_others):
        if get_replica_context().replica_id_in_sync_group < 2:
            torch.rand(num_others)
        return torch.rand(()).item()

    found = []
    for num_others in (1, 1000):
        torch.manual_seed(5)
        found.append(strategy.run(last_draw, args=(num_others,)).values[2])
    assert found[0] == found[1]


def test_runs_that_draw_nothing_leave_the_callers_generator_alone_and_others_move_it_on():
    strategy = MirroredStrategy(THREE, own_random_streams=True)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    strategy.run(lambda: None)
    assert torch.equal(torch.get_rng_state(), before)

    def draw_on_one():
        if get_replica_context().replica_id_in_sync_group == 1:
            torch.rand(())

    strategy.run(draw_on_one)
    assert not torch.equal(torch.get_rng_state(), before)


def test_a_replica_that_fails_is_named_and_the_callers_generator_comes_back():
    strategy = MirroredStrategy(THREE, own_random_streams=True)
    started = []

    def fail_in_the_middle():
        replica = get_replica_context().replica_id_in_sync_group
        started.append(replica)
        torch.rand(3)
        if replica == 1:
            raise KeyError("replica 1")
        get_replica_context().all_reduce("sum", 1.0)

    torch.manual_seed(5)
    for _ in range(20):
        started.clear()
        with pytest.raises(KeyError, match="replica 1"):
            strategy.run(fail_in_the_middle)
        assert started == [0, 1]
    assert torch.initial_seed() == 5, "the generator is the caller's again"
    assert len(strategy.run(draw).values) == 3


def test_a_deadline_ends_replicas_that_wait_for_their_turn():
    strategy = MirroredStrategy(THREE, own_random_streams=True)
    is_over = threading.Event()
    torch.manual_seed(5)
    with pytest.raises(DeadlineError) as caught:
        strategy.run(lambda: is_over.wait(30), options=CommunicationOptions(timeout_seconds=0.2))
    left_behind = [note for note in getattr(caught.value, "__notes__", []) if "left behind" in note]
    assert len(left_behind) == 1
    assert "replica 0" in left_behind[0]
    assert torch.initial_seed() == 5
    is_over.set()


def test_replicas_of_several_processes_have_different_streams():
    def rank(group):
        strategy = MultiWorkerMirroredStrategy(devices=["cpu:0"], group=group, own_random_streams=True)
        return strategy._random_streams().thing._turns[0]._streams[0][0].sum().item()

    torch.manual_seed(5)
    assert len(set(run_ranks(2, rank))) == 2
