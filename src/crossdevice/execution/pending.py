"""Calls that were started: they go on while Python does something else."""

from __future__ import annotations

import abc
import math
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from crossdevice import runtime
from crossdevice.backends.cuda_streams import SideStreams, on_current_stream
from crossdevice.errors import ContextError, DeadlineError, OptionError
from crossdevice.process_groups.background import BackgroundCall, BackgroundThread


class ThisProcess:
    """The type of `THIS_PROCESS`, the owner of everything that is started without other processes."""


THIS_PROCESS = ThisProcess()


class Pending(abc.ABC):
    """A call that was started; `wait` returns its results.

    Do not write to its inputs, nor read or write its results, before `wait` has returned.

    >>> import numpy as np, crossdevice as cd
    >>> pending = cd.bind([np.float32([1, 2]), np.float32([3, 4])], "sum", "cpu:0").start()
    >>> pending.wait()
    array([4., 6.], dtype=float32)
    """

    is_waited_for = False
    """Whether `wait` has returned, has raised the reduction's own error, or was interrupted."""

    @abc.abstractmethod
    def done(self) -> bool:
        """Tells if the call has ended, with a result or an error; `wait` does not block then.

        Returns:
            True or False.

        Raises:
            ContextError: as of `wait`.
        """

    @abc.abstractmethod
    def wait(self, timeout: float | None = None) -> Any:
        """Returns the results, or raises what the call raised.

        On the host it blocks until they are there. On GPUs it does not: what is put on the current streams
        afterwards comes after the call.

        Args:
            timeout: seconds. If the call takes longer, DeadlineError is raised. It goes on, and may be
                waited for again.

        Returns:
            What the call would have returned had it not been started.

        Raises:
            DeadlineError: the call has not ended within `timeout`.
            ContextError: this process was forked from the one that started the call, before it had ended.
        """


class _OnThread(Pending):
    """Runs on a worker thread, after everything that was started before for the same owner."""

    def __init__(self, call: BackgroundCall) -> None:
        self.call, self._process = call, os.getpid()

    def done(self) -> bool:
        """True once the thread has ended it."""
        return self._has_ended(0)

    def wait(self, timeout: float | None = None) -> Any:
        """Blocks until the thread has ended it."""
        seconds = _checked_seconds(timeout)
        try:
            has_ended = self._has_ended(seconds)
        except BaseException:
            self.is_waited_for = True  # whoever is interrupted may never come back to it
            raise
        if not has_ended:
            raise DeadlineError(f"the reduction that was started has not ended in {seconds:g} seconds")
        self.is_waited_for = True
        return self.call.result()

    def _has_ended(self, seconds: float) -> bool:
        if os.getpid() != self._process and not self.call.wait(0):
            raise ContextError(
                f"this call was started in process {self._process}, from which this one was forked before it "
                "had ended; wait for it there, or start another one here"
            )
        return self.call.wait(seconds)


class _OnStreams(Pending):
    """Runs on side streams of GPUs."""

    def __init__(self, work: Callable[[], Any], side: SideStreams) -> None:
        self._work, self._side = work, side  # with the arrays that GPUs are about to read
        with side:
            self._results = work()

    def __del__(self) -> None:
        # Nobody waited: memory that is free from now on is used again when the GPUs are done with it.
        if not self.is_waited_for:
            self._side.join()

    def done(self) -> bool:
        """True once the GPUs have ended it."""
        return self._side.are_done()

    def wait(self, timeout: float | None = None) -> Any:
        """Orders the current streams; the host goes on."""
        _checked_seconds(timeout)
        self._side.join()
        self.is_waited_for = True
        return self._results


def start(work: Callable[[], Any], owner: object = THIS_PROCESS, side: SideStreams | None = None) -> Pending:
    """Starts work on the owner's thread, after what was started before; with side streams, on GPUs.

    The host's part of work for GPUs is done before this returns.
    """
    global _has_started
    if side is not None:
        return _OnStreams(work, side)
    _has_started = True
    worker = _workers.get(owner)
    if worker is None:
        worker = _workers.setdefault(owner, _Worker())
    return worker.start(on_current_stream(work))


def end_of(pending: Pending) -> Callable[[], None]:
    """Returns a function that waits until a call has ended; it keeps neither the Pending nor the results."""
    if not isinstance(pending, _OnThread):
        return lambda: None  # GPUs keep the order of what is put on their streams
    started = weakref.ref(pending.call)  # its thread keeps it until it has ended

    def wait() -> None:
        call = started()
        if call is not None and not is_started_work():
            call.wait(math.inf)

    return wait


def finish_started(owner: object) -> None:
    """Waits until all that was started for an owner has ended; its own thread does not wait for itself."""
    worker = _workers.get(owner) if _has_started else None
    if worker is not None:
        worker.finish()


class _Worker:
    """A thread that runs started work, one after the other."""

    def __init__(self) -> None:
        self._background = BackgroundThread("crossdevice, started work")
        self._thread = 0
        self._last: BackgroundCall | None = None

    def start(self, work: Callable[[], Any]) -> Pending:
        def run() -> Any:
            self._thread = threading.get_ident()
            _started_work.is_running = True
            return work()

        call = self._last = self._background.submit(run)
        return _OnThread(call)

    def finish(self) -> None:
        if self._last is not None and threading.get_ident() != self._thread:
            self._last.wait(math.inf)
            self._last = None  # with the results it holds


_workers: weakref.WeakKeyDictionary[object, _Worker] = weakref.WeakKeyDictionary()


class _StartedWork(threading.local):
    """Mark of the threads that run what was started."""

    is_running = False


_started_work = _StartedWork()


def is_started_work() -> bool:
    """Returns True in a thread that runs what was started."""
    return _started_work.is_running


_has_started = False
"""Whether a worker was ever needed: most programs start nothing, and every call would look for a worker."""

runtime.renew_after_fork(_workers.clear)  # threads stay behind in the process that was forked


def _checked_seconds(timeout: float | None) -> float:
    if timeout is None:
        return math.inf
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise OptionError(f"timeout must be a number of seconds, 0 or more, or None; got {timeout!r}")
    return float(timeout)
