"""Calls are made in another thread, one after the other, and tell what became of them."""

import gc
import subprocess
import sys
import threading
import weakref

import pytest

from crossdevice.process_groups import background
from crossdevice.process_groups.background import BackgroundThread, DelayedThread


@pytest.fixture
def thread():
    thread = BackgroundThread("a thread")
    yield thread
    thread.stop()


def test_a_call_returns_what_its_function_does(thread):
    call = thread.submit(lambda: threading.current_thread().name)
    assert call.wait(120)
    assert call.result() == "a thread"


def test_a_call_raises_what_its_function_does(thread):
    call = thread.submit(lambda: 1 // 0)
    assert call.wait(120)
    with pytest.raises(ZeroDivisionError):
        call.result()


def test_whoever_waits_may_stop_waiting(thread):
    gate = threading.Event()
    call = thread.submit(gate.wait)
    assert not call.wait(0.0)
    gate.set()
    assert call.wait(120)


def test_calls_are_made_in_order(thread):
    seen = []
    calls = [thread.submit(lambda number=number: seen.append(number)) for number in range(50)]
    assert calls[-1].wait(120)
    assert seen == list(range(50))


def test_no_call_is_made_when_python_is_about_to_end(thread, monkeypatch):
    monkeypatch.setattr(BackgroundThread, "_started", weakref.WeakSet())
    monkeypatch.setattr(BackgroundThread, "_is_python_ending", False)
    BackgroundThread.stop_all()
    call = thread.submit(lambda: "done")
    assert call.wait(0.0)
    with pytest.raises(RuntimeError, match="Python is about to end"):
        call.result()


def test_a_delayed_call_is_made_by_itself_once_for_several_requests():
    begun, gate = threading.Semaphore(0), threading.Event()
    delayed = DelayedThread("a thread that waits", lambda: (begun.release(), gate.wait()))
    delayed.call_soon()
    assert begun.acquire(timeout=120)  # and is under way
    delayed.call_soon()
    delayed.call_soon()
    gate.set()
    assert begun.acquire(timeout=120)
    assert not begun.acquire(timeout=0.2)
    delayed.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="there is no timer to sleep on")
def test_a_delayed_call_that_is_withdrawn_is_not_made(monkeypatch):
    monkeypatch.setattr(background, "_SOON", background._Time(0, 0, 30, 0))
    made = threading.Event()
    delayed = DelayedThread("a thread that waits", made.set)
    delayed.call_soon()
    delayed.withdraw()
    delayed.stop()
    thread = delayed._thread
    thread.join(120)
    assert not thread.is_alive()
    assert not made.is_set()


def test_a_delayed_call_after_one_that_was_withdrawn_is_made():
    made = threading.Event()
    delayed = DelayedThread("a thread that waits", made.set)
    for _ in range(100):
        delayed.call_soon()
        delayed.withdraw()
    delayed.call_soon()
    assert made.wait(120)
    delayed.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="there is no timer to sleep on")
def test_a_withdrawal_does_not_keep_a_thread_from_ending(monkeypatch):
    calls = background._DelayedCalls()
    calls.put_soon(lambda: None)
    calls.put(None)
    calls.withdraw()
    ended = threading.Thread(target=calls.get, daemon=True)
    ended.start()
    ended.join(120)
    assert not ended.is_alive()


def test_a_stopped_thread_finishes_and_ends():
    background = BackgroundThread("a thread that leaves")
    call = background.submit(lambda: "done")
    thread = background._thread
    background.stop()
    thread.join(120)
    assert not thread.is_alive()
    assert call.result() == "done"


def test_a_forgotten_thread_finishes_and_ends():
    background = BackgroundThread("a thread nobody thinks of")
    call = background.submit(lambda: "done")
    thread = background._thread
    del background
    gc.collect()
    thread.join(120)
    assert not thread.is_alive()
    assert call.result() == "done"


def test_what_a_call_held_is_let_go_before_the_next_one_comes(thread):
    class Memory:
        pass

    memory = Memory()
    gone = threading.Event()
    weakref.finalize(memory, gone.set)
    thread.submit(lambda memory=memory: None)
    del memory
    assert gone.wait(120)


ENDS_DURING_A_CALL = """
import atexit, threading
from crossdevice.process_groups.background import BackgroundThread, DelayedThread

is_ending = threading.Event()
if {is_in_time}:
    atexit.register(is_ending.set)

def call():
    is_ending.wait()
    print("back")

BackgroundThread("a thread at work").submit(call)
print("the end")
"""


@pytest.mark.parametrize(
    ("is_in_time", "printed"),
    [(True, ["the end", "back"]), (False, ["the end"])],
    ids=["in time", "too late"],
)
def test_a_program_that_ends_waits_a_little_for_calls_under_way(is_in_time, printed):
    script = ENDS_DURING_A_CALL.format(is_in_time=is_in_time)
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert (found.returncode, found.stdout.split("\n")[:-1], found.stderr) == (0, printed, "")
