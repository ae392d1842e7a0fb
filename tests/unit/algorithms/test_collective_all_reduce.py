"""Between processes as little is sent as a docstring says, and the constructor's numbers fit together."""

import re
import threading
import time

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.errors import DeadlineError, MismatchError, OptionError, ProcessGroupError
from crossdevice.process_groups.engines.thread_engine import run_ranks


def all_reduced(ops, value):
    return ops.reduce("sum", value, value)


def sent_bytes(num_processes, num_devices, num_elements, call=all_reduced, **options):
    """What each process sends for one sum of float32."""

    def run(group):
        ops = cd.CollectiveAllReduce(group=group, options=cd.CommunicationOptions(**options))
        value = cd.PerReplica([np.ones(num_elements, np.float32)] * num_devices)
        call(ops, value)
        sent = []
        exchange = group._engine.exchange

        def counted(sends, *rest):
            sent.extend(message.memory.nbytes for message in sends)
            exchange(sends, *rest)

        group._engine.exchange = counted
        call(ops, value)
        return sum(sent)

    return run_ranks(num_processes, run)


@pytest.mark.parametrize("num_processes", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("precision", ["fast", "accurate", "exact"])
def test_one_replica_each_sends_the_bytes_of_a_ring(num_processes, precision):
    elements = 64 * num_processes * 300
    ring = 2 * (num_processes - 1) * 4 * elements // num_processes
    assert sent_bytes(num_processes, 1, elements, precision=precision) == [ring] * num_processes


@pytest.mark.parametrize("num_processes", [2, 3, 5])
def test_a_reduce_scatter_sends_half_the_bytes_of_a_ring(num_processes):
    elements = 64 * num_processes * 300
    half = (num_processes - 1) * 4 * elements // num_processes
    assert (
        sent_bytes(num_processes, 1, elements, lambda ops, value: ops.reduce_scatter("sum", value))
        == [half] * num_processes
    )


def test_several_replicas_send_one_partial_sum_as_wide_as_the_accumulator():
    elements = 64 * 2 * 300
    half = elements // 2
    assert sent_bytes(2, 4, elements) == [half * 8 + half * 4] * 2
    assert sent_bytes(2, 4, elements, precision="fast") == [half * 4 + half * 4] * 2
    assert sent_bytes(2, 4, elements, precision="exact") == [4 * half * 4 + half * 4] * 2


def test_an_explanation_says_what_is_sent():
    def run(group):
        ops = cd.CollectiveAllReduce(group=group)
        value = cd.PerReplica([np.ones(64 * 2 * 300, np.float32)] * 4)
        small = cd.PerReplica([np.ones(8, np.float32)] * 4)
        return [ops.explain(value, value), ops.explain(small, small)]

    large, small = run_ranks(2, run)[1]
    lines = large.splitlines()
    assert [line for line in lines if not line.startswith("  not by")] == [
        "SUM of 4 replicas in each of 2 processes on threads, precision accurate; this is rank 1",
        "not through shared memory: several ranks are threads of one process",
        "1 value by messages",
        "pack 0 (1 value of float32): sends shards of one partial result in float64 to their owners, "
        f"and its own shard of the result to every other process, {sent_bytes(2, 4, 64 * 2 * 300)[1]} bytes",
        "  rank 1 sums input 1.0.0[0:38400] input 1.0.1[0:38400] input 1.0.2[0:38400] input 1.0.3[0:38400] "
        "to partial 1.0.0[0:38400]",
        "  rank 1 sums partial 0.0.0[19200:38400] partial 1.0.0[19200:38400] to result 0.0.0[19200:38400] "
        "result 1.0.0[19200:38400]",
    ]
    assert (
        "  not by windows: ranks do not all share memory: several ranks are threads of one process" in lines
    )
    assert "sends one partial result in float64 to every other process, 64 bytes\n" in small


def test_an_explanation_counts_one_replica_and_several_values():
    def run(group):
        ops = cd.CollectiveAllReduce(group=group)
        arrays = [np.ones(8, np.float32), np.ones(3, np.float32)]
        alone, several = cd.PerReplica(arrays[:1]), cd.PerReplica([arrays])
        return [ops.explain(alone, alone), ops.explain(several, several)]

    alone, several = run_ranks(2, run)[0]
    assert alone.startswith("SUM of 1 replica in each of 2 processes on threads, ")
    assert "\n1 value by messages\n" in alone
    assert "\npack 0 (1 value of float32): " in alone
    assert "\n2 values by messages\n" in several
    assert "\npack 0 (2 values of float32): " in several


def test_small_values_go_to_everyone_at_once():
    assert sent_bytes(3, 1, 10) == [2 * 10 * 4] * 3


def test_numbers_must_fit_together():
    assert cd.CollectiveAllReduce(["cpu:0", "cpu:1"], 2).group is None
    with pytest.raises(OptionError, match="group_size is 3; 2 devices in each of 1 process are 2"):
        cd.CollectiveAllReduce(["cpu:0", "cpu:1"], 3)
    with pytest.raises(OptionError, match="group must be a ProcessGroup or None, got str"):
        cd.CollectiveAllReduce(group="gloo")


def test_its_options_are_defaults_of_every_call():
    ops = cd.CollectiveAllReduce(options=cd.CommunicationOptions(precision="fast"))
    value = cd.PerReplica([np.full(2, number, np.float16) for number in (2048, 1, 1)])
    assert ops.reduce("sum", value, "cpu:0").tolist() == [2048.0] * 2
    exact = cd.CommunicationOptions(precision="exact")
    assert ops.reduce("sum", value, "cpu:0", exact).tolist() == [2050.0] * 2


def test_a_broadcast_without_a_rank_asks_nobody():
    def run(group):
        ops = cd.CollectiveAllReduce(group=group)
        own = ops.broadcast(np.float32(group.rank), "cpu:0")
        with pytest.raises(OptionError, match="from_rank must be a rank from 0 to 1, got 2"):
            ops.broadcast(np.float32(1), "cpu:0", from_rank=2)
        return float(own)

    assert run_ranks(2, run) == [0.0, 1.0]


def test_a_broadcast_from_a_rank_can_be_bound_and_started():
    def run(group):
        ops, value, out = (
            cd.CollectiveAllReduce(group=group),
            np.zeros(2, np.float32),
            np.empty(2, np.float32),
        )
        bound = ops.bound.broadcast(value, "cpu:0", out=out, from_rank=1)
        found = []
        for step in range(3):
            value[:] = 10 * step + group.rank
            assert bound() is out
            found.append(out.tolist())
        pending = ops.started.broadcast(value, "cpu:0", from_rank=0)
        found.append(pending.wait().tolist())
        return found

    assert run_ranks(2, run) == [[[1, 1], [11, 11], [21, 21], [20, 20]]] * 2


def test_a_broadcast_from_a_rank_needs_an_algorithm_that_works_between_processes():
    alone = cd.CollectiveAllReduce().bound.broadcast(np.float32([3]), "cpu:0", from_rank=0)
    assert alone().tolist() == [3]
    with pytest.raises(
        OptionError, match="from_rank=0 with RingAllReduce, which works in this process alone"
    ):
        cd.RingAllReduce().bound.broadcast(np.float32([3]), "cpu:0", from_rank=0)


def test_nccl_that_cannot_be_had_is_said_once(caplog):
    def run(group):
        ops = cd.CollectiveAllReduce(group=group, options=cd.CommunicationOptions(implementation="nccl"))
        return [ops.reduce("sum", np.ones(2), "cpu:0").tolist() for _ in range(3)]

    assert run_ranks(1, run) == [[[1.0, 1.0]] * 3]
    (record,) = caplog.records
    assert "everything else goes through threads" in record.getMessage()


ROWS = cd.IndexedSlices(np.ones((1, 2), np.float32), np.array([0]), (4, 2))


@pytest.mark.parametrize(("more", "exchanges"), [([], 3), ([ROWS], 6)], ids=["arrays", "arrays and rows"])
def test_memory_that_is_written_to_stays_as_it_was_when_a_rank_is_lost(more, exchanges):
    def run(group):
        ops = cd.CollectiveAllReduce(
            group=group, options=cd.CommunicationOptions(bytes_per_pack=4, timeout_seconds=0.5)
        )
        values = [np.full(20_000, number, np.float32) for number in range(3)]
        pairs = [(value, "cpu:0") for value in values + more]
        ops.batch_reduce("sum", pairs)
        exchange = group._engine.exchange
        left = iter(range(exchanges))

        def lossy(*args):
            if group.rank == 1 and next(left, None) is None:
                raise OSError("the cable is out")
            exchange(*args)

        group._engine.exchange = lossy
        with pytest.raises((ProcessGroupError, DeadlineError)):
            ops.batch_reduce("sum", pairs, out=[*values, *(None for _ in more)])
        return [set(value.tolist()) for value in values]

    assert run_ranks(2, run) == [[{0.0}, {1.0}, {2.0}]] * 2


@pytest.mark.parametrize("dtype", ["float32", "complex64", "int64"])
def test_large_results_are_received_where_they_are_wanted(dtype):
    """Without a copy; where `out` is the value itself, a copy keeps it whole until nothing can fail."""

    def run(group):
        ops = cd.CollectiveAllReduce(group=group)
        received = []
        exchange = group._engine.exchange

        def watched(sends, receives, *args):
            received.extend(memory for _, memory in receives)
            exchange(sends, receives, *args)

        group._engine.exchange = watched
        value = cd.PerReplica([np.arange(20_000).astype(dtype) + k for k in range(2)])
        outs = cd.PerReplica([np.empty(20_000, dtype) for _ in range(2)])
        ops.reduce("sum", value, value, out=outs)
        is_direct = any(np.may_share_memory(outs.values[0], memory) for memory in received)
        ops.reduce("sum", value, value, out=value)
        in_place = any(np.may_share_memory(value.values[0], memory) for memory in received)
        expected = 4 * np.arange(20_000).astype(dtype) + 2
        is_right = all(np.array_equal(array, expected) for array in (*outs.values, *value.values))
        return is_direct, in_place, is_right

    assert run_ranks(2, run) == [(True, False, True)] * 2


BAD = cd.PerReplica([np.ones(3, np.float32), np.ones(2, np.float32)])


def greatest(parts):
    """Of all elements, which is the same on all ranks, as the parts are not."""
    return float(np.concatenate(parts.values, axis=-1).max())


CALLS = {
    "reduce": lambda ops, value: ops.reduce("sum", value, "cpu:0").tolist(),
    "batch_reduce": lambda ops, value: ops.batch_reduce("sum", [(value, "cpu:0")])[0].tolist(),
    "gather": lambda ops, value: ops.gather(value, "cpu:0", axis=1).tolist(),
    "reduce_scatter": lambda ops, value: greatest(ops.reduce_scatter("sum", value)),
    "all_to_all": lambda ops, value: greatest(ops.all_to_all(value, axis=1)),
    "broadcast": lambda ops, value: ops.broadcast(value, "cpu:0", from_rank=1).tolist(),
}


def good(call, step):
    array = np.full((1, 3) if call in ("gather", "all_to_all") else 3, step, np.float32)
    return array if call == "broadcast" else cd.PerReplica([array, array])


def bad(call):
    return ROWS if call == "broadcast" else BAD


def outcomes(group, call, refusing_ranks):
    """What each of four calls ended with, the second of which has a bad value on some ranks."""
    ops = cd.CollectiveAllReduce(group=group, options=cd.CommunicationOptions(timeout_seconds=5.0))
    found = []
    for step in range(4):
        is_bad = step == 1 and group.rank in refusing_ranks
        try:
            found.append(CALLS[call](ops, bad(call) if is_bad else good(call, step)))
        except cd.errors.CrossDeviceError as error:
            found.append(error)
    return found


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_one_rank_refuses_is_never_taken_for_its_next_one(call):
    others, refusing = run_ranks(2, lambda group: outcomes(group, call, [1]))
    assert others[0] == refusing[0]
    assert isinstance(others[1], MismatchError)
    assert re.search(r"rank 1 \(.*\) calls nothing \(\w+Error: .*; rank 0 \(.*\) calls", str(others[1]))
    assert isinstance(others[2], ProcessGroupError)
    assert not isinstance(refusing[1], ProcessGroupError)
    if call == "broadcast":
        return  # whose root waits for nobody
    assert isinstance(refusing[2], ProcessGroupError)
    assert re.search(r"rank 0 \(.*\) gave up at call 2 \(calls differ\)", str(refusing[2]))


@pytest.mark.parametrize("call", CALLS)
def test_after_a_call_that_all_ranks_refuse_the_next_ones_fit(call):
    first, second = run_ranks(2, lambda group: outcomes(group, call, [0, 1]))
    assert isinstance(first[1], cd.errors.CrossDeviceError)
    assert [type(found) for found in first] == [type(found) for found in second]
    assert [first[step] for step in (0, 2, 3)] == [second[step] for step in (0, 2, 3)]
    assert not any(isinstance(first[step], Exception) for step in (0, 2, 3))


def test_a_rank_that_comes_late_to_a_call_is_told_that_another_refused_it():
    def run(group):
        ops = cd.CollectiveAllReduce(group=group, options=cd.CommunicationOptions(timeout_seconds=20.0))
        if group.rank == 0:
            time.sleep(1.0)  # by then the other waits in its next call, and its note says so
        with pytest.raises(cd.errors.CrossDeviceError) as first:
            ops.reduce("sum", BAD if group.rank == 1 else good("reduce", 1), "cpu:0")
        if group.rank == 1:
            with pytest.raises(ProcessGroupError, match="gave up at call 1"):
                ops.reduce("sum", good("reduce", 2), "cpu:0")
        return str(first.value)

    late, _ = run_ranks(2, run)
    assert "calls nothing (ShapeMismatchError" in late


def test_calls_for_parts_keep_to_their_deadline_and_name_who_is_missing():
    done = threading.Barrier(3)
    calls = {
        "reduce_scatter SUM": lambda ops, options: ops.reduce_scatter("sum", np.ones(6), 0, options),
        "all_to_all": lambda ops, options: ops.all_to_all(np.ones(6), 0, options),
    }

    def run(group, call):
        error = None
        if group.rank != 1:
            ops = cd.CollectiveAllReduce(group=group)
            with pytest.raises(cd.errors.DeadlineError) as caught:
                call(ops, cd.CommunicationOptions(timeout_seconds=0.3))
            error = str(caught.value)
        done.wait()
        return error

    for name, call in calls.items():
        first, _, last = run_ranks(3, lambda group, call=call: run(group, call))
        for error in (first, last):
            assert re.search(
                rf"call 1 \({name}.* was not done in 0.3 seconds .*: rank 1 \(.* has not arrived", error
            )


def test_in_a_group_hooks_broadcast_but_do_not_reduce():
    class Shouting(cd.CollectiveAllReduce):
        def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
            raise AssertionError

        def broadcast_implementation(self, tensor, destinations):
            return super().broadcast_implementation(tensor * 10, destinations)

    def program(group):
        ops = Shouting(group=group)
        total = ops.reduce("sum", np.float32([group.rank]), "cpu:0")
        copies = [ops.broadcast(total, "cpu:0"), ops.bound.broadcast(total, "cpu:0")()]
        return [copy.tolist() for copy in copies]

    assert run_ranks(2, program) == [[[10.0], [10.0]]] * 2
