"""Collectives of one group in program order, and the threads that run them."""

from __future__ import annotations

import collections
import functools
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import _record_function_with_args_enter, _record_function_with_args_exit

from crossdevice.errors import CrossDeviceError, DeadlineError
from crossdevice.integrations.torch.distributed.dispatch_modes import never_compiled, without_modes
from crossdevice.process_groups.background import POLL_SECONDS, BackgroundThread, DelayedThread

NO_TIMEOUT = timedelta(0)

POLL_PAUSE_SECONDS = 1e-6
"""Pause of a program that asks for the end of a collective in progress."""

OpType: Any = vars(torch._C._distributed_c10d)["OpType"]
OP_TYPES = {
    "all_reduce": OpType.ALLREDUCE,
    "reduce": OpType.REDUCE,
    "reduce_scatter": OpType.REDUCE_SCATTER,
    "_reduce_scatter_base": OpType._REDUCE_SCATTER_BASE,
    # PyTorch 2.11 has no number for it.
    "reduce_scatter_tensor_coalesced": vars(OpType).get(
        "REDUCE_SCATTER_TENSOR_COALESCED", OpType._REDUCE_SCATTER_BASE
    ),
    "broadcast": OpType.BROADCAST,
    "all_gather": OpType.ALLGATHER,
    "_allgather_base": OpType._ALLGATHER_BASE,
    "allgather_into_tensor_coalesced": OpType.ALLGATHER_COALESCED,
    "gather": OpType.GATHER,
    "scatter": OpType.SCATTER,
    "all_to_all": OpType.ALLTOALL,
    "barrier": OpType.BARRIER,
    "recv": OpType.RECV,
    "recvAnySource": OpType.RECVANYSOURCE,
    "coalesced": OpType.COALESCED,
}
"""PyTorch's types of collectives, by our names for them."""


class CallQueue:
    """Runs the calls of one group one after the other.

    A started call is run by a thread of the group, or by the first thread that waits for it: if that is soon,
    no thread is switched. Only the holder of the turn takes a call from the queue, so their order is kept.
    Callbacks of futures run after the turn: they may start calls and wait for them, which another thread of
    the group then runs.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._started: collections.deque[StartedWork] = collections.deque()
        self._turn = threading.Lock()
        self._threads: list[DelayedThread] = []
        self._in_callbacks: set[DelayedThread] = set()

    def run_now(self, function: Callable[[], Any]) -> bool:
        """Runs a function in the calling thread unless something is under way; whether it has."""
        if self._started or not self._turn.acquire(blocking=False):
            return False
        try:
            function()
        finally:
            self._turn.release()
        return True

    def start(self, work: StartedWork) -> None:
        """Queues a call after those started before."""
        self._started.append(work)
        self._have_run()

    def run_until(self, work: StartedWork) -> None:
        """Runs the queue up to a call, unless a thread of the group does."""
        while not work.is_ended and self._turn.acquire(blocking=False):
            ended = None
            try:
                if self._started:
                    ended = self._started.popleft()
                    if not self._started:
                        self._have_nothing_run()
                    ended.run()
            finally:
                self._turn.release()
            if ended is not None:
                ended.settle()

    def stop(self) -> None:
        """Ends the threads after the last call."""
        for thread in self._threads:
            thread.stop()

    def _have_run(self) -> None:
        """Has a thread run the queue that is not in callbacks, which may be waiting for the calls."""
        for thread in self._threads:
            if thread not in self._in_callbacks:
                break
        else:
            function = functools.partial(self._run_started, len(self._threads))
            thread = DelayedThread(self._name, function)
            self._threads.append(thread)
        thread.call_soon()

    def _have_nothing_run(self) -> None:
        """Leaves threads of the group asleep, unless another thread has started a call meanwhile."""
        for thread in self._threads:
            thread.withdraw()
        if self._started:
            self._have_run()

    def _run_started(self, number: int) -> None:
        thread = self._threads[number]
        while self._started:
            with self._turn:
                if not self._started:
                    return
                work = self._started.popleft()
                work.run()
            if not work.has_futures:
                continue
            # A call that is started now finds the thread there, or is found by it.
            self._in_callbacks.add(thread)
            try:
                if self._started:
                    self._have_run()
                work.settle()
            finally:
                self._in_callbacks.discard(thread)


class EndedWork(dist.Work):
    """A completed collective; its result is the tensors it wrote to."""

    def __init__(self, name: str, results: Sequence[Any]) -> None:
        super().__init__()
        self._name, self._results = name, results

    def _get_op_type(self) -> int:
        """Returns PyTorch's number for the collective."""
        return int(OP_TYPES[self._name])

    def is_completed(self) -> bool:
        """Returns True once it has ended, well or not."""
        return True

    def is_success(self) -> bool:
        """Returns True if it has ended without an error."""
        return True

    def exception(self) -> BaseException | None:
        """Returns its error; None if there was none."""
        return None

    @never_compiled
    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:  # noqa: ARG002
        """Returns at once."""
        return True

    def synchronize(self) -> None:
        """Waits until it has ended."""
        self.wait()

    def block_current_stream(self) -> None:
        """Orders the current stream after it."""
        self.wait()

    @never_compiled
    def result(self) -> list[Any]:
        """Returns the tensors it wrote to."""
        return list(self._results)

    @never_compiled
    def get_future(self) -> torch.futures.Future[Any]:
        """Returns a future with `result()` as its value."""
        future: torch.futures.Future[Any] = self._new_future()
        future.set_result(self.result())
        return future

    def _new_future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future()

    def get_future_result(self) -> torch.futures.Future[Any]:
        """Returns a future with 0, PyTorch's number for success."""
        future: torch.futures.Future[Any] = self._new_future()
        future.set_result(0)
        return future


class StartedWork(EndedWork):
    """A collective that was started, and is run in its turn."""

    def __init__(
        self, queue: CallQueue, name: str, function: Callable[[], Any], results: Sequence[Any]
    ) -> None:
        super().__init__(name, results)
        self._queue, self._function = queue, function
        self._running = threading.Lock()
        self._running.acquire()
        self._error: BaseException | None = None
        self._futures: list[torch.futures.Future[Any]] = []
        self._fence = threading.Lock()
        self.is_ended = False

    def run(self) -> None:
        """Makes the call; called once, by the holder of the turn, which then calls `settle`."""
        try:
            with without_modes():
                self._function()
        except BaseException as error:  # raised where it is waited for
            self._error = named(error)
        del self._function  # with the tensors it holds
        with self._fence:
            self.is_ended = True
        self._running.release()

    @property
    def has_futures(self) -> bool:
        """True if anybody has asked for a future."""
        return bool(self._futures)

    def settle(self) -> None:
        """Completes futures and runs their callbacks; called once, after the turn."""
        futures, self._futures = self._futures, []
        for future in futures:
            self._settle(future)

    def is_completed(self) -> bool:
        """Returns True once it has ended, well or not."""
        if not self.is_ended:
            time.sleep(POLL_PAUSE_SECONDS)  # a loop of polls would keep Python from the thread that runs it
        return self.is_ended

    def is_success(self) -> bool:
        """Returns True if it has ended without an error."""
        return self.is_ended and self._error is None

    def exception(self) -> BaseException | None:
        """Returns its error; None if there was none."""
        return self._error

    @never_compiled
    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Blocks until it has ended; raises its error. After `timeout` it goes on and can be waited for."""
        if not self.is_ended:
            if timeout == NO_TIMEOUT:
                self._queue.run_until(self)
            self._wait_for_thread(timeout.total_seconds() or float("inf"))
        if self._error is not None:
            raise self._error
        return True

    @never_compiled
    def result(self) -> list[Any]:
        """Returns the tensors it wrote to, once it has ended."""
        self.wait()
        return list(self._results)

    @never_compiled
    def get_future(self) -> torch.futures.Future[Any]:
        """Returns a future for the list of tensors it wrote to."""
        with self._fence:
            if not self.is_ended:
                future: torch.futures.Future[Any] = self._new_future()
                self._futures.append(future)
                return future.then(_value_of)  # an error is an error to C++ too
        future = self._new_future()
        self._settle(future)
        return future if self._error is None else future.then(_value_of)

    def _settle(self, future: torch.futures.Future[Any]) -> None:
        future.set_result(list(self._results) if self._error is None else self._error)

    def _wait_for_thread(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.is_ended:
            left = end - time.monotonic()
            if left <= 0:
                raise named(DeadlineError(f"the collective has not ended in {seconds:g} seconds"))
            if self._running.acquire(timeout=min(left, POLL_SECONDS)):
                self._running.release()


class SeveralWorks(EndedWork):
    """Collectives that were started together, and are waited for together."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__("coalesced", [])
        self._works = works

    def is_completed(self) -> bool:
        """Returns True once all have ended."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Returns True if all have ended without an error."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """Returns the first error of any."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    @never_compiled
    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Blocks until all have ended."""
        for work in self._works:
            work.wait(timeout) if timeout != NO_TIMEOUT else work.wait()
        return True

    @never_compiled
    def result(self) -> list[Any]:
        """Lists the tensors that all of them wrote to."""
        return [tensor for work in self._works for tensor in work.result()]

    @never_compiled
    def get_future(self) -> torch.futures.Future[Any]:
        """Returns a future for all tensors they wrote to."""
        ended = torch.futures.collect_all([work.get_future() for work in self._works])
        return ended.then(lambda futures: [tensor for one in futures.value() for tensor in one.value()])


def _value_of(ended: torch.futures.Future[Any]) -> Any:
    value = ended.value()
    if isinstance(value, BaseException):
        raise value
    return value


def named(error: BaseException) -> BaseException:
    """Returns the error as a RuntimeError too, the type that programs for torch.distributed expect."""
    if not isinstance(error, CrossDeviceError) or isinstance(error, RuntimeError):
        return error
    kind = type(error)
    both = _both.get(kind)
    if both is None:
        both = _both[kind] = type(
            kind.__name__, (kind, dist.DistBackendError), {"__module__": kind.__module__}
        )
    text = f"after the timeout of a collective: {error}" if isinstance(error, DeadlineError) else str(error)
    raised: BaseException = both(text).with_traceback(error.__traceback__)
    raised.__cause__ = error.__cause__
    return raised


_both: dict[type[BaseException], type[BaseException]] = {}


EVENT_SECONDS = 1.0
"""Wait for the end of an event."""

_ending = BackgroundThread("crossdevice profiler events")


def recorded(name: str, tensors: Sequence[torch.Tensor], call: Callable[[], None]) -> Callable[[], None]:
    """Records the call in an event that begins now and, being asynchronous, ends in another thread."""
    event = _record_function_with_args_enter(f"crossdevice:{name}", *tensors)

    def run() -> None:
        try:
            call()
        finally:
            _ending.submit(lambda: _record_function_with_args_exit(event)).wait(EVENT_SECONDS)

    return run


def ended_elsewhere(name: str, tensors: Sequence[torch.Tensor], begin: Callable[[], dist.Work]) -> dist.Work:
    """Begins a call of another engine within an event, which is over when that has taken it over."""
    event = _record_function_with_args_enter(f"crossdevice:{name}", *tensors)
    try:
        return begin()
    finally:
        _ending.submit(lambda: _record_function_with_args_exit(event)).wait(EVENT_SECONDS)
