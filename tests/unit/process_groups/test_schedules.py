"""Faults by schedule: whoever dies, wherever, survivors name the same ranks, and never each other."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from crossdevice.errors import ProcessGroupError
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.notes import board, watch
from crossdevice.process_groups.protocol import Message
from unit.process_groups.scheduled_engine import Fault, run_schedule

INTRODUCTIONS = 2
"""Exchanges before the first call of a program."""

SIZE = 5
SEEDS = range(40)


@pytest.fixture(autouse=True)
def _less_patience(monkeypatch):
    for module in (board, watch):
        monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.02)
        monkeypatch.setattr(module, "GRACE_SECONDS", 1.0)


def gathers(group):
    for number in range(4):
        with group.call("gather", b"same") as call:
            call.all_gather(b"%d" % number)


def chain(group):
    """Each rank waits for the one before it only, so that most learn of a death from others."""
    for _ in range(4):
        with group.call("chain", b"same") as call:
            before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size
            call.exchange([Message(after, np.ones(1, np.uint8))], [Message(before, np.ones(1, np.uint8))])
    gathers(group)


def form(engine):
    return ProcessGroup(engine, timeout_seconds=60.0)


def named(text):
    """Who is said to be gone."""
    return sorted(map(int, re.findall(r"the connection to rank (\d+) \(.*?\) has ended", text)))


def check(results, dead):
    for rank, error in enumerate(results):
        if rank in dead:
            assert error is None
        else:
            assert isinstance(error, ProcessGroupError), (rank, error)
            assert named(str(error)) == sorted(dead), (rank, str(error))


@pytest.mark.parametrize("program", [gathers, chain])
@pytest.mark.parametrize("has_sent", [False, True])
@pytest.mark.parametrize("dead", [0, 3])
def test_survivors_name_the_rank_that_died(dead, has_sent, program):
    check(run_schedule(SIZE, [Fault(dead, INTRODUCTIONS + 1, None, has_sent)], program, form), {dead})


@pytest.mark.parametrize("seed", SEEDS)
def test_of_two_that_die_at_once_survivors_name_both_and_nobody_else(seed):
    schedule = random.Random(seed)
    dead = schedule.sample(range(SIZE), 2)
    exchange = INTRODUCTIONS + schedule.randrange(3)
    faults = [Fault(rank, exchange, None, schedule.random() < 0.5) for rank in dead]
    check(run_schedule(SIZE, faults, schedule.choice([gathers, chain]), form), set(dead))


@pytest.mark.parametrize("seed", SEEDS[:10])
def test_where_only_a_connection_ends_nobody_is_said_to_be_gone(seed):
    schedule = random.Random(seed)
    one, other = schedule.sample(range(SIZE), 2)
    results = run_schedule(SIZE, [Fault(one, INTRODUCTIONS + 1, other)], gathers, form)
    for error in results:
        assert isinstance(error, ProcessGroupError)
        assert named(str(error)) == []
