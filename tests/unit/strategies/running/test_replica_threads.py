"""Whatever goes wrong in a run, it is named, nothing hangs, no thread stays, and the next run works."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.errors import ContextError, DeadlineError, MismatchError, ReplicaError, ShapeMismatchError
from crossdevice.strategies.running import rendezvous

SOON = cd.CommunicationOptions(timeout_seconds=0.2)
PATIENCE_SECONDS = 60.0
"""What is done at once takes at most this long beside others that compute; what would hang takes longer."""
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
posix = pytest.mark.skipif(os.name != "posix", reason="SIGINT cannot be sent to a child there")


def context():
    return cd.get_replica_context()


def own_replica():
    return context().replica_id_in_sync_group


def replica_threads():
    """The threads of replicas that are still there after all had the time to leave."""
    return still_there(running_threads(), 5)


def still_there(threads, seconds):
    give_up = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0, give_up - time.monotonic()))
    return [thread for thread in threads if thread.is_alive()]


def watched(thing):
    """An event that is set when nobody holds the thing any more."""
    gone = threading.Event()
    weakref.finalize(thing, gone.set)
    return gone


def running_threads():
    found = [thread for thread in threading.enumerate() if thread.name.startswith("replica ")]
    return [thread for thread in found if thread not in EARLIER]


EARLIER = set()
"""Threads of strategies that other tests left behind."""


def notes_of(error):
    return "\n".join(getattr(error, "__notes__", []))


@pytest.fixture(autouse=True)
def no_thread_is_left():
    EARLIER.clear()
    EARLIER.update(running_threads())
    before = set(running_threads())
    yield
    gc.collect()
    assert not still_there(set(running_threads()) - before, 10)


@pytest.fixture
def strategy():
    made = cd.MirroredStrategy([f"cpu:{replica}" for replica in range(4)])
    yield made
    total = made.run(lambda: context().all_reduce("sum", 1.0))
    assert [float(value) for value in total.values] == [4] * 4, "the strategy must stay usable"
    made._idle.clear()  # pytest holds on to the strategy for longer than the test


@pytest.fixture
def wakes():
    """An event for replicas that sleep for ever, so that their threads end with the test."""
    event = threading.Event()
    yield event
    event.set()


# -------------------------------------------------------------------- exceptions


def test_an_exception_keeps_its_type_and_names_its_replica(strategy):
    def step():
        if own_replica() == 2:
            raise ZeroDivisionError("mine")
        context().all_reduce("sum", 1.0)

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        strategy.run(step)
    assert str(caught.value) == "mine"
    assert "raised by replica 2 (cpu:2) of 4" in notes_of(caught.value)
    assert "step" in [entry.name for entry in caught.traceback]
    assert not replica_threads()


def test_of_several_exceptions_the_first_replicas_is_raised_and_the_others_are_noted(strategy):
    has_failed = [threading.Event() for _ in range(5)]
    has_failed[4].set()

    def step():
        assert has_failed[own_replica() + 1].wait(120)  # the last replica fails first
        has_failed[own_replica()].set()
        if own_replica():
            raise ValueError(f"from {own_replica()}")
        context().all_reduce("sum", 1.0)

    with pytest.raises(ValueError, match="from 1") as caught:
        strategy.run(step)
    assert caught.value.__context__ is None
    assert "replica 2 (cpu:2) failed too: ValueError: from 2" in notes_of(caught.value)
    assert "replica 3 (cpu:3) failed too: ValueError: from 3" in notes_of(caught.value)


def test_replicas_that_wait_are_unwound_and_clean_up(strategy):
    cleaned, swallowed = [], []

    def step():
        if own_replica() == 3:
            raise LookupError
        try:
            context().all_reduce("sum", 1.0)
        except Exception as error:
            swallowed.append(error)
        finally:
            cleaned.append(own_replica())

    with pytest.raises(LookupError):
        strategy.run(step)
    assert sorted(cleaned) == [0, 1, 2]
    assert swallowed == []
    assert not replica_threads()


def test_a_replica_that_is_computing_stops_at_its_next_call(strategy):
    reached, fails = [], threading.Event()

    def step():
        if own_replica() == 0:
            fails.set()
            raise LookupError
        assert fails.wait(120)
        context().all_reduce("sum", 1.0)
        reached.append(own_replica())

    with pytest.raises(LookupError):
        strategy.run(step)
    assert reached == []
    assert not replica_threads()


def test_a_replica_that_does_not_stop_after_a_failure_is_left_behind_and_named(strategy, wakes, monkeypatch):
    monkeypatch.setattr(rendezvous, "STOP_PATIENCE_SECONDS", 0.1)

    def step():
        if own_replica() == 0:
            raise LookupError
        if own_replica() == 1:
            wakes.wait(30)

    with pytest.raises(LookupError) as caught:
        strategy.run(step)
    assert "replica 1 (cpu:1) has not stopped and is left behind at threading.py" in notes_of(caught.value)


def test_an_error_in_a_merge_function_keeps_its_type_and_names_the_call(strategy):
    def step():
        context().all_reduce("sum", 1.0)
        context().merge_call(lambda strategy: {}["missing"])

    with pytest.raises(KeyError, match="missing") as caught:
        strategy.run(step)
    assert "waiting at call 2, merge_call(" in notes_of(caught.value)
    assert not replica_threads()


def test_system_exit_in_a_replica_reaches_the_caller(strategy):
    with pytest.raises(SystemExit):
        strategy.run(sys.exit)


# -------------------------------------------------------------------- replicas that do not meet


@pytest.mark.parametrize("leaver", range(4))
def test_a_replica_that_makes_fewer_calls_is_named_at_once(strategy, leaver):
    def step():
        context().all_reduce("sum", 1.0)
        if own_replica() != leaver:
            context().all_reduce("mean", 1.0)

    started = time.monotonic()
    with pytest.raises(ReplicaError, match="different numbers of calls") as caught:
        strategy.run(step)
    assert time.monotonic() - started < PATIENCE_SECONDS
    assert f"returned: replica {leaver} (cpu:{leaver})" in str(caught.value)
    assert "waiting at call 2, all_reduce(MEAN): replica" in str(caught.value)
    assert isinstance(caught.value, RuntimeError)
    assert not replica_threads()


def test_a_certain_mismatch_does_not_wait_for_a_slow_replica(strategy, wakes, monkeypatch):
    monkeypatch.setattr(rendezvous, "STOP_PATIENCE_SECONDS", 0.1)

    def step():
        if own_replica() == 1:
            wakes.wait(30)
        if own_replica() > 1:
            context().all_reduce("sum", 1.0)

    with pytest.raises(ReplicaError, match=r"still running at threading.py:\d+ in wait: replica 1 \(cpu:1\)"):
        strategy.run(step)


def test_a_replicas_own_exception_explains_more_than_its_absence(strategy):
    leaves = threading.Event()

    def step():
        if own_replica() == 0:
            leaves.set()
            return
        if own_replica() == 3:
            assert leaves.wait(120)
            raise LookupError("the cause")
        context().all_reduce("sum", 1.0)

    with pytest.raises(LookupError, match="the cause"):
        strategy.run(step)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (lambda: context().all_gather(np.ones(2), axis=0), r"all_gather\(axis=0\)"),
        (lambda: context().all_reduce("mean", np.ones(2)), r"all_reduce\(MEAN\)"),
        (
            lambda: context().all_reduce("sum", np.ones(2), cd.CommunicationOptions(precision="exact")),
            r"all_reduce\(SUM, precision=exact\)",
        ),
        (lambda: context().merge_call(print), r"merge_call\(print\)"),
    ],
)
def test_different_calls_at_the_same_meeting_are_named(strategy, other, text):
    def step():
        context().all_reduce("sum", np.ones(2))
        return other() if own_replica() == 1 else context().all_reduce("sum", np.ones(2))

    with pytest.raises(
        MismatchError, match=rf"replica 1 \(cpu:1\) has call 2, {text}; the other 3 have all_reduce\(SUM\)"
    ):
        strategy.run(step)
    assert not replica_threads()


def test_different_structures_and_shapes_in_a_call_are_named(strategy):
    def step(own):
        return context().all_reduce("sum", own)

    trees = [{"w": np.ones(2)}, {"w": np.ones(2)}, {"v": np.ones(2)}, {"w": np.ones(2)}]
    with pytest.raises(MismatchError, match=r"replica 2 \(cpu:2\) has structure"):
        strategy.run(step, args=(cd.PerReplica(trees),))
    trees[2] = {"w": np.ones(3)}
    with pytest.raises(ShapeMismatchError, match=r"replica 2 \(cpu:2\) has shape \(3,\) at value\['w'\]"):
        strategy.run(step, args=(cd.PerReplica(trees),))


# -------------------------------------------------------------------- deadlines


@pytest.mark.parametrize("where", ["run", "all_reduce"])
def test_a_replica_that_sleeps_for_ever_is_named_within_two_seconds_of_the_deadline(strategy, wakes, where):
    woken = queue.SimpleQueue()

    def step():
        if own_replica() == 1:
            wakes.wait(10 * PATIENCE_SECONDS)
            try:
                context().all_reduce("sum", 1.0)
            except ContextError as error:
                woken.put(str(error))
        context().all_reduce("sum", 1.0, SOON if where == "all_reduce" else None)

    started = time.monotonic()
    with pytest.raises(DeadlineError, match=r"no end after 0.2 s") as caught:
        strategy.run(step, options=SOON if where == "run" else None)
    assert time.monotonic() - started < PATIENCE_SECONDS
    assert "missing, still running at threading.py" in str(caught.value)
    assert str(caught.value).endswith("in wait: replica 1 (cpu:1)")
    assert "waiting at call 1, all_reduce(SUM): replica 0 (cpu:0), replica 2 (cpu:2)" in str(caught.value)
    assert isinstance(caught.value, TimeoutError)
    assert [thread.name for thread in running_threads()] == ["replica 1 (cpu:1)"]  # Python cannot end it

    assert strategy.run(own_replica).values == (0, 1, 2, 3)  # a new thread has taken its place
    wakes.set()
    assert woken.get(timeout=120) == "replica 1 (cpu:1) called all_reduce(SUM) after its run had ended"


def test_a_deadline_that_is_met_changes_nothing(strategy):
    def step():
        return float(context().all_reduce("sum", 1.0, cd.CommunicationOptions(timeout_seconds=30)))

    result = strategy.run(step, options=cd.CommunicationOptions(timeout_seconds=30))
    assert result.values == (4.0,) * 4


def test_a_deadline_covers_runs_of_many_quick_calls(strategy):
    def step():
        while True:
            context().merge_call(lambda strategy: None)

    with pytest.raises(DeadlineError):
        strategy.run(step, options=SOON)
    assert not replica_threads()


# -------------------------------------------------------------------- Ctrl-C

INTERRUPTED = """
    import signal, sys, threading, time, traceback
    import numpy as np
    import crossdevice as cd

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a runner may ignore it

    def ready():
        print("ready", flush=True)

    def own_replica():
        return cd.get_replica_context().replica_id_in_sync_group

    def all_compute():
        if own_replica() == 1:
            ready()
        for _ in range(1500):
            time.sleep(0.001)

    def others_wait():
        if own_replica() == 1:
            ready()
            time.sleep(1.5)
        cd.get_replica_context().merge_call(lambda strategy: None)

    def merging():
        def merge(strategy):
            ready()
            time.sleep(300)
        cd.get_replica_context().merge_call(merge)

    def many_calls():
        if own_replica() == 1:
            ready()
        while True:
            cd.get_replica_context().merge_call(lambda strategy: None)

    strategy = cd.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    strategy.run(own_replica)
    try:
        strategy.run(globals()[sys.argv[1]])
    except KeyboardInterrupt as error:
        print("interrupted", getattr(error, "__notes__", ""))
    if sys.argv[1] in ("all_compute", "others_wait"):
        for thread in threading.enumerate():
            if "replica" in thread.name:
                thread.join(120)  # longer than what is left of their naps
    print("left", [thread.name for thread in threading.enumerate() if "replica" in thread.name])
    merged = strategy.run(lambda: cd.get_replica_context().merge_call(lambda _, x: x, (own_replica(),)))
    print("usable", merged.values)
"""


@posix
@pytest.mark.parametrize("point", ["all_compute", "others_wait", "merging", "many_calls"])
def test_ctrl_c_works_at_every_point(point):
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(INTERRUPTED), point], stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        started = time.monotonic()
        answer = child.stdout.readline()
        assert time.monotonic() - started < PATIENCE_SECONDS  # it does not hang
        assert answer.startswith("interrupted")
        assert "replica" in answer
        assert child.stdout.read().splitlines() == ["left []", "usable (0, 1, 2)"]
    assert child.returncode == 0


@posix
def test_ctrl_c_while_nothing_catches_it_ends_the_program():
    code = """
import signal, time, crossdevice as cd
signal.signal(signal.SIGINT, signal.default_int_handler)
strategy = cd.MirroredStrategy(["cpu:0", "cpu:1"])
strategy.run(lambda: (print("ready", flush=True), time.sleep(60)))
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with child:
        child.stdout.readline()
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=120) != 0


# -------------------------------------------------------------------- lives of threads


def test_threads_are_kept_from_run_to_run_and_leave_with_the_strategy():
    strategy = cd.MirroredStrategy(["cpu:0", "cpu:1"])
    assert not replica_threads()
    first, second = (strategy.run(threading.get_ident) for _ in range(2))
    assert first.values == second.values
    assert len(running_threads()) == 2
    del strategy
    assert not replica_threads()


def test_threads_of_a_failed_run_are_gone(strategy):
    with pytest.raises(ZeroDivisionError):
        strategy.run(lambda: 1 / 0)
    assert not replica_threads()


def test_a_failed_run_does_not_keep_the_strategy_alive():
    strategy = cd.MirroredStrategy(["cpu:0", "cpu:1"])
    gone = watched(strategy)
    with contextlib.suppress(LookupError):
        strategy.run(lambda: context().merge_call(print) if own_replica() else {}["missing"])
    strategy.run(own_replica)
    del strategy
    give_up = time.monotonic() + 10
    while not gone.wait(0.01) and time.monotonic() < give_up:
        gc.collect()  # the last replica reports just before it lets go
    assert gone.is_set()


def test_idle_threads_keep_nothing_of_the_last_run():
    strategy = cd.MirroredStrategy(["cpu:0", "cpu:1"])
    array = np.ones(3)
    gone = watched(array)
    strategy.run(lambda x: context().all_reduce("sum", x), args=(array,))
    del array
    assert gone.wait(120)  # the last replica reports just before it lets go


def test_the_interpreter_exits_with_idle_threads_and_with_stuck_ones():
    code = """
import time, crossdevice as cd
strategy = cd.MirroredStrategy(["cpu:0", "cpu:1"])
strategy.run(lambda: None)
try:
    strategy.run(lambda: time.sleep(300), options=cd.CommunicationOptions(timeout_seconds=0.1))
except TimeoutError:
    strategy.run(lambda: None)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


@needs_fork
def test_a_forked_process_starts_its_own_threads():
    code = """
import os, crossdevice as cd
strategy = cd.MirroredStrategy(["cpu:0", "cpu:1"])
step = lambda: cd.get_replica_context().merge_call(lambda _, x: x, (2,))
assert strategy.run(step).values == (2, 2)
child = os.fork()
if child == 0:
    os._exit(0 if strategy.run(step).values == (2, 2) else 1)
assert os.waitpid(child, 0)[1] == 0
assert strategy.run(step).values == (2, 2)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=240)


def test_many_runs_of_all_kinds_in_any_order(strategy):
    dice = random.Random(4)

    def step(fate, victim, pauses):
        for call, pause in enumerate(pauses[own_replica()]):
            time.sleep(pause)
            if call == 2 and own_replica() in victim:
                if fate == "raises":
                    raise LookupError
                if fate == "leaves":
                    return
                if fate == "differs":
                    context().all_gather(np.ones(1), axis=0)
            context().merge_call(lambda strategy: None)

    outcomes = {"fine": None, "raises": LookupError, "leaves": ReplicaError, "differs": MismatchError}
    for _ in range(150):
        fate = dice.choice(list(outcomes))
        victim = dice.sample(range(4), dice.randint(1, 3))
        pauses = [[dice.choice([0, 0, 0.0002]) for _ in range(4)] for _ in range(4)]
        expected = outcomes[fate]
        if expected is None:
            strategy.run(step, args=(fate, victim, pauses))
        else:
            with pytest.raises(expected):
                strategy.run(step, args=(fate, victim, pauses))
            assert not replica_threads()
