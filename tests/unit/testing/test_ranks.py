"""A function as ranks: in threads, and once in real processes, of which one is killed."""

from __future__ import annotations

import os
import pickle
import signal
import sys

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.errors import OptionError, ProcessGroupError
from crossdevice.testing import faults, ranks, run_ranks


def test_results_come_in_the_order_of_ranks():
    assert run_ranks(3, lambda group: (group.rank, group.size)) == [(0, 3), (1, 3), (2, 3)]


def test_what_ranks_raise_is_raised_or_returned():
    def fail(group):
        if group.rank == 1:
            raise ZeroDivisionError("no examples")
        with group.call("gather", b"same") as call:
            return call.all_gather(b"x")

    errors = run_ranks(2, fail, return_errors=True)
    assert [type(error) for error in errors] == [ProcessGroupError, ZeroDivisionError]
    assert "gave up: ZeroDivisionError: no examples" in str(errors[0])
    with pytest.raises(ProcessGroupError, match="no examples"):
        run_ranks(2, fail)


@pytest.mark.parametrize("size", [0, -1, 1.5, None])
def test_there_is_one_rank_or_more(size):
    with pytest.raises(OptionError, match="size must be"):
        run_ranks(size, lambda group: None)


def test_processes_can_only_be_sent_what_they_can_import():
    with pytest.raises(OptionError, match="processes cannot be sent"):
        run_ranks(2, lambda group: None, processes=True)


def answer_or_be_killed(group):
    """Rank 1 is killed; the other one notices, and forms a new group."""
    ops = cd.CollectiveAllReduce(group=group)
    with faults(group, rank=0, delay=0.01, calls=[0]) as injected:
        total = ops.reduce("sum", np.float32([group.rank + 1]), "cpu:0")
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        ops.reduce("sum", np.ones(2), "cpu:0")
    except ProcessGroupError as error:
        told = group.members[1] in str(error)
    here = cd.cluster_from_env()
    alone = cd.Cluster(**{**vars(here), "size": 1}).form_group()
    return total, injected.count, told, here.size, alone.size


@pytest.mark.skipif(sys.platform != "linux", reason="signals are named as on Linux")
def test_processes_answer_and_are_killed():
    first, second = run_ranks(2, answer_or_be_killed, processes=True, return_errors=True)
    assert first == (3.0, 1, True, 2, 1)
    assert isinstance(second, ProcessGroupError)
    assert "rank 1" in str(second)
    assert "SIGKILL" in str(second)


class Unreadable(Exception):
    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (ranks._Raised(KeyError("w")), KeyError("w")),
        (ranks._Raised(Unreadable(1, 2)), RuntimeError("Unreadable: 1 and 2")),
        (lambda: None, OptionError("what a rank returned cannot be pickled")),
    ],
)
def test_what_cannot_be_pickled_is_told_as_text(outcome, error):
    found = pickle.loads(ranks._pickled(outcome)).error
    assert type(found) is type(error)
    assert str(found).startswith(str(error))
