"""Faults by schedule: whoever dies, wherever, survivors name the same ranks, and never each other."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from crossdevice.errors import DeadlineError, ProcessGroupError
from crossdevice.process_groups.protocol import Message
from unit.process_groups.scheduled_engine import Fault, World, run_schedule

SIZE = 5
FIRST_STEP, LAST_STEP = 14, 40
"""Of a rank: before them it forms its group, and about the last one it ends its last call."""

SOON_SECONDS = 10.0
"""By the clock of the schedule, after the last death."""

SECONDS = 0.05

WORLDS = {
    "sockets": World(SECONDS, SECONDS, SECONDS),
    "slow sockets": World(0.3, 0.3, 0.3),
    "MPI": World(SECONDS, SECONDS, SECONDS, sees_ends=False),
    "gloo": World(SECONDS, SECONDS, SECONDS, board_keeper=0),
    "gloo on three hosts": World(SECONDS, SECONDS, SECONDS, board_keeper=0, hosts=((0, 1), (2, 3))),
    "sockets and pages": World(SECONDS, SECONDS, SECONDS, hosts=((0, 1, 2), (3, 4))),
}

ALL_WORLDS = {
    **WORLDS,
    "gloo, of programs that end": World(SECONDS, SECONDS, SECONDS, board_keeper=0, ends_with_programs=True),
}
"""Also one in which those that come late find no board."""

SEEDS = [range(3), pytest.param(range(3, 500), marks=pytest.mark.more("a repetition"))]


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


def named(text):
    """Who is said to be gone."""
    found = re.findall(r"the connection to rank (\d+)(?: \([^)]*\))? has ended", text)
    return frozenset(map(int, found))


def silent(text):
    """Who is said to be silent."""
    found = re.search(r"ranks? ([0-9, ]+) ha(?:s|ve) not answered", text)
    alone = re.findall(
        r"rank (\d+)(?: \([^)]*\))? (?:has not arrived|arrived, but is not heard|is already at)", text
    )
    return frozenset(map(int, [*(found[1].split(", ") if found else ()), *alone]))


class Run:
    """What survivors of a schedule raise, by rank; those that have made all their calls are left out."""

    def __init__(self, monkeypatch, seed, faults, world, **options):
        self.about = seed, faults
        program = random.Random(seed).choice([gathers, chain])
        results, ended, self.schedule = run_schedule(
            monkeypatch, SIZE, program, seed=seed, faults=faults, world=ALL_WORLDS[world], **options
        )
        self.dead = frozenset(self.schedule.dead)
        self.raised = {rank: error for rank, error in enumerate(results) if error is not None}
        self.ended = {rank: ended[rank] for rank in self.raised}
        self.texts = {rank: str(error) for rank, error in self.raised.items()}

    def check_survivors_agree(self):
        """Also if the board has gone with its keeper, or a connection has been cut."""
        assert all(type(error) is ProcessGroupError for error in self.raised.values()), self.about
        # What a rank says and then dies may not be heard by all.
        sudden = {rank for rank in self.dead if not self.schedule.has_given_up(rank)}
        # Over a connection that was cut no farewell comes, either.
        ends = {
            rank for fault in self.about[1] if fault.peer is not None for rank in (fault.rank, fault.peer)
        }
        mute = set() if self.schedule.has_board else ends
        for text in self.texts.values():
            assert named(text) <= self.dead | mute, (self.about, text)
            assert sudden <= named(text) | silent(text), (self.about, text)
            if self.schedule.has_board:
                assert "which keeps the board" not in text, (self.about, text)
        if self.schedule.has_board:
            assert len({named(text) & sudden for text in self.texts.values()}) <= 1, (self.about, self.texts)


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
@pytest.mark.parametrize("world", ALL_WORLDS)
def test_survivors_of_one_or_two_deaths_agree_soon_on_who_is_gone(world, seeds, monkeypatch):
    for seed in seeds:
        pick = random.Random(seed)
        step = pick.randrange(FIRST_STEP, LAST_STEP)
        ranks = pick.sample(range(SIZE), pick.choice([1, 2, 2]))
        faults = [Fault(rank, step + pick.randrange(3)) for rank in ranks]
        run = Run(monkeypatch, seed, faults, world)
        run.check_survivors_agree()
        for rank, time in run.ended.items():
            assert time < max(run.schedule.dead.values()) + SOON_SECONDS, (run.about, run.texts[rank])


@pytest.mark.parametrize(
    "seeds", [range(5), pytest.param(range(5, 100), marks=pytest.mark.more("a repetition"))], ids=str
)
@pytest.mark.parametrize("world", ["sockets", "slow sockets", "sockets and pages", "gloo"])
def test_where_ends_of_connections_are_seen_all_name_both_that_died(world, seeds, monkeypatch):
    """Also if one of them has given up because of the other one, and dies before it hangs up."""
    for seed in seeds:
        pick = random.Random(seed)
        step = pick.randrange(FIRST_STEP, LAST_STEP - 10)
        ranks = pick.sample(range(SIZE), 2)
        faults = [Fault(ranks[0], step), Fault(ranks[1], step + pick.randrange(12))]
        run = Run(monkeypatch, seed, faults, world)
        sudden = {rank for rank in run.dead if not run.schedule.has_given_up(rank, and_left=True)}
        for text in run.texts.values():
            assert sudden <= named(text) <= run.dead, (run.about, text)


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_where_only_a_connection_ends_nobody_is_said_to_be_gone(world, seeds, monkeypatch):
    for seed in seeds:
        pick = random.Random(seed)
        one, other = pick.sample(range(SIZE), 2)
        run = Run(monkeypatch, seed, [Fault(one, pick.randrange(FIRST_STEP, LAST_STEP), other)], world)
        assert not any(map(named, run.texts.values())), (run.about, run.texts)
        assert all(time < SOON_SECONDS for time in run.ended.values()), run.about


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_a_connection_that_ends_while_a_rank_dies_makes_nobody_else_guilty(world, seeds, monkeypatch):
    for seed in seeds:
        pick = random.Random(seed)
        one, other, dead = pick.sample(range(SIZE), 3)
        step = pick.randrange(FIRST_STEP, LAST_STEP)
        faults = [Fault(one, step, other), Fault(dead, step + pick.randrange(3))]
        Run(monkeypatch, seed, faults, world).check_survivors_agree()


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_that_is_late_learns_who_has_died_meanwhile(world, seeds, monkeypatch):
    for seed in seeds:
        pick = random.Random(seed)
        late, dead = pick.sample(range(SIZE), 2)
        step = pick.randrange(FIRST_STEP, LAST_STEP)
        seconds = pick.choice([1.0, 3.0, 30.0, 200.0])
        faults = [Fault(late, step, None, seconds), Fault(dead, step + pick.randrange(-3, 4))]
        Run(monkeypatch, seed, faults, world).check_survivors_agree()


@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(2, 50), marks=pytest.mark.more("a repetition"))], ids=str
)
@pytest.mark.parametrize("world", WORLDS)
def test_a_late_rank_is_waited_for_until_the_deadline_and_raises_with_the_others(world, seeds, monkeypatch):
    for seed in seeds:
        pick = random.Random(seed)
        late, step = pick.randrange(SIZE), pick.randrange(FIRST_STEP, LAST_STEP - 15)
        in_time = Run(monkeypatch, seed, [Fault(late, step, None, 20.0)], world, timeout_seconds=30.0)
        assert in_time.raised == {}, in_time.about
        run = Run(monkeypatch, seed, [Fault(late, step, None, 100.0)], world, timeout_seconds=30.0)
        assert len(run.raised) == SIZE, run.about
        assert type(run.raised[late]) is DeadlineError, (run.about, run.texts)
        assert sum(type(error) is DeadlineError for error in run.raised.values()) >= 2, (run.about, run.texts)


def test_a_seed_is_the_same_run_every_time(monkeypatch):
    faults = [Fault(1, 20), Fault(3, 21)]
    runs = [Run(monkeypatch, 7, faults, "gloo on three hosts") for _ in range(2)]
    assert runs[0].texts == runs[1].texts
    assert runs[0].ended == runs[1].ended
    assert runs[0].schedule.steps == runs[1].schedule.steps
