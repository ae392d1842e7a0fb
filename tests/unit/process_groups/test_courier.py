"""Errands run in another thread, one after the other, and tell what became of them."""

import gc
import subprocess
import sys
import threading
import weakref

import pytest

from crossdevice.process_groups.courier import Courier


@pytest.fixture
def courier():
    courier = Courier("a courier")
    yield courier
    courier.dismiss()


def test_an_errand_returns_what_its_function_does(courier):
    errand = courier.send(lambda: threading.current_thread().name)
    assert errand.wait(10.0)
    assert errand.result() == "a courier"


def test_an_errand_raises_what_its_function_does(courier):
    errand = courier.send(lambda: 1 // 0)
    assert errand.wait(10.0)
    with pytest.raises(ZeroDivisionError):
        errand.result()


def test_whoever_waits_may_stop_waiting(courier):
    gate = threading.Event()
    errand = courier.send(gate.wait)
    assert not errand.wait(0.0)
    gate.set()
    assert errand.wait(10.0)


def test_errands_are_run_in_order(courier):
    seen = []
    errands = [courier.send(lambda number=number: seen.append(number)) for number in range(50)]
    assert errands[-1].wait(10.0)
    assert seen == list(range(50))


def test_nobody_is_sent_out_when_python_is_about_to_end(courier, monkeypatch):
    monkeypatch.setattr(Courier, "_hired", weakref.WeakSet())
    monkeypatch.setattr(Courier, "_is_closing_time", False)
    Courier.see_off()
    errand = courier.send(lambda: "done")
    assert errand.wait(0.0)
    with pytest.raises(RuntimeError, match="Python is about to end"):
        errand.result()


def test_a_dismissed_courier_finishes_and_ends():
    courier = Courier("a courier that leaves")
    errand = courier.send(lambda: "done")
    thread = courier._thread
    courier.dismiss()
    thread.join(10.0)
    assert not thread.is_alive()
    assert errand.result() == "done"


def test_a_forgotten_courier_finishes_and_ends():
    courier = Courier("a courier nobody thinks of")
    errand = courier.send(lambda: "done")
    thread = courier._thread
    del courier
    gc.collect()
    thread.join(10.0)
    assert not thread.is_alive()
    assert errand.result() == "done"


def test_what_an_errand_held_is_let_go_before_the_next_one_comes(courier):
    class Memory:
        pass

    memory = Memory()
    gone = threading.Event()
    weakref.finalize(memory, gone.set)
    courier.send(lambda memory=memory: None)
    del memory
    assert gone.wait(10.0)


ENDS_WHILE_A_COURIER_IS_OUT = """
import atexit, threading
from crossdevice.process_groups.courier import Courier

is_ending = threading.Event()
if {is_in_time}:
    atexit.register(is_ending.set)

def errand():
    is_ending.wait()
    print("back")

Courier("a courier that is out").send(errand)
print("the end")
"""


@pytest.mark.parametrize(
    ("is_in_time", "printed"),
    [(True, ["the end", "back"]), (False, ["the end"])],
    ids=["in time", "too late"],
)
def test_a_program_that_ends_waits_a_little_for_couriers_that_are_out(is_in_time, printed):
    script = ENDS_WHILE_A_COURIER_IS_OUT.format(is_in_time=is_in_time)
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout.split("\n")[:-1], found.stderr) == (0, printed, "")
