"""What ran, when, on which devices: a bounded flight recorder that is always on, and traces for Perfetto."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from typing_extensions import assert_never

from crossdevice.plans.steps import (
    Add,
    Copy,
    EngineAllReduce,
    Finish,
    Join,
    Split,
    Step,
    sources_of,
    targets_of,
)
from crossdevice.values.device import Device, host_device

Phase = Literal["queue", "pack", "reduce", "copy", "unpack"]

MAX_RECORDED = 2048
"""Events the flight recorder keeps; a step of a plan is one, a fused reduction is one."""

FOLDER_VARIABLE = "CROSSDEVICE_FLIGHT_RECORDER"
"""Names a folder: when a running reduction fails, the record is written there."""

MICRO = 1e6

_DUMPED = "_crossdevice_has_dumped"


class Work(NamedTuple):
    """Something that is done on devices together: described once, recorded many times."""

    phase: Phase
    name: str
    devices: tuple[Device, ...]
    num_bytes: int = 0
    plan: str = ""


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
"""What was done, from when to when by `now`, and the bytes of an element of it: cheap to append."""

now = time.perf_counter


class FlightRecorder:
    """The last events; `events` is appended to wherever work is done, at the cost of two clock readings."""

    def __init__(self) -> None:
        self.events: collections.deque[Event] = collections.deque(maxlen=MAX_RECORDED)
        self._num_dumps = itertools.count()

    def dump_after(self, error: BaseException) -> None:
        """Writes the record to the folder that the environment names, and says so in the error."""
        folder = os.environ.get(FOLDER_VARIABLE)
        if not folder or _DUMPED in error.__dict__:
            return
        # A mark on the error, not a reference to it: tracebacks keep arrays alive.
        error.__dict__[_DUMPED] = True
        path = Path(folder) / f"crossdevice-{os.getpid()}-{next(self._num_dumps)}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_trace(path, list(self.events))
            note = f"crossdevice wrote what ran before to {path}"
        except OSError as failure:  # must not take the place of the error itself
            note = f"crossdevice could not write what ran before to {path}: {failure.strerror}"
        if hasattr(error, "add_note"):  # Python 3.11 and later
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
    """What ran last, oldest first; bounded, and always there to ask when something went wrong."""
    return [_record(*event) for event in list(flight_recorder.events)]


@contextlib.contextmanager
def trace(path: str | Path) -> Iterator[None]:
    """Writes what runs inside the block to a file that opens in https://ui.perfetto.dev.

    One row per device; phases queue, pack, reduce, copy and unpack; an arrow for every copy. The file is
    also written when an error leaves the block.
    """
    outer = flight_recorder.events
    inner: collections.deque[Event] = collections.deque()
    flight_recorder.events = inner
    try:
        yield
    finally:
        flight_recorder.events = outer
        events = list(inner)
        outer.extend(events)
        write_trace(path, events)


def write_trace(path: str | Path, events: Iterable[Event]) -> None:
    """The events as Chrome trace JSON."""
    document = {"displayTimeUnit": "ns", "traceEvents": list(_chrome_events(events))}
    Path(path).write_text(json.dumps(document), encoding="utf-8")


def _chrome_events(events: Iterable[Event]) -> Iterator[dict[str, Any]]:
    records = [(event[0], _record(*event)) for event in events]
    origin = min((record.started_seconds for _, record in records), default=0.0)
    process = os.getpid()
    rows: dict[Device, int] = {}
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": "crossdevice"}}
    for number, (done, record) in enumerate(records):
        for device in dict.fromkeys(record.devices):
            if device not in rows:
                rows[device] = len(rows) + 1
                name = {"ph": "M", "pid": process, "tid": rows[device]}
                yield {**name, "name": "thread_name", "args": {"name": str(device)}}
                yield {**name, "name": "thread_sort_index", "args": {"sort_index": device.index}}
            start = (record.started_seconds - origin) * MICRO
            arguments = {"bytes": record.num_bytes, "plan": record.plan}
            yield {
                "ph": "X",
                "pid": process,
                "tid": rows[device],
                "ts": start,
                "dur": record.seconds * MICRO,
                "name": record.what,
                "cat": record.phase,
                "args": arguments,
            }
        if isinstance(done, Copy) and len(record.devices) == 2:
            source, target = (rows[device] for device in record.devices)
            middle = (record.started_seconds + record.seconds / 2 - origin) * MICRO
            flow = {"pid": process, "cat": "copy", "name": "copy", "id": number, "ts": middle}
            yield {**flow, "ph": "s", "tid": source}
            yield {**flow, "ph": "f", "bp": "e", "tid": target}


def _record(done: Work | Step, started: float, stopped: float, item_bytes: int) -> Record:
    if isinstance(done, Work):
        return Record(
            done.phase, done.name, done.devices, done.num_bytes, started, stopped - started, done.plan
        )
    buffers = (*sources_of(done), *targets_of(done))
    devices = tuple(dict.fromkeys(buffer.device for buffer in buffers))
    num_bytes = sum(buffer.length for buffer in targets_of(done)) * item_bytes
    what = f"{type(done).__name__.lower()} b{buffers[-1].number}"
    return Record(_phase(done), what, devices, num_bytes, started, stopped - started, "step by step")


def _phase(step: Step) -> Phase:
    match step:
        case Copy():
            return "copy"
        case Add() | Finish() | EngineAllReduce():
            return "reduce"
        case Split():
            return "pack"
        case Join():
            return "unpack"
        case _:
            assert_never(step)


CALLER = (host_device(0),)
"""Where reading and checking happens: the host's first device."""
