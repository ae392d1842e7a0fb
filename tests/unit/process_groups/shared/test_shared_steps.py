"""Steps in shared memory: whoever sleeps is woken by the last to come, whatever both are compiled to."""

from __future__ import annotations

import itertools
import mmap
import os
import sys
import threading

import pytest

from crossdevice.kernels.host.meeting import compiled_meeting
from crossdevice.process_groups.shared import shared_steps
from crossdevice.process_groups.shared.shared_steps import SharedSteps, start_time_of, steps_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux")


def ranks_of(are_compiled):
    """The steps of each rank, all in this process."""
    size = len(are_compiled)
    memory = mmap.mmap(-1, steps_bytes(size))
    process = os.getpid()
    ranks = [
        SharedSteps(memory, rank, size, [(process, start_time_of(process) or 0)] * size)
        for rank in range(size)
    ]
    for steps, is_compiled in zip(ranks, are_compiled, strict=True):
        steps.meet = compiled_meeting() if is_compiled else None
    return ranks


def taken(steps):
    """Takes the next step, as a call does."""
    return steps.come(1, 1, b"same") or steps.wait(30.0)


@pytest.mark.parametrize("are_compiled", [*itertools.product([False, True], repeat=2)])
def test_nobody_who_sleeps_is_forgotten(monkeypatch, are_compiled):
    monkeypatch.setattr(shared_steps, "SLEEP_SECONDS", 20.0)  # so that a wake-up that is lost is noticed
    monkeypatch.setattr(shared_steps, "SPIN_SECONDS", 0.0)
    first, second = ranks_of(are_compiled)
    others = threading.Thread(target=lambda: [taken(second) for _ in range(500)])
    others.start()
    assert all(taken(first) for _ in range(500))
    others.join(120)
    assert not others.is_alive()


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_step_for_something_else_is_not_taken_and_names_who_is_awaited(is_compiled):
    first, second, third = ranks_of([is_compiled] * 3)
    second.post(1, 1, b"same")
    third.post(1, 1, b"other")
    assert not first.come(1, 1, b"same")
    assert list(first.awaited_ranks) == [2]
    assert not first.wait(0.0)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_step_that_was_given_up_is_not_over_for_who_comes_late(is_compiled):
    first, second = ranks_of([is_compiled] * 2)
    second.post(1, 1, b"same")
    second.abandon()
    assert not first.come(1, 1, b"same")
    assert list(first.awaited_ranks) == [1]


@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_step_before_one_that_was_given_up_is_over_for_who_is_slow(is_compiled):
    slow, quick = ranks_of([is_compiled] * 2)
    slow.post(1, 1, b"same")
    assert quick.come(1, 1, b"same")
    quick.post(2, 1, b"same")
    quick.abandon()
    assert slow.wait(0.0)
    assert not slow.come(2, 1, b"same")
