"""Faults happen where, when and to whom a test wants them, and nowhere else."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

import crossdevice as cd
from crossdevice.errors import DeadlineError, OptionError, ReplicaError
from crossdevice.testing import faults, run_ranks


def value(count=3):
    return cd.PerReplica([np.float32([number, 1]) for number in range(1, count + 1)])


def seven(array):
    array[:] = 7
    return array


def strategy():
    return cd.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])


def meeting(x):
    return cd.get_replica_context().all_reduce("sum", x)


CALLS = {
    "reduce": lambda ops, given: ops.reduce("sum", given, "cpu:0").tolist(),
    "reduce by name": lambda ops, given: ops.reduce(
        reduce_op="sum", per_replica_value=given, destinations="cpu:0"
    ).tolist(),
    "batch_reduce": lambda ops, given: ops.batch_reduce("sum", [(given, "cpu:0")])[0].tolist(),
    "structure": lambda ops, given: ops.reduce("sum", {"w": [given]}, "cpu:0")["w"][0].tolist(),
    "bind": lambda ops, given: ops.bind("sum", given, "cpu:0")().tolist(),
    "bind a batch": lambda ops, given: ops.bind("sum", [(given, "cpu:0")])()[0].tolist(),
    "start_reduce": lambda ops, given: ops.start_reduce("sum", given, "cpu:0").wait().tolist(),
    "function": lambda ops, given: cd.reduce(given, "sum", algorithm=ops).tolist(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_algorithm_gets_wrong_or_missing_components(call):
    ops, given = cd.RingAllReduce(), value()
    with faults(ops, replica=1, corrupt=seven) as injected:
        assert call(ops, given) == [11, 9]
    with faults(ops, replica=1, drop=True):
        assert call(ops, given) == [4, 2]
    assert call(ops, given) == [6, 3]
    assert injected.count == 1
    assert given.values[1].tolist() == [2, 1]


def test_the_weight_of_a_component_that_is_missing_is_missing_too():
    ops = cd.RingAllReduce()
    with faults(ops, replica=1, drop=True):
        assert ops.reduce("mean", value(), "cpu:0", weights=[1.0, 5.0, 3.0]).tolist() == [2.5, 1]


def test_gathers_and_sparse_rows_are_corrupted_too():
    ops = cd.DirectAllReduce()
    rows = cd.IndexedSlices(np.ones((1, 2), np.float32), np.array([3]), (4, 2))
    with faults(ops, replica=1, corrupt=seven):
        assert ops.gather(value(2), "cpu:0").tolist() == [1, 1, 7, 7]
        assert ops.reduce("sum", cd.PerReplica([rows, rows]), "cpu:0").values.tolist() == [[1, 1], [7, 7]]
        tensors = cd.PerReplica([torch.ones(1), torch.ones(1)])
        assert ops.reduce("sum", tensors, tensors, out=tensors).values[0].tolist() == [8]


def test_only_the_named_calls_go_wrong_and_the_last_block_ends_its_own_faults_only():
    ops = cd.TreeAllReduce()
    with faults(ops, replica=0, corrupt=seven, calls=[1]):
        with faults(ops, raises=TimeoutError("late"), calls=[2]) as inner:
            sums = [CALLS["reduce"](ops, value(2)) for _ in range(2)]
            with pytest.raises(TimeoutError, match="late"):
                CALLS["reduce"](ops, value(2))
        assert CALLS["reduce"](ops, value(2)) == [3, 2]
    assert sums == [[3, 2], [9, 8]]
    assert inner.count == 1
    assert "reduce" not in vars(ops)


def test_a_replica_raises_and_the_strategy_works_again():
    three = strategy()
    with faults(three, replica=2, raises=ZeroDivisionError("out of memory"), calls=[1]) as injected:
        three.run(meeting, args=(value(),))
        with pytest.raises(ZeroDivisionError, match="out of memory"):
            three.run(meeting, args=(value(),))
        three.run(meeting, args=(value(),))
    assert injected.count == 1


def test_a_replica_that_is_dropped_or_late_is_missed():
    three = strategy()
    with faults(three, replica=1, drop=True), pytest.raises(ReplicaError):
        three.run(meeting, args=(value(),))
    options = cd.CommunicationOptions(timeout_seconds=0.3)
    with faults(three, replica=1, delay=1.0), pytest.raises(DeadlineError, match="replica 1"):
        three.run(meeting, args=(value(),), options=options)
    start = time.monotonic()
    with faults(three, replica=1, delay=0.05):
        three.run(meeting, args=(value(),))
    assert time.monotonic() - start >= 0.05


def test_a_replica_brings_wrong_numbers_inside_and_outside_of_functions():
    three = strategy()
    with faults(three, replica=1, corrupt=seven, calls=[1]) as injected:
        for expected in ([6, 3], [11, 9], [6, 3]):
            found = three.run(meeting, args=(value(),))
            assert [each.tolist() for each in found.values] == [expected] * 3
            assert three.reduce("sum", value(), axis=None).tolist() == expected
    assert injected.count == 2


def test_replicas_are_numbered_over_all_processes():
    def program(group):
        two = cd.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"], group=group)
        with faults(two, replica=3, corrupt=seven) as injected:
            found = two.run(meeting, args=(value(2),))
        return found.values[0].tolist(), injected.count

    assert run_ranks(2, program) == [([11, 10], 0), ([11, 10], 1)]


def test_a_rank_of_an_algorithm_brings_wrong_numbers():
    def program(group):
        ops = cd.CollectiveAllReduce(group=group)
        with faults(ops, rank=1, replica=0, corrupt=seven):
            return ops.reduce("sum", np.float32([1]), "cpu:0").tolist()

    assert run_ranks(2, program) == [[8], [8]]


def test_what_a_rank_sends_is_corrupted():
    def flip(sent):
        sent[-1] ^= 1
        return sent

    def program(group):
        ops = cd.CollectiveAllReduce(group=group)
        with faults(group, rank=1, corrupt=flip, calls=[1]) as injected:
            totals = [int(ops.reduce("sum", np.uint8(2), "cpu:0")) for _ in range(3)]
        return totals, injected.count

    (totals, none), (_, one) = run_ranks(2, program, checks="off")
    assert totals == [4, 5, 4]
    assert (none, one) == (0, 1)


@pytest.mark.parametrize(
    ("fault", "seconds", "mine", "others"),
    [
        # What the others sent has come, and is enough for the rank itself.
        ({"drop": True}, 1.0, type(None), DeadlineError),
        ({"delay": 2.0}, 1.0, type(None), DeadlineError),
        ({"raises": ZeroDivisionError("no examples")}, 60.0, ZeroDivisionError, cd.errors.MismatchError),
    ],
    ids=["drop", "delay", "raises"],
)
def test_a_rank_that_fails_is_missed_by_the_others(fault, seconds, mine, others, monkeypatch):
    for module in ("notes.board", "notes.watch"):
        monkeypatch.setattr(f"crossdevice.process_groups.{module}.GRACE_SECONDS", 0.3)
    done = threading.Barrier(3)

    def program(group):
        ops = cd.CollectiveAllReduce(group=group)
        ops.reduce("sum", np.ones(2), "cpu:0")
        options = cd.CommunicationOptions(timeout_seconds=seconds)
        with faults(group, rank=2, **fault):
            try:
                ops.reduce("sum", np.ones(2), "cpu:0", options)
            except Exception as error:
                return error
            finally:
                done.wait(120)

    errors = run_ranks(3, program)
    assert [type(error) for error in errors] == [others, others, mine]
    if "drop" not in fault:
        assert all("rank 2 (" in str(error) for error in errors[:2])


@pytest.mark.parametrize(
    ("target", "arguments", "text"),
    [
        (cd.RingAllReduce(), {}, "no fault was named"),
        (cd.RingAllReduce(), {"drop": True}, "replica must be a whole number, got None"),
        (cd.RingAllReduce(), {"replica": -1, "drop": True}, "replica must be 0 or more"),
        (cd.RingAllReduce(), {"replica": 0, "corrupt": 3}, "corrupt must be a function"),
        (cd.RingAllReduce(), {"raises": "boom"}, "raises must be an exception"),
        (cd.RingAllReduce(), {"delay": -1}, "delay must be a number of seconds"),
        (cd.RingAllReduce(), {"delay": 1, "calls": ["first"]}, "each of calls must be a whole number"),
        (strategy(), {"drop": True}, "replica must be a whole number"),
        (strategy(), {"replica": 3, "drop": True}, "replica 3 does not exist: there are 3"),
        (strategy(), {"replica": 0, "rank": 1, "drop": True}, "a strategy has replicas"),
        ("ring", {"delay": 1}, "faults happen in a strategy, an algorithm or a group; got a str"),
    ],
)
def test_faults_that_could_not_happen_are_refused(target, arguments, text):
    with pytest.raises(OptionError, match=text):
        faults(target, **arguments)


def test_replicas_that_a_value_does_not_have_are_refused():
    ops = cd.RingAllReduce()
    with faults(ops, replica=2, corrupt=seven), pytest.raises(OptionError, match=r"replica 2 .* has 2"):
        ops.reduce("sum", value(2), "cpu:0")
    with faults(ops, replica=0, drop=True), pytest.raises(OptionError, match="only replica"):
        ops.reduce("sum", value(1), "cpu:0")
