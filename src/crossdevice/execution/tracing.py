"""Records of runs: a bounded flight recorder that is always on, and traces for Perfetto."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, assert_never

from crossdevice import runtime
from crossdevice.errors import FileError
from crossdevice.plans import steps
from crossdevice.plans.steps import Step, sources_of, targets_of
from crossdevice.values.device import Device, host_device

Phase = Literal["queue", "pack", "reduce", "copy", "unpack", "forward", "backward"]

MAX_RECORDED = 2048
"""Events the flight recorder keeps; a step of a plan is one, a fused reduction is one."""

NANO = 1e9

TRANSFER = "transfer"

_DUMPED = "_crossdevice_has_dumped"


class Work(NamedTuple):
    """Something done on several devices together; a device may be named twice."""

    phase: Phase
    name: str
    devices: tuple[Device, ...]
    num_bytes: int = 0
    plan: str = ""


def transfer(source: Device, target: Device, num_bytes: int) -> Work:
    """One array that goes from a device to another: an arrow in a trace."""
    return Work("copy", TRANSFER, (source, target), num_bytes)


class Record(NamedTuple):
    """One entry of the flight recorder, for people: what, who, how many bytes, how long, in which plan."""

    phase: Phase
    what: str
    devices: tuple[Device, ...]
    num_bytes: int
    started_seconds: float
    seconds: float
    plan: str


Event: TypeAlias = "tuple[Work | Step, float, float, int]"
"""What was done, its start and stop by `now`, and the bytes of one element: cheap to append."""

now = time.perf_counter


class _Traced(collections.deque[Event]):
    """Takes the place of the recorder's events while there are traces, which get each event as well."""

    def __init__(self, kept: collections.deque[Event], traces: Iterable[collections.deque[Event]]) -> None:
        super().__init__(maxlen=0)
        self._all = (kept, *traces)

    def append(self, event: Event, /) -> None:
        """Appends to all."""
        for events in self._all:
            events.append(event)


class FlightRecorder:
    """The last events; `events` is appended to wherever work is done, at the cost of two clock readings."""

    def __init__(self) -> None:
        self.kept: collections.deque[Event] = collections.deque(maxlen=MAX_RECORDED)
        self.events = self.kept
        self._traces: dict[int, collections.deque[Event]] = {}
        self._num_dumps = itertools.count()

    def start_trace(self, events: collections.deque[Event]) -> None:
        """Appends what is done from now on to `events` as well."""
        self._traces[id(events)] = events
        self._follow()

    def end_trace(self, events: collections.deque[Event]) -> None:
        """Appends no more to `events`; nothing happens if that was never begun."""
        self._traces.pop(id(events), None)
        self._follow()

    def _follow(self) -> None:
        # Without a lock, which an interrupt might leave held: whoever changes the traces looks again.
        traces = None
        while traces != [*self._traces]:
            traces = [*self._traces]
            found = [*self._traces.copy().values()]
            self.events = _Traced(self.kept, found) if found else self.kept

    def dump_after(self, error: BaseException) -> None:
        """Writes the record to the folder named by CROSSDEVICE_FLIGHT_RECORDER; adds a note to the error."""
        folder = runtime.FLIGHT_RECORDER.read()
        if not folder or _DUMPED in error.__dict__:
            return
        # A mark on the error, not a reference to it: tracebacks keep arrays alive.
        error.__dict__[_DUMPED] = True
        path = Path(folder) / f"crossdevice-{os.getpid()}-{next(self._num_dumps)}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_trace(path, list(self.kept))
            note = f"crossdevice wrote what ran before to {path}"
        except OSError as failure:  # must not take the place of the error itself
            note = f"crossdevice could not write what ran before: {failure}"
        error.add_note(note)


flight_recorder = FlightRecorder()


class recorded:  # noqa: N801 - read like the function it is used as
    """Records the block as one piece of work, also when an error leaves it."""

    __slots__ = ("_started", "_work")

    def __init__(self, work: Work) -> None:
        self._work = work

    def __enter__(self) -> None:
        self._started = now()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        flight_recorder.events.append((self._work, self._started, now(), 1))
        if error is not None:
            flight_recorder.dump_after(error)


def flight_record() -> list[Record]:
    """Returns the last 2048 events, oldest first.

    They are recorded all the time, to be read when something went wrong.

    Returns:
        A list of records, each with the `phase`, `what` it was, `devices`, `num_bytes`, `started_seconds`,
        `seconds` and the `plan`.

    >>> import numpy as np, crossdevice as cd
    >>> _ = cd.all_reduce([np.ones(4, np.float32), np.ones(4, np.float32)])
    >>> cd.flight_record()[-1].phase
    'reduce'
    """
    return [_record(*event) for event in list(flight_recorder.kept)]


@contextlib.contextmanager
def trace(path: str | Path) -> Iterator[None]:
    """Writes what runs inside the block to a file that opens in https://ui.perfetto.dev.

    Blocks may overlap, in several threads too: each gets all that runs in the process meanwhile.
    It has one row per device, the phases queue, pack, reduce, copy and unpack, an arrow for every copy, and
    the forward and backward passes of PyTorch modules on several devices.
    The file is also written if the block raises.

    Args:
        path: the file, replaced if it exists.

    Returns:
        A context manager.

    Raises:
        FileError: the file cannot be written.

    >>> import pathlib, tempfile, numpy as np, crossdevice as cd
    >>> path = pathlib.Path(tempfile.mkdtemp(), "run.json")
    >>> with cd.trace(path):
    ...     _ = cd.all_reduce([np.ones(4), np.ones(4)])
    >>> "traceEvents" in path.read_text()
    True
    """
    _write(path, "a", "")  # what cannot be written is refused before the work, not after it
    events: collections.deque[Event] = collections.deque()
    try:
        try:
            flight_recorder.start_trace(events)
            yield
        finally:
            flight_recorder.end_trace(events)
    finally:
        flight_recorder.end_trace(events)  # again, if Ctrl-C came before the first time
        write_trace(path, list(events))


def write_trace(path: str | Path, events: Iterable[Event]) -> None:
    """The events as Chrome trace JSON."""
    document = {"displayTimeUnit": "ns", "traceEvents": list(_chrome_events(events))}
    _write(path, "w", json.dumps(document))


def _write(path: str | Path, mode: Literal["a", "w"], text: str) -> None:
    try:
        with open(path, mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror or error}") from error


def _chrome_events(events: Iterable[Event]) -> Iterator[dict[str, Any]]:
    records = sorted(
        ((event[0], _record(*event)) for event in events),
        # What encloses others first, though it was recorded after them.
        key=lambda pair: (pair[1].started_seconds, -pair[1].seconds),
    )
    origin = min((record.started_seconds for _, record in records), default=0.0)
    process = os.getpid()
    rows = _Rows()
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": "crossdevice"}}
    for number, (done, record) in enumerate(records):
        # Whole nanoseconds, as Perfetto counts: rounded apart, slices that nest would not.
        start = round((record.started_seconds - origin) * NANO)
        stop = round((record.started_seconds + record.seconds - origin) * NANO)
        threads = []
        for device in record.devices:
            thread, is_new = rows.place(device, start, stop)
            threads.append(thread)
            if is_new:
                name = {"ph": "M", "pid": process, "tid": thread}
                yield {**name, "name": "thread_name", "args": {"name": str(device)}}
                yield {**name, "name": "thread_sort_index", "args": {"sort_index": device.index}}
            yield {
                "ph": "X",
                "pid": process,
                "tid": thread,
                "ts": start / 1000,
                "dur": (stop - start) / 1000,
                "name": record.what,
                "cat": record.phase,
                "args": {"bytes": record.num_bytes, "plan": record.plan},
            }
        if len(threads) == 2 and (isinstance(done, steps.Copy) or record.what == TRANSFER):
            flow = {"pid": process, "cat": "copy", "name": "copy", "id": number, "ts": (start + stop) / 2000}
            yield {**flow, "ph": "s", "tid": threads[0]}
            yield {**flow, "ph": "f", "bp": "e", "tid": threads[1]}


class _Rows:
    """One row per device; more only where threads worked at once, since slices of a row have to nest."""

    def __init__(self) -> None:
        self._open: dict[Device, list[tuple[int, list[int]]]] = {}
        self._count = itertools.count(1)

    def place(self, device: Device, start: int, stop: int) -> tuple[int, bool]:
        """A row of the device in which nothing ends inside this slice, and whether it is new."""
        rows = self._open.setdefault(device, [])
        for number, ends in rows:
            while ends and ends[-1] <= start:
                ends.pop()
            if not ends or stop <= ends[-1]:
                ends.append(stop)
                return number, False
        rows.append((next(self._count), [stop]))
        return rows[-1][0], True


def _record(done: Work | Step, started: float, stopped: float, item_bytes: int) -> Record:
    if isinstance(done, Work):
        devices = tuple(dict.fromkeys(done.devices))
        return Record(done.phase, done.name, devices, done.num_bytes, started, stopped - started, done.plan)
    buffers = (*sources_of(done), *targets_of(done))
    devices = tuple(dict.fromkeys(buffer.device for buffer in buffers))
    num_bytes = sum(buffer.length for buffer in targets_of(done)) * item_bytes
    what = f"{type(done).__name__.lower()} b{buffers[-1].number}"
    return Record(_phase(done), what, devices, num_bytes, started, stopped - started, "step by step")


def _phase(step: Step) -> Phase:
    match step:
        case steps.Copy():
            return "copy"
        case steps.Add() | steps.Finish() | steps.EngineAllReduce():
            return "reduce"
        case steps.Split():
            return "pack"
        case steps.Join():
            return "unpack"
        case _:
            assert_never(step)


READING = Work("queue", "read and check", (host_device(0),))
"""Before any work, on the host's first device."""
