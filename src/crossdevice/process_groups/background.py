"""Blocking calls in threads, so that callers can stop waiting; and shutdown when Python ends."""

from __future__ import annotations

import collections
import ctypes
import functools
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from crossdevice import runtime

EXIT_SECONDS = 5.0
"""Time that a program that ends waits for background calls."""

POLL_SECONDS = 1.0
"""Delay with which Ctrl-C may be noticed."""

WITHDRAWAL_SECONDS = 0.00005
"""Time in which a delayed call can be withdrawn: about as long as a thread takes to wake up."""


class BackgroundCall:
    """A call in another thread, with its result or error."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._is_done = False
        self._running = threading.Lock()  # not an Event: a signal's handler may wait while its thread does
        self._running.acquire()
        self._result: Any = None
        self._error: BaseException | None = None

    @classmethod
    def refused(cls) -> BackgroundCall:
        """Returns a call that fails because Python is about to end."""

        def refuse() -> None:
            raise RuntimeError("Python is about to end, so no call can be made in the background")

        call = cls(refuse)
        call.run()
        return call

    def run(self) -> None:
        """Makes the call."""
        try:
            self._result = self._function()
        except BaseException as error:  # raised where it is waited for
            self._error = error
        del self._function  # a thread remembers its last call, which is not to keep what that was about
        self._is_done = True
        self._running.release()

    def wait(self, seconds: float) -> bool:
        """Waits for the call for at most a number of seconds; returns whether it has ended."""
        end = time.monotonic() + seconds
        while not self._is_done:
            left = end - time.monotonic()
            # Not all at once: a signal that comes just before the thread falls asleep does not wake it.
            if self._running.acquire(timeout=min(max(left, 0.0), POLL_SECONDS)):
                self._running.release()  # for other waiting threads
            elif left <= POLL_SECONDS:
                break
        return self._is_done

    def result(self) -> Any:
        """Returns the result of an ended call, or raises its error."""
        if self._error is not None:
            raise self._error
        return self._result


class BackgroundThread:
    """Makes calls one after the other in a daemon thread of its own, started with the first.

    An engine that ignores its deadline holds up this thread only. A caller that stops waiting for the call
    uses another thread for anything that comes after. The thread ends when this object is stopped or
    forgotten. A program that ends waits a little for calls that are under way: C++ aborts the
    process if Python ends a thread inside of it.
    """

    _started: ClassVar[weakref.WeakSet[_Thread]] = weakref.WeakSet()
    _is_python_ending = False

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: _Thread | None = None

    def submit(self, function: Callable[[], Any]) -> BackgroundCall:
        """Queues a function behind everything that was submitted before."""
        if self._is_python_ending:
            return BackgroundCall.refused()
        call = BackgroundCall(function)
        self._calls.put(call)
        return call

    @property
    def _calls(self) -> _Calls:
        if self._thread is None:
            self._thread = _Thread(self._name, self._new_calls())
            self._thread.start()
            self._started.add(self._thread)
        return self._thread.calls

    def _new_calls(self) -> _Calls:
        return queue.SimpleQueue()

    def stop(self) -> None:
        """Ends the thread after the last call; later submissions are not called."""
        if self._thread is not None:
            self._thread.calls.put(None)

    def __del__(self) -> None:
        self.stop()

    @classmethod
    def stop_all(cls) -> None:
        """Stops all threads, and waits for them together; called when Python is about to end."""
        cls._is_python_ending = True
        end = time.monotonic() + EXIT_SECONDS
        started = list(cls._started)
        for thread in started:
            thread.calls.put(None)
        for thread in started:
            thread.join(max(end - time.monotonic(), 0.0))


class DelayedThread(BackgroundThread):
    """Makes one call over and over, each time a moment after it was asked for, unless that is withdrawn.

    To wake a thread takes longer than many calls do, so a caller that soon makes the call itself withdraws
    it, and no thread is switched. Where there is no timer to sleep on, it is made at once.
    """

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        super().__init__(name)
        self._function = function

    def call_soon(self) -> None:
        """Asks for the call; of several before it begins, one is made."""
        if self._is_python_ending or not _has_timers():
            self.submit(self._function)
            return
        calls = self._calls
        assert isinstance(calls, _DelayedCalls)
        calls.put_soon(self._function)

    def withdraw(self) -> None:
        """Takes the last request back, if the call has not begun; callers look again whether it is needed."""
        if self._thread is not None and isinstance(self._thread.calls, _DelayedCalls):
            self._thread.calls.withdraw()

    def _new_calls(self) -> _Calls:
        return _DelayedCalls() if _has_timers() else super()._new_calls()


class TimedCalls:
    """Blocking calls that have to return by one deadline; a thread makes them, one after the other."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds
        self._thread = BackgroundThread("crossdevice until a deadline")

    def seconds_left(self) -> float:
        """Returns the seconds until the deadline; negative afterwards."""
        return self._end - time.monotonic()

    def make(self, function: Callable[[], Any], at_least_seconds: float = 0.0) -> Any:
        """Calls the function; raises TimeoutError if it takes longer, and leaves it running."""
        call = self._thread.submit(function)
        if not call.wait(max(self.seconds_left(), at_least_seconds)):
            raise TimeoutError(f"no answer in {self.seconds:.3g} seconds")
        return call.result()


class _Thread(threading.Thread):
    """The thread itself. It does not know its `BackgroundThread`, which could not be forgotten otherwise."""

    def __init__(self, name: str, calls: _Calls) -> None:
        super().__init__(name=name, daemon=True)
        self.calls = calls

    def run(self) -> None:
        """Makes calls until it is stopped."""
        while (call := self.calls.get()) is not None:
            call.run()
            del call  # releases the memory it holds before the next one comes


class _Calls(Protocol):
    """Calls that a thread makes one after the other; None ends it."""

    def put(self, call: BackgroundCall | None, /) -> None:
        """Appends a call and wakes the thread."""

    def get(self) -> BackgroundCall | None:
        """Waits for a call and removes it."""


class _DelayedCalls:
    """Calls of a thread that sleeps on a timer of the system, which is set without waking it."""

    def __init__(self) -> None:
        libc = _libc()
        self._timer = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC)
        if self._timer < 0:
            raise OSError(ctypes.get_errno(), "no timer could be made")
        weakref.finalize(self, os.close, self._timer).atexit = False
        self._set_time = libc.timerfd_settime
        self._calls: collections.deque[BackgroundCall | None] = collections.deque()
        self._soon: Callable[[], None] | None = None

    def put(self, call: BackgroundCall | None, /) -> None:
        self._calls.append(call)
        self._set_time(self._timer, 0, _AT_ONCE, None)

    def put_soon(self, function: Callable[[], None]) -> None:
        """Appends a call after a moment, unless one is to be appended already."""
        if self._soon is None:
            self._soon = function
            self._set_time(self._timer, 0, _SOON, None)

    def withdraw(self) -> None:
        """Does not append that call, if it has not been yet."""
        if self._soon is not None:
            self._soon = None
            self._set_time(self._timer, 0, _NEVER, None)
            if self._calls:  # which another thread has appended just before
                self._set_time(self._timer, 0, _AT_ONCE, None)

    def get(self) -> BackgroundCall | None:
        while not self._calls:
            os.read(self._timer, 8)
            soon = self._soon
            if soon is not None:  # if set just now, it is left to the timer that was set after it
                self._soon = None
                self._calls.append(BackgroundCall(soon))
        return self._calls.popleft()


_Time = ctypes.c_long * 4
"""An interval and a delay, each in seconds and nanoseconds; a delay of 0 turns a timer off."""

_NEVER, _AT_ONCE, _SOON = _Time(), _Time(0, 0, 0, 1), _Time(0, 0, 0, int(1e9 * WITHDRAWAL_SECONDS))


@functools.cache
def _libc() -> Any:
    """Returns the C library; its calls keep the GIL, which costs less than to let go of it."""
    return ctypes.PyDLL(None, use_errno=True)


@functools.cache
def _has_timers() -> bool:
    """Returns True on Linux, where a thread can sleep on a timer that others set."""
    return sys.platform == "linux" and hasattr(_libc(), "timerfd_settime")


def is_background_thread() -> bool:
    """Returns True in a background thread, which keeps errors for the caller that waits."""
    return isinstance(threading.current_thread(), _Thread)


class Open(Protocol):
    """An object that others wait for until it ends."""

    def end(self, why: str) -> None:
        """Ends it and tells the others why."""


_open_ones: weakref.WeakSet[Open] = weakref.WeakSet()
_is_python_ending = False


def end_with_python(one: Open) -> None:
    """Ends it at the latest when Python ends."""
    _open_ones.add(one)
    _registered()


def is_python_ending() -> bool:
    """Returns True if only daemon threads are left."""
    return _is_python_ending


def end_all() -> None:
    """Ends all that are open, because Python is about to end."""
    global _is_python_ending
    _is_python_ending = True
    error = getattr(sys, "last_value", None)  # what ends it, if uncaught
    for one in list(_open_ones):
        one.end("its process has ended" + ("" if error is None else f": {error!r}"))


@functools.cache
def _registered() -> None:
    # Not when this is imported: what is handed in last ends first, and threads are waited for after it.
    runtime.end_with_process(end_all)


runtime.end_with_process(BackgroundThread.stop_all)
