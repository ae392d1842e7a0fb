"""Reductions that are started and waited for: the results and errors of plain calls, later."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.errors import BoundError, ContextError, DeadlineError, OptionError, ShapeMismatchError
from crossdevice.execution.pending import start
from crossdevice.process_groups.engines.thread_engine import Mailboxes, ThreadEngine, run_ranks
from crossdevice.process_groups.group import ProcessGroup

torch = pytest.importorskip("torch")

MAKERS = {"numpy": np.array, "torch": lambda array: torch.from_numpy(np.array(array))}


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


def replicas(make, count=3, shape=(1000,), seed=0):
    random = np.random.default_rng(seed)
    return cd.PerReplica([make(random.standard_normal(shape).astype(np.float32)) for _ in range(count)])


def bits(result):
    return [np.asarray(array).tobytes() for array in result.values]


def raise_interrupt(call, seconds):
    raise KeyboardInterrupt


class Gate(cd.CrossDeviceOps):
    """Sums what it is given once it is let through."""

    def __init__(self):
        self.open = threading.Event()

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        assert self.open.wait(60)
        return cd.RingAllReduce().reduce(reduce_op, per_replica_value, destinations, options)


def test_a_started_reduction_has_the_bits_of_a_plain_call(make):
    ops, value = cd.RingAllReduce(), replicas(make)
    bound = ops.bind("mean", value, value)
    for seed in range(3):
        for array, new in zip(value.values, replicas(make, seed=seed).values, strict=True):
            array[...] = new
        expected = bits(ops.reduce("mean", value, value))
        assert bits(bound.start().wait()) == expected
        assert bits(ops.start_reduce("mean", value, value).wait()) == expected
        assert bits(ops.start_reduce("mean", [(value, value)] * 2).wait()[1]) == expected


def test_results_go_where_they_are_to_go(make):
    ops, value = cd.DirectAllReduce(), replicas(make)
    expected = bits(ops.reduce("sum", value, value))
    out = cd.Mirrored([make(np.zeros(1000, np.float32)) for _ in range(3)])
    assert ops.start_reduce("sum", value, value, out=out).wait().values[0] is out.values[0]
    assert bits(out) == expected
    ops.bind("sum", value, value, out=value).start().wait()
    assert bits(value) == expected


def test_python_goes_on_meanwhile():
    ops, value = Gate(), replicas(np.array)
    pending = ops.start_reduce("sum", value, value)
    assert not pending.done()
    with pytest.raises(DeadlineError, match=r"has not ended in 0\.01 seconds"):
        pending.wait(0.01)
    ops.open.set()
    assert bits(pending.wait(60)) == bits(cd.RingAllReduce().reduce("sum", value, value))
    assert pending.done()
    assert pending.wait() is pending.wait()


def test_what_was_started_first_is_done_first():
    gate, value = Gate(), replicas(np.array)
    first = gate.start_reduce("sum", value, value)
    second = cd.RingAllReduce().start_reduce("sum", value, value)
    assert not second.done()
    gate.open.set()
    second.wait(60)
    assert first.done()


def test_errors_surface_where_the_results_would():
    class Failing(cd.CrossDeviceOps):
        def reduce_implementation(self, *arguments):
            raise ZeroDivisionError("of the hook")

    value = replicas(np.array)
    pending = Failing().start_reduce("sum", value, value)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="of the hook"):
            pending.wait(60)
    assert pending.done()
    with pytest.raises(ShapeMismatchError):  # before anything is started
        cd.RingAllReduce().start_reduce("sum", cd.PerReplica([np.zeros(2), np.zeros(3)]), "cpu:0")
    bound = cd.bind(list(value.values), "sum", "cpu:0")
    value.values[1].resize(10_000, refcheck=False)
    with pytest.raises(BoundError, match="replica 1"):
        bound.start().wait(60)
    with pytest.raises(BoundError, match="replica 1"):  # it was waited for: it can be called again
        bound()


@pytest.mark.parametrize("again", ["start", "__call__"])
def test_one_is_not_started_twice_before_it_is_waited_for(again):
    bound = cd.bind(list(replicas(np.array).values), "sum", "cpu:0")
    pending = bound.start()
    with pytest.raises(ContextError, match=r"call wait\(\)"):
        getattr(bound, again)()
    pending.wait()
    getattr(bound, again)()


@pytest.mark.parametrize("timeout", [-1, "1", True, float("nan")])
def test_timeouts_are_seconds(timeout):
    pending = cd.RingAllReduce().start_reduce("sum", replicas(np.array), "cpu:0")
    with pytest.raises(OptionError, match="timeout must be"):
        pending.wait(timeout)
    pending.wait()


def test_a_forked_process_starts_its_own():
    program = """
import os, numpy as np, crossdevice as cd
arrays = [np.ones(4, np.float32)] * 3
cd.bind(arrays, "sum", "cpu:0").start().wait()
child = os.fork()
total = cd.bind(arrays, "sum", "cpu:0").start().wait(60)
if child == 0:
    os._exit(0 if total[0] == 3 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout == "0\n", done.stderr


def test_a_forked_process_does_not_wait_for_what_its_parent_started():
    program = """
import os, threading, crossdevice as cd
from crossdevice.execution.pending import start
gate = threading.Event()
pending, ended = start(gate.wait), None
child = os.fork()
if child == 0:
    for ask in (pending.done, pending.wait):
        try:
            ask()
        except cd.errors.ContextError as error:
            ended = f"started in process {os.getppid()}" in str(error)
    os._exit(0 if ended else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
gate.set()
assert pending.wait()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "0\n", done.stderr


def test_ranks_make_started_and_plain_calls_in_the_order_of_their_programs():
    def program(group):
        ops = cd.CollectiveAllReduce(group=group)
        mine = np.float32([group.rank + 1])
        bound, called = (ops.bind("sum", np.float32([k * (group.rank + 1)]), "cpu:0") for k in (10, 20))
        if group.rank == 1:
            time.sleep(0.05)
        pending = [ops.start_reduce("sum", mine * k, "cpu:0") for k in (1, 2, 3)]
        later = bound.start()
        at_once = float(called()[0])  # after all that was started
        assert all(each.done() for each in (*pending, later))
        again = ops.start_reduce("sum", mine * 4, "cpu:0")
        plain = ops.reduce("max", mine, "cpu:0")
        assert again.done()
        return [float(each.wait(60)[0]) for each in (*pending, later, again)] + [at_once, float(plain[0])]

    assert run_ranks(2, program) == [[3, 6, 9, 30, 12, 60, 2]] * 2


def test_started_reductions_of_two_groups_overlap():
    boxes = Mailboxes(2)

    def program(group):
        with ProcessGroup(ThreadEngine(boxes, group.rank), timeout_seconds=60) as another:
            first, second = (cd.CollectiveAllReduce(group=each) for each in (group, another))
            started = [first.start_reduce("sum", np.float32(1), "cpu:0")] if group.rank == 0 else []
            meanwhile = float(second.start_reduce("sum", np.float32(2), "cpu:0").wait(60))
            if group.rank == 1:  # which comes to the first one when the second is done
                started.append(first.start_reduce("sum", np.float32(1), "cpu:0"))
            return [float(started[0].wait(60)), meanwhile]

    assert run_ranks(2, program) == [[2, 4]] * 2


def test_a_mismatch_between_ranks_surfaces_in_wait():
    def program(group):
        ops = cd.CollectiveAllReduce(group=group)
        pending = ops.start_reduce("sum", np.zeros(2 + group.rank, np.float32), "cpu:0")
        with pytest.raises(ShapeMismatchError, match="rank 1"):
            pending.wait(60)
        return float(ops.start_reduce("sum", np.float32(1), "cpu:0").wait(60))

    assert run_ranks(2, program) == [2, 2]


def test_nothing_is_started_in_a_replica_function():
    strategy = cd.MirroredStrategy(["cpu:0", "cpu:1"])
    bound = cd.bind([np.zeros(1, np.float32)] * 2, "sum", "cpu:0")

    def step():
        with pytest.raises(ContextError):
            bound.start()
        with pytest.raises(ContextError):
            cd.RingAllReduce().start_reduce("sum", np.zeros(1, np.float32), "cpu:0")

    strategy.run(step)


def test_what_a_thread_does_for_gpus_it_does_on_the_stream_of_the_caller(monkeypatch):
    """PyTorch's streams are those of threads; here their names stand in for them."""
    current = threading.local()

    @contextlib.contextmanager
    def stream(name):
        current.name = name
        yield
        del current.name

    for name, function in (
        ("is_initialized", lambda: True),
        ("current_stream", lambda: getattr(current, "name", "the default")),
        ("stream", stream),
    ):
        monkeypatch.setattr(torch.cuda, name, function)
    current.name = "the caller's"
    assert start(torch.cuda.current_stream).wait() == "the caller's"


def test_a_bound_reduction_whose_wait_was_interrupted_can_be_called_again(monkeypatch):
    bound = cd.bind(list(replicas(np.array).values), "sum", "cpu:0")
    total = bound().tolist()
    pending = bound.start()

    with monkeypatch.context() as patched:
        patched.setattr("crossdevice.process_groups.background.BackgroundCall.wait", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            pending.wait()
    assert bound().tolist() == total
    bound.start()  # nobody keeps what it returns
    assert bound().tolist() == total


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_started_call_that_nobody_waits_for_ends_before_the_next_one_begins(interrupted, monkeypatch):
    gate = Gate()
    before = gate.start_reduce("sum", replicas(np.array), "cpu:0")  # the worker's thread waits at it
    value = cd.PerReplica([np.float32([2]), np.float32([1])])
    bound = cd.DirectAllReduce().bind("sum", value, value, out=value)
    pending = bound.start()
    if interrupted:
        with monkeypatch.context() as patched:
            patched.setattr("crossdevice.process_groups.background.BackgroundCall.wait", raise_interrupt)
            with pytest.raises(KeyboardInterrupt):
                pending.wait()
    del pending
    threading.Timer(0.2, gate.open.set).start()
    bound()
    assert before.done()
    assert [array.tolist() for array in value.values] == [[6], [6]]


def test_between_ranks_too_a_started_call_without_its_pending_ends_first():
    def program(group):
        ops = cd.CollectiveAllReduce(group=group)
        gate = threading.Event()
        start(lambda: gate.wait(60), group)
        value = np.float32([group.rank])
        bound = ops.bind("sum", value, value, out=value)
        bound.start()
        threading.Timer(0.2, gate.set).start()
        return bound().tolist()

    assert run_ranks(2, program) == [[2.0], [2.0]]
