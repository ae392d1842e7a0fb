"""Calls that differ are told apart before data moves, and the error names the odd one out."""

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.errors import CrossDeviceError, MismatchError, ShapeMismatchError
from crossdevice.process_groups.thread_group import run_ranks


def errors_of(size, function, **options):
    """What each rank raised, as its type and text without the process."""

    def run(group):
        try:
            function(group, cd.CollectiveAllReduce(group=group))
        except CrossDeviceError as error:
            host = group.members[group.rank].partition("(")[2]
            return type(error), str(error).replace(f"({host}", "(here)")
        return None

    return run_ranks(size, run, timeout_seconds=20.0, **options)


def test_the_odd_one_out_is_named_with_its_place():
    found = errors_of(
        4,
        lambda group, ops: ops.reduce(
            "sum", {"dense": {"kernel": np.zeros((2, 3) if group.rank == 2 else (3, 2))}}, "cpu:0"
        ),
    )
    text = (
        "call 1 differs between ranks: rank 2 (here) has shape (2, 3) at value['dense']['kernel']; "
        "ranks 0, 1, 3 have (3, 2)"
    )
    assert found == [(ShapeMismatchError, text)] * 4


def test_with_two_ranks_the_other_one_is_the_odd_one():
    found = errors_of(2, lambda group, ops: ops.reduce(("sum", "max")[group.rank], np.zeros(3), "cpu:0"))
    text = (
        "call 1 differs between ranks: rank 1 (here) calls reduce MAX (accurate); "
        "rank 0 calls reduce SUM (accurate)"
    )
    assert found == [(MismatchError, text)] * 2


def test_precisions_and_packs_must_agree():
    for option in ({"precision": "fast"}, {"bytes_per_pack": 64}):

        def reduce(group, ops, option=option):
            options = cd.CommunicationOptions(**option) if group.rank else None
            ops.reduce("sum", np.zeros(3), "cpu:0", options)

        assert [error for error, _ in errors_of(2, reduce)] == [MismatchError] * 2


def test_known_calls_in_different_orders_never_mix_their_data():
    def reduce(group, ops):
        short, long = np.ones(3, np.float32), np.ones(3, np.int32)
        for value in (short, long):
            ops.reduce("sum", value, "cpu:0")
        ops.reduce("sum", (short, long)[group.rank], "cpu:0")

    for error, text in errors_of(2, reduce):
        assert error is MismatchError
        assert "calls reduce SUM (accurate) of float32 (3,)" in text
        assert "calls reduce SUM (accurate) of int32 (3,)" in text


def test_destinations_are_each_ranks_own_affair():
    def reduce(group):
        devices = cd.PerReplica([0.0] * (group.rank + 1))
        result = cd.CollectiveAllReduce(group=group).reduce("sum", np.ones(2), devices)
        return [array.tolist() for array in getattr(result, "values", (result,))]

    assert run_ranks(3, reduce) == [[[3.0, 3.0]] * (rank + 1) for rank in range(3)]


@pytest.mark.parametrize("checks", ["new", "always", "off"])
def test_a_known_call_is_not_compared_again_unless_asked(checks):
    def num_exchanges(group):
        ops = cd.CollectiveAllReduce(group=group)
        ops.reduce("sum", np.ones(2), "cpu:0")
        counted = []
        exchange = group._engine.exchange
        group._engine.exchange = lambda *args: counted.append(1) or exchange(*args)
        ops.reduce("sum", np.ones(2), "cpu:0")
        return len(counted)

    assert run_ranks(2, num_exchanges, checks=checks) == [2 if checks == "always" else 1] * 2


@pytest.mark.parametrize("precision", ["fast", "accurate"])
@pytest.mark.parametrize("checks", ["new", "off"])
def test_numbers_of_replicas_that_each_rank_knows_never_mix(precision, checks):
    options = cd.CommunicationOptions(precision=precision)

    def reduce(group, ops):
        for number in (1, 2):
            ops.reduce("mean", cd.PerReplica([np.ones(3, np.float32)] * number), "cpu:0", options)
        ops.reduce("mean", cd.PerReplica([np.ones(3, np.float32)] * (group.rank + 1)), "cpu:0", options)

    for error, text in errors_of(2, reduce, checks=checks):
        assert error is MismatchError
        assert "of float32 (3,) (1 array)" in text
        assert "of float32 (3,) (2 arrays)" in text


def test_numbers_of_replicas_may_differ_from_the_first_call_on():
    def reduce(group):
        ops = cd.CollectiveAllReduce(group=group)
        values = [cd.PerReplica([np.ones(3)] * number) for number in (1 + group.rank, 2, 2 - group.rank)]
        return [ops.reduce("sum", value, "cpu:0").tolist() for value in values]

    assert run_ranks(2, reduce) == [[[3.0] * 3, [4.0] * 3, [3.0] * 3]] * 2


def test_a_gather_takes_any_number_of_replicas_at_any_time():
    def gather(group):
        ops = cd.CollectiveAllReduce(group=group)
        numbers = (1, 1 + 2 * group.rank, 2 - group.rank, 1)
        return [
            len(ops.gather(cd.PerReplica([np.ones(3, np.float32)] * number), "cpu:0")) // 3
            for number in numbers
        ]

    assert run_ranks(2, gather) == [[2, 4, 3, 2]] * 2


@pytest.mark.parametrize("axis", [0, 1])
def test_arrays_without_elements_are_gathered_too(axis):
    def gather(group):
        ops = cd.CollectiveAllReduce(group=group)
        value = cd.PerReplica([np.zeros((3, 0)), np.zeros((3, 0))])
        return ops.gather(value, "cpu:0", axis).shape

    assert run_ranks(2, gather) == [((12, 0), (3, 0))[axis]] * 2
