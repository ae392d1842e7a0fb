"""Worker threads: as many as the machine grants, asleep without work, waited for only if they have begun.

Control groups, which containers use, may grant less than the machine has.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue

from crossdevice import runtime
from crossdevice.errors import OptionError
from crossdevice.values.launchers import local_processes

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def words_of_groups(controller: str, unified: list[str], legacy: list[str]) -> Iterator[list[str]]:
    """Reads the words of these files, of version 2 or 1, for every control group this process is in.

    >>> all(len(words) == 1 for words in words_of_groups("memory", ["memory.max"], ["memory.limit_in_bytes"]))
    True
    """
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = ROOT, unified
        elif controller in controllers.split(","):
            base, names = ROOT / controller, legacy
        else:
            continue
        group = base / path.lstrip("/")
        # In a container the path may be the host's, and not exist; what counts is mounted at the base.
        for level in (group, *group.parents):
            if level.is_relative_to(base):
                yield from _words_in(level, names)


def _words_in(group: Path, names: list[str]) -> Iterator[list[str]]:
    try:
        yield " ".join((group / name).read_text() for name in names).split()
    except OSError:
        return


_num_threads: int | None = None


def num_threads() -> int:
    """Returns the number of threads of a large pass, the calling one included.

    What `set_num_threads` set; else what the variable CROSSDEVICE_NUM_THREADS says; else the processors
    this process may run on, shared evenly with the other processes that the launcher started here.

    Returns:
        A number of 1 or more.

    >>> num_threads() >= 1
    True
    """
    global _num_threads
    if _num_threads is None:
        given = runtime.NUM_THREADS.read()
        _num_threads = _checked(given, runtime.NUM_THREADS.variable) if given else granted_processors()
    return _num_threads


def set_num_threads(number: int | None) -> None:
    """Sets how many threads a large pass may use.

    Args:
        number: 1 or more; None goes back to the variable CROSSDEVICE_NUM_THREADS, or to the machine.

    Raises:
        OptionError: the number is outside its range.
    """
    global _num_threads
    _num_threads = None if number is None else _checked(number, "the number of threads")


def run_together(work: Callable[[], None], num_participants: int) -> None:
    """Calls `work` here and, if they find the time, in up to `num_participants` - 1 worker threads.

    Every call must go on until all work is taken: calls that no worker has begun when the caller is
    done are cancelled, so a busy machine or another caller's pass delays nothing. No worker is at
    work any more when this returns or raises, also if it was interrupted.
    """
    calls = [_Call(work) for _ in range(num_participants - 1)]
    try:
        _workers.offer(calls)
        work()
        _wait_for(calls)
    except BaseException:
        # Perhaps an interrupt, at any moment, of the waiting too: workers that went on would write results
        # into memory that the next call uses.
        _wait_for(calls)
        raise
    for call in calls:
        if call.failure is not None:
            raise call.failure


def wake_worker(work: Callable[[], None], dismiss: Callable[[], None]) -> Callable[[], bool]:
    """Lets a worker thread call `work` without waiting for it; `dismiss` ends it when workers are needed.

    Returns a function that says whether the worker has yet to begin.
    """
    call = _Call(work)

    def end() -> None:
        call.cancel()
        dismiss()

    _workers.offer([call])
    _workers.end_standby = end
    return call.is_waiting


def _wait_for(calls: Sequence[_Call]) -> None:
    for call in calls:
        call.cancel_or_wait()


class _Call:
    """A call of `work` that either one worker makes, or the caller takes back."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        # The first claim gets the call. Appending is atomic: an interrupt cannot divide it.
        self._claims: list[str] = []
        self._running = threading.Lock()
        self._running.acquire()
        self.failure: BaseException | None = None

    def run_unless_cancelled(self) -> None:
        self._claims.append("worker")
        if self._claims[0] == "worker":
            try:
                self._run_work()
            except BaseException as failure:
                self.failure = failure
            finally:
                self._running.release()

    def is_waiting(self) -> bool:
        """Returns whether no worker has begun, and one still may."""
        return self._work is not None

    def cancel(self) -> bool:
        """Cancels it; returns whether no worker works for it, now or later. May be called again."""
        self._claims.append("caller")
        if self._claims[0] == "caller":
            self._work = None
        return self._claims[0] == "caller"

    def cancel_or_wait(self) -> None:
        """Returns when no worker works for it, now or later; may be called again."""
        if not self.cancel():
            # `with`, and not `acquire`: an interrupt finds the lock either not taken or given back.
            with self._running:
                pass

    def _run_work(self) -> None:
        # A worker asleep must not keep the arrays of its last work alive.
        work, self._work = self._work, None
        assert work is not None
        work()


def _current_processor() -> int | None:
    """Returns the number of the processor that runs the calling thread; None if the system does not say."""
    return None if _sched_getcpu is None else int(_sched_getcpu())


# With the interpreter's lock: giving it back takes longer than the call.
_sched_getcpu = getattr(ctypes.PyDLL(None), "sched_getcpu", None) if sys.platform == "linux" else None


class _Workers:
    """The worker threads of this process, started when first needed."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        self._lock = threading.RLock()  # a signal handler may reduce while its thread is here
        self._num_workers = 0
        self._processors: dict[int, set[int] | None] = {}
        """The processors that each worker was given here, by its number in the system; None before that."""
        self._avoided: int | None = None
        self.end_standby: Callable[[], None] | None = None

    def offer(self, calls: Sequence[_Call]) -> None:
        if self._num_workers < len(calls):
            self._start_workers(len(calls))
        self._avoid_processor(_current_processor())
        end_standby, self.end_standby = self.end_standby, None
        if end_standby is not None:
            end_standby()
        for call in calls:
            self._calls.put(call)

    def _start_workers(self, number: int) -> None:
        with self._lock:
            while self._num_workers < number:
                # Daemons: an interpreter that ends does not wait for threads that sleep for ever.
                name = f"crossdevice-{self._num_workers + 1}"
                thread = threading.Thread(target=self._serve, name=name, daemon=True)
                thread.start()
                if thread.native_id:  # 0 is the caller
                    self._processors[thread.native_id] = None
                self._avoided = None
                self._num_workers += 1

    def _avoid_processor(self, number: int | None) -> None:
        """Lets workers run on all processors of the caller but this one, its own.

        Where the others of a virtual machine sleep, Linux wakes a worker on the caller's, which then waits.
        Workers that a user has given other processors keep them.
        """
        if sys.platform != "linux" or number in (None, self._avoided):
            return
        self._avoided = number
        with contextlib.suppress(OSError):  # not allowed here
            usable = os.sched_getaffinity(0)
            others = usable - {number}
            for worker, given in list(self._processors.items()) if others else ():
                # A control group that shrinks takes processors from the caller, too.
                if given is None or os.sched_getaffinity(worker) in (given, given & usable):
                    os.sched_setaffinity(worker, others)
                    self._processors[worker] = others

    def _serve(self) -> None:
        while True:
            self._calls.get().run_unless_cancelled()


def _start_anew() -> None:
    """Resets the workers after a fork: threads do not survive it, and one may have held a lock."""
    global _workers
    _workers = _Workers()


def _checked(given: object, name: str) -> int:
    try:
        number = int(given)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        number = 0
    if number < 1 or isinstance(given, (bool, float)):
        raise OptionError(f"{name} must be a whole number, 1 or more; got {given!r}")
    return int(number)


def granted_processors() -> int:
    """Counts the processors this process may run on, at most its share of its host or container."""
    num_here = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else num_here
    # Launchers that bind processes have shared processors out; a control group is one for all of them.
    fair = math.ceil(min(num_here, _share())) // local_processes(os.environ)
    return max(1, min(usable, fair))


def _share() -> float:
    """Processors' worth of time that control groups grant; infinite if they don't say."""
    groups = words_of_groups("cpu", ["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"])
    # "max" and -1 are no limits.
    limits = (words for words in groups if all(word.isdigit() for word in words))
    return min((int(quota) / int(period) for quota, period in limits), default=math.inf)


_workers = _Workers()
runtime.renew_after_fork(_start_anew)
