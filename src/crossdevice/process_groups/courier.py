"""A thread that makes blocking calls, so that nobody has to wait for them longer than they want to."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

FAREWELL_SECONDS = 5.0
"""How long a program that ends waits for couriers to come back."""

NAP_SECONDS = 1.0
"""How late Ctrl-C may be noticed."""


class Errand:
    """A call on its way: what it returned or raised, once it has."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._is_done = False
        self._running = threading.Lock()  # not an Event: a signal's handler may wait while its thread does
        self._running.acquire()
        self._result: Any = None
        self._error: BaseException | None = None

    @classmethod
    def refused(cls) -> Errand:
        """One that nobody runs any more."""

        def refuse() -> None:
            raise RuntimeError("Python is about to end, so nobody can be sent out")

        errand = cls(refuse)
        errand.run()
        return errand

    def run(self) -> None:
        """Makes the call."""
        try:
            self._result = self._function()
        except BaseException as error:  # raised where it is waited for
            self._error = error
        del self._function  # a thread remembers its last errand, which is not to keep what that was about
        self._is_done = True
        self._running.release()

    def wait(self, seconds: float) -> bool:
        """Whether the call has ended, after at most so long."""
        end = time.monotonic() + seconds
        while not self._is_done:
            left = end - time.monotonic()
            # Not all at once: a signal that comes just before the thread falls asleep does not wake it.
            if self._running.acquire(timeout=min(max(left, 0.0), NAP_SECONDS)):
                self._running.release()  # for whoever else waits
            elif left <= NAP_SECONDS:
                break
        return self._is_done

    def result(self) -> Any:
        """What an ended call returned; raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._result


class Courier:
    """Runs errands one after the other in a daemon thread of its own, started with the first.

    An engine that ignores its deadline holds up this thread only. Whoever waits for the errand stops
    waiting, and gets a new courier for anything that comes after. The thread ends when its courier is
    dismissed, or forgotten. A program that ends waits a little for couriers that are out: C++ aborts the
    process if Python ends a thread inside of it.
    """

    _hired: ClassVar[weakref.WeakSet[_Round]] = weakref.WeakSet()
    _is_closing_time = False

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: _Round | None = None

    def send(self, function: Callable[[], Any]) -> Errand:
        """Has the function called as soon as everything sent before has been."""
        if self._is_closing_time:
            return Errand.refused()
        errand = Errand(function)
        if self._thread is None:
            self._thread = _Round(self._name)
            self._thread.start()
            self._hired.add(self._thread)
        self._thread.errands.put(errand)
        return errand

    def dismiss(self) -> None:
        """Ends the thread after the last errand; what is sent afterwards is not seen to."""
        if self._thread is not None:
            self._thread.errands.put(None)

    def __del__(self) -> None:
        self.dismiss()

    @classmethod
    def see_off(cls) -> None:
        """Dismisses all, and waits for them together; called when Python is about to end."""
        cls._is_closing_time = True
        end = time.monotonic() + FAREWELL_SECONDS
        hired = list(cls._hired)
        for thread in hired:
            thread.errands.put(None)
        for thread in hired:
            thread.join(max(end - time.monotonic(), 0.0))


class TimedCalls:
    """Blocking calls that have to be back by one deadline; a courier makes them, one after the other."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds
        self._courier = Courier("crossdevice until a deadline")

    def seconds_left(self) -> float:
        """Until then; negative afterwards."""
        return self._end - time.monotonic()

    def make(self, function: Callable[[], Any], at_least_seconds: float = 0.0) -> Any:
        """What the function returns; raises TimeoutError if it has not by then, and leaves it running."""
        errand = self._courier.send(function)
        if not errand.wait(max(self.seconds_left(), at_least_seconds)):
            raise TimeoutError(f"no answer in {self.seconds:.3g} seconds")
        return errand.result()


class _Round(threading.Thread):
    """A courier's thread. It does not know its courier, who could not be forgotten otherwise."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.errands: queue.SimpleQueue[Errand | None] = queue.SimpleQueue()

    def run(self) -> None:
        """Until the courier is dismissed."""
        while (errand := self.errands.get()) is not None:
            errand.run()
            del errand  # with the memory it holds, which nobody needs until the next one comes


def is_courier() -> bool:
    """Whether the thread that asks is a courier's, whose errors are kept for whoever waits for the errand."""
    return isinstance(threading.current_thread(), _Round)


atexit.register(Courier.see_off)
