"""Calls that differ are told apart before data moves, and the error names the odd one out."""

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.errors import (
    CrossDeviceError,
    DtypeError,
    MismatchError,
    ShapeMismatchError,
    StructureMismatchError,
)
from crossdevice.execution.processes import agreement
from crossdevice.process_groups.engines.thread_engine import run_ranks


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
        "the other 3 have (3, 2)"
    )
    assert found == [(ShapeMismatchError, text)] * 4


def test_with_two_ranks_the_other_one_is_the_odd_one():
    found = errors_of(2, lambda group, ops: ops.reduce(("sum", "max")[group.rank], np.zeros(3), "cpu:0"))
    text = (
        "call 1 differs between ranks: rank 1 (here) calls reduce MAX (accurate); "
        "rank 0 (here) calls reduce SUM (accurate)"
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


@pytest.mark.parametrize("checks", ["new", "off"])
def test_a_broadcast_from_different_ranks_is_noticed_by_all_of_them(checks):
    """Where sends end before anybody receives, each would think that its own value has gone to all."""

    def broadcast(group, ops):
        for rank in (0, 1) if checks == "new" else ():
            ops.broadcast(np.zeros(2), "cpu:0", from_rank=rank)
        ops.broadcast(np.full(2, float(group.rank)), "cpu:0", from_rank=group.rank)

    for error, text in errors_of(2, broadcast, checks=checks):
        assert error is MismatchError
        assert "calls broadcast from rank 0" in text
        assert "calls broadcast from rank 1" in text


@pytest.mark.parametrize("empty", [np.zeros(0), {}], ids=["no elements", "no leaves"])
@pytest.mark.parametrize("checks", ["new", "off"])
def test_a_known_call_without_data_is_not_done_while_others_send(empty, checks):
    def reduce(group, ops):
        for value in (empty, np.ones(3)) if checks == "new" else ():
            ops.reduce("sum", value, "cpu:0")
        ops.reduce("sum", empty if group.rank == 1 else np.ones(3), "cpu:0")

    for error, text in errors_of(3, reduce, checks=checks):
        assert error is MismatchError
        assert "rank 1 (here) calls reduce SUM" in text


def test_an_empty_broadcast_is_not_done_while_others_send():
    def broadcast(group, ops):
        for value in (np.zeros(0), np.ones(3)):
            ops.broadcast(value, "cpu:0", from_rank=0)
        ops.broadcast(np.zeros(0) if group.rank == 1 else np.ones(3), "cpu:0", from_rank=0)

    assert [error for error, _ in errors_of(2, broadcast)] == [MismatchError] * 2


def test_a_batch_that_differs_is_told_by_its_entry():
    def reduce(group, ops):
        second = np.zeros(3) if group.rank != 1 else {"w": np.zeros(3)}
        ops.batch_reduce("sum", [(np.zeros(2), "cpu:0"), (second, "cpu:0")])

    text = (
        "call 1 differs between ranks: rank 1 (here) has structure {'w': *} in entry 1 of the "
        "batch; the other 2 have a single array"
    )
    assert errors_of(3, reduce) == [(StructureMismatchError, text)] * 3


def test_a_leaf_of_a_batch_is_told_by_its_entry():
    def reduce(group, ops):
        second = {"w": np.zeros(3 + group.rank // 2)}
        ops.batch_reduce("sum", [({"w": np.zeros(2)}, "cpu:0"), (second, "cpu:0")])

    text = (
        "call 1 differs between ranks: rank 2 (here) has shape (4,) at value['w'] of entry 1; "
        "the other 2 have (3,)"
    )
    assert errors_of(3, reduce) == [(ShapeMismatchError, text)] * 3


def test_batches_of_different_lengths_are_counted():
    def reduce(group, ops):
        ops.batch_reduce("sum", [(np.zeros(2), "cpu:0")] * (2 - group.rank))

    text = (
        "call 1 differs between ranks: rank 1 (here) has 1 value in its batch; "
        "rank 0 (here) has 2 values in its batch"
    )
    assert errors_of(2, reduce) == [(StructureMismatchError, text)] * 2


def test_different_dense_shapes_are_a_matter_of_shapes():
    def reduce(group, ops):
        rows = cd.IndexedSlices(np.ones((1, 2)), np.array([0]), (3 + group.rank, 2))
        ops.reduce("sum", rows, "cpu:0")

    text = "call 1 differs between ranks: rank 1 (here) has dense_shape (4, 2); rank 0 (here) has (3, 2)"
    assert errors_of(2, reduce) == [(ShapeMismatchError, text)] * 2


def test_an_axis_may_be_counted_from_either_end():
    def gather(group):
        ops = cd.CollectiveAllReduce(group=group)
        return ops.gather({"w": np.ones((2, 3))}, "cpu:0", (1, -1)[group.rank])["w"].shape

    assert run_ranks(2, gather) == [(2, 6)] * 2


def test_kinds_of_call_are_remembered_within_bounds(monkeypatch):
    monkeypatch.setattr(agreement, "MAX_KINDS", 4)

    def reduce(group):
        ops = cd.CollectiveAllReduce(group=group)
        for length in (*range(10), *range(10)):
            assert ops.reduce("sum", np.ones(length), "cpu:0").tolist() == [2.0] * length
        return len(group.agreed)

    assert max(run_ranks(2, reduce)) <= 4


@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "broadcast"])
def test_objects_are_refused_before_anything_is_sent(name):
    def program(group):
        ops = cd.CollectiveAllReduce(group=group)
        call = {"all_gather": ops.all_gather, "all_to_all": ops.all_to_all}.get(
            name, lambda value: ops.broadcast(value, "cpu:0", from_rank=1)
        )
        with pytest.raises(DtypeError, match=r"cannot send dtype object at value\['a'\]: "):
            call({"b": np.ones(2), "a": np.array([{}, None])})
        return float(ops.reduce("sum", np.float32(1), "cpu:0"))

    assert run_ranks(2, program, timeout_seconds=20.0) == [2.0, 2.0]
