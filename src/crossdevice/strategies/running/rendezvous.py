"""Threads of replicas, and their rendezvous: the calling thread waits for all, merges and answers.

Nothing outlives a run but its threads, and those only if it went well: a run that fails sends them
away, and the next run starts with new ones.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import optree

from crossdevice.backends.protocol import ThreadState
from crossdevice.backends.registry import backend_of_type, loaded_backends
from crossdevice.errors import ContextError, DeadlineError, MismatchError, ReplicaError
from crossdevice.execution.reading.values import check_agreement, few, replica_at
from crossdevice.execution.tracing import flight_recorder
from crossdevice.strategies.running import loaded_libraries
from crossdevice.values.device import Device
from crossdevice.values.distributed import DistributedValues
from crossdevice.values.quantities import counted


class ReplicaThreads:
    """One thread per replica, each waiting for work in its inbox; None in it sends the thread away.

    An inbox costs a tenth of a `Condition`, needs no lock of ours and can be filled from a finalizer.
    While a thread works, its inbox carries the answers to the calls the work makes.

    Idle threads hold on to nothing but their inboxes, so they leave when this object is collected;
    they are daemons, so they never keep the interpreter from exiting.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self.inboxes: list[SimpleQueue[Any]] = [SimpleQueue() for _ in devices]
        self._process_id = os.getpid()
        self._send_away = weakref.finalize(self, _send_away, self.inboxes)
        self._send_away.atexit = False
        self._threads = [
            threading.Thread(target=_serve, args=(inbox,), name=f"replica {replica} ({device})", daemon=True)
            for replica, (inbox, device) in enumerate(zip(self.inboxes, devices, strict=True))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def survived_fork(self) -> bool:
        """True in the process that started the threads: a fork does not copy them."""
        return self._process_id == os.getpid()

    def send_away(self, patience_seconds: float) -> list[int]:
        """Ends all threads; returns the replicas with threads still busy when patience ran out.

        Python cannot end a busy thread from outside: it leaves by itself once its work is done.
        """
        self._send_away()
        out_of_patience = time.monotonic() + patience_seconds
        for thread in self._threads:
            thread.join(max(0.0, out_of_patience - time.monotonic()))
        return [replica for replica, thread in enumerate(self._threads) if thread.is_alive()]

    def place_of(self, replica: int) -> str:
        """Returns the line a replica's thread is executing, for messages; empty if that cannot be told."""
        frames: dict[Any, Any] = getattr(sys, "_current_frames", dict)()  # not every Python has it
        frame = frames.get(self._threads[replica].ident)
        if frame is None:
            return ""
        code = frame.f_code
        return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"


def _serve(inbox: SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := inbox.get()) is not None:
        work()
        del work  # an idle thread must not keep the last run's arrays alive


def _send_away(inboxes: Sequence[SimpleQueue[Any]]) -> None:
    for inbox in inboxes:
        inbox.put(None)


def thread_state(devices: Sequence[Device], are_given: bool, arguments: Any) -> ThreadState | None:
    """Returns the context to enter on replicas' threads with these arguments; None if there is none.

    PyTorch is asked if the program has imported it. JAX and TensorFlow would start if they were asked, and
    take memory of every GPU, so they are asked once arrays of theirs were handed over.

    Args:
        are_given: whether the program named the devices. Otherwise they may be the host's only because
            PyTorch was not asked for GPUs.
    """
    for leaf in optree.tree_leaves(arguments):
        is_own = isinstance(leaf, DistributedValues) and leaf.values
        backend_of_type(type(leaf.values[0] if is_own else leaf))  # which loads it
    places = devices if are_given else ()
    read = [
        loaded_libraries.torch_thread_state(devices),
        *(each.thread_state(places) for each in loaded_backends()),
    ]
    states = [state for state in read if state is not None]
    if len(states) < 2:
        return states[0] if states else None

    def enter(device: Device) -> AbstractContextManager[Any]:
        stack = ExitStack()
        for state in states:
            stack.enter_context(state(device))
        return stack

    return enter


MAX_NAMED = 8
"""A message names this many replicas, then counts."""


class RollCall(NamedTuple):
    """State of the replicas: waiting, returned, failed, or busy.

    >>> devices = [Device("cpu", 0), Device("cpu", 1)]
    >>> str(RollCall(devices, {0: "call 1, all_reduce(SUM)"}, {1}, set(), lambda replica: ""))
    'waiting at call 1, all_reduce(SUM): replica 0 (cpu:0); returned: replica 1 (cpu:1)'
    """

    devices: Sequence[Device]
    waiting: Mapping[int, str]
    returned: AbstractSet[int]
    failed: AbstractSet[int]
    place_of: Callable[[int], str]

    def __str__(self) -> str:
        groups: dict[str, list[int]] = {}
        for replica in range(len(self.devices)):
            groups.setdefault(self._state_of(replica), []).append(replica)
        if len(groups) == 1:
            return f"{next(iter(groups))}: all {counted(len(self.devices), 'replica')}"
        return "; ".join(f"{state}: {named(replicas, self.devices)}" for state, replicas in groups.items())

    def _state_of(self, replica: int) -> str:
        if replica in self.waiting:
            return f"waiting at {self.waiting[replica]}"
        if replica in self.returned:
            return "returned"
        if replica in self.failed:
            return "failed"
        place = self.place_of(replica)
        state = "missing, still running" if self.waiting else "still running"
        return f"{state} at {place}" if place else state


def named(replicas: Sequence[int], devices: Sequence[Device]) -> str:
    """Replicas by number and device: `replica 3 (cpu:3)`."""
    return few([replica_at(replica, devices[replica]) for replica in replicas], MAX_NAMED)


if TYPE_CHECKING:
    from crossdevice.strategies.running.random_streams import RandomStreams

POLL_SECONDS = 0.1
"""Delay of Ctrl-C, at most, where an operating system cannot interrupt a wait."""

STOP_PATIENCE_SECONDS = 5.0
"""After a failure, how long replicas that are still computing may take to stop."""

DEADLINE_PATIENCE_SECONDS = 1.0
"""The same after a deadline or Ctrl-C, when somebody has waited long enough already."""


class Call(NamedTuple):
    """A replica's request at a rendezvous.

    All must agree on `name` and `details`. `merge` gets every replica's value and returns every
    replica's answer; it is called once.
    """

    name: str
    details: tuple[Any, ...]
    value: Any
    merge: Callable[[list[Any]], Sequence[Any]]
    deadline: Deadline | None

    def __str__(self) -> str:
        return call_text(self.name, self.details)


def call_text(name: str, details: tuple[Any, ...]) -> str:
    """Formats a call for messages: `all_reduce(SUM)`."""
    return f"{name}({', '.join(map(str, details))})"


class Deadline(NamedTuple):
    """A moment on the monotonic clock, and how many seconds had been given."""

    moment: float
    seconds: float

    @staticmethod
    def after(seconds: float | timedelta | None) -> Deadline | None:
        """Returns the deadline in that many seconds; None for no deadline."""
        if seconds is None:
            return None
        number = seconds.total_seconds() if isinstance(seconds, timedelta) else seconds
        return Deadline(time.monotonic() + number, number)


class ReplicaStopped(BaseException):
    """Unwinds a replica because another one failed; not an Exception, so functions do not swallow it."""


class Rendezvous:
    """One run of all replicas, led by the thread that called it.

    The leader is woken only when there is something to do: when no replica is running any more, or when
    it is certain already that they will not meet. To wake it for every report would cost a fifth more.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        threads: ReplicaThreads,
        deadline: Deadline | None,
        streams: RandomStreams | None = None,
    ) -> None:
        self._devices = devices
        self._threads = threads
        self._deadline = deadline
        self._streams = streams
        self._call_number = 1
        self._is_over = False
        self._is_forgotten = False
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._lock = threading.Lock()  # for the four below, which all threads write
        self._num_running = len(devices)
        self._arrived: dict[int, Call] = {}
        self._results: dict[int, Any] = {}
        self._failures: dict[int, BaseException] = {}

    # ---------------------------------------------------------------- on the threads of replicas

    def meet(self, replica: int, call: Call) -> Any:
        """Waits until all replicas make the same call; returns this replica's answer."""
        if self._streams is None:
            return self._meet(replica, call)
        with self._streams.between_turns(replica):
            return self._meet(replica, call)

    def is_running(self, replica: int) -> bool:
        """Returns True until the replica's function has returned or failed."""
        return replica not in self._results and replica not in self._failures and not self._is_over

    def _meet(self, replica: int, call: Call) -> Any:
        if not self._is_over:
            self._report(self._arrived, replica, call)
            answer = self._threads.inboxes[replica].get()
            if answer is not None:
                return answer[0]
            self._threads.inboxes[replica].put(None)  # it was meant for the thread
        if self._is_forgotten:
            raise ContextError(
                f"replica {replica} ({self._devices[replica]}) called {call} after its run had ended"
            )
        raise ReplicaStopped

    def _work(self, replica: int, function: Callable[[], Any]) -> None:
        try:
            if self._streams is None:
                result = function()
            else:
                with self._streams.turn_of(replica):
                    result = function()
        except BaseException as error:
            self._report(self._failures, replica, error)
        else:
            self._report(self._results, replica, result)

    def _report(self, board: dict[int, Any], replica: int, what: Any) -> None:
        with self._lock:
            board[replica] = what
            self._num_running -= 1
            is_pressing = not self._num_running or self._failures or (self._arrived and self._results)
        if is_pressing:
            self._bell.put(None)

    # ---------------------------------------------------------------- on the calling thread

    def lead(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs one function per replica, answers their calls and returns their results in order."""
        num_replicas = len(self._devices)
        try:
            for replica, (function, inbox) in enumerate(zip(functions, self._threads.inboxes, strict=True)):
                inbox.put(functools.partial(self._work, replica, function))
            while len(self._results) < num_replicas:
                self._wait()
                if self._failures:
                    raise next(iter(self._failures.values()))
                if self._arrived and self._results:
                    self._let_arrive()
                    raise ReplicaError(
                        f"replicas make different numbers of calls; {self._roll_call()}; every replica must "
                        "call all_reduce, all_gather, merge_call and aggregating assigns equally often"
                    )
                if len(self._arrived) == num_replicas:
                    self._merge()
            return [self._results[replica] for replica in range(num_replicas)]
        except BaseException as caught:
            error = self._ended_by(caught)
        # Raised out here, one replica's error does not become the context of another's.
        try:
            raise error
        finally:
            # Calls and tracebacks refer back to this object and frame, and would keep all of it alive.
            self._arrived.clear()
            self._failures.clear()
            del error

    def _wait(self) -> None:
        """Waits until there is something to do, or for the longest single wait."""
        with self._lock:
            deadlines = [call.deadline for call in self._arrived.values()]
        deadline = min(filter(None, (self._deadline, *deadlines)), default=None)
        wait = POLL_SECONDS if deadline is None else deadline.moment - time.monotonic()
        if deadline is not None and wait <= 0:
            raise DeadlineError(f"no end after {deadline.seconds:g} s; {self._roll_call()}")
        with contextlib.suppress(Empty):
            self._bell.get(timeout=min(wait, POLL_SECONDS))

    def _let_arrive(self) -> None:
        """Lets replicas that are only a little behind get to where the message will look for them."""
        latest = time.monotonic() + POLL_SECONDS
        while self._num_running and (wait := latest - time.monotonic()) > 0:
            with contextlib.suppress(Empty):
                self._bell.get(timeout=wait)

    def _merge(self) -> None:
        calls = [self._arrived[replica] for replica in range(len(self._devices))]
        made, noun = [call[:2] for call in calls], f"call {self._call_number},"
        check_agreement(made, self._devices, noun, MismatchError, describe=lambda key: call_text(*key))
        answers = calls[0].merge([call.value for call in calls])
        self._call_number += 1
        with self._lock:
            self._arrived.clear()
            self._num_running = len(self._devices)
        for inbox, answer in zip(self._threads.inboxes, answers, strict=True):
            inbox.put((answer,))

    # ---------------------------------------------------------------- when a run fails

    def _ended_by(self, caught: BaseException) -> BaseException:
        """Stops all replicas; returns the error to raise, with notes about the replicas."""
        situation = self._roll_call()
        busy = self._stop(caught)
        with self._lock:
            raised = sorted(self._failures.items())
        failures = {replica: error for replica, error in raised if not isinstance(error, ReplicaStopped)}
        error = caught
        if failures and (caught in failures.values() or isinstance(caught, ReplicaError)):
            first = next(iter(failures))
            error = failures.pop(first)
            error.add_note(f"raised by {named([first], self._devices)} of {len(self._devices)}")
        elif not isinstance(caught, (ReplicaError, DeadlineError)):
            error.add_note(situation)
        for replica, other in failures.items():
            kind = type(other).__name__
            error.add_note(f"{named([replica], self._devices)} failed too: {kind}: {other}")
        for replica in busy:
            who, where = named([replica], self._devices), self._threads.place_of(replica)
            error.add_note(f"{who} has not stopped and is left behind at {where}")
        flight_recorder.dump_after(error)
        return error

    def _stop(self, caught: BaseException) -> list[int]:
        """Ends the threads; returns the replicas that did not stop in time."""
        patience = STOP_PATIENCE_SECONDS
        if isinstance(caught, (DeadlineError, KeyboardInterrupt)):
            patience = DEADLINE_PATIENCE_SECONDS
        elif self._deadline is not None:
            left = max(0.0, self._deadline.moment - time.monotonic())
            patience = min(patience, left + DEADLINE_PATIENCE_SECONDS)
        self._is_over = True
        if self._streams is not None:
            self._streams.stop()
        try:
            return self._threads.send_away(patience)
        finally:
            self._is_forgotten = True

    def _roll_call(self) -> str:
        with self._lock:
            number = self._call_number
            waiting = {replica: f"call {number}, {call}" for replica, call in self._arrived.items()}
            returned, failed = set(self._results), set(self._failures)
        return str(RollCall(self._devices, waiting, returned, failed, self._threads.place_of))
