"""A plan: the steps of a reduction, its traffic and rounds, what may be in flight at once, all as text."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple, assert_never

from crossdevice.plans import steps
from crossdevice.plans.steps import Buffer, Copy, EngineAllReduce, Step, sources_of, targets_of
from crossdevice.values.device import Device, Track
from crossdevice.values.quantities import counted, size_text


class Scheduled(NamedTuple):
    """A step, the tracks it runs on, and the numbers of the steps on other tracks that it waits for.

    The steps of one track run in the order of the plan; an engine's step is on the tracks of all its
    devices. A step without tracks makes views, which takes no time: their readers wait for what they
    are views of. `is_awaited` says that a later step waits for this one.
    """

    step: Step
    tracks: tuple[Track, ...]
    waits: tuple[int, ...]
    is_awaited: bool


def scheduled(ordered: Sequence[Step]) -> tuple[Scheduled, ...]:
    """Returns the steps with what they wait for, without waits that earlier ones imply."""
    tracks = [_tracks_of(step) for step in ordered]
    writers: dict[int, tuple[int, ...]] = {}
    certain: dict[tuple[tuple[Track, ...], tuple[Track, ...]], int] = {}
    waits: list[tuple[int, ...]] = []
    for number, step in enumerate(ordered):
        needed = {writer for buffer in sources_of(step) for writer in writers.get(buffer.number, ())}
        written = (number,) if tracks[number] else tuple(sorted(needed))
        writers.update((buffer.number, written) for buffer in targets_of(step))
        waited: list[int] = []
        for other in sorted(needed, reverse=True) if tracks[number] else ():
            ends = tracks[number], tracks[other]
            in_order = len(tracks[number]) == 1 and tracks[number] == tracks[other]
            if not in_order and certain.get(ends, -1) < other:
                certain[ends] = other
                waited.append(other)
        waits.append(tuple(waited))
    awaited = {number for numbers in waits for number in numbers}
    is_awaited = [number in awaited for number in range(len(ordered))]
    return tuple(map(Scheduled, ordered, tracks, waits, is_awaited))


def _tracks_of(step: Step) -> tuple[Track, ...]:
    match step:
        case steps.Copy():
            return ((step.source.device, step.target.device),)
        case steps.Add() | steps.Finish() | steps.Join():
            return ((step.target.device, step.target.device),)
        case steps.EngineAllReduce():
            return tuple((buffer.device, buffer.device) for buffer in step.targets)
        case steps.Split():
            return ()
        case _:
            assert_never(step)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Steps of an algorithm for one pack: replicas come in as `inputs`, results leave as `outputs`."""

    inputs: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Buffer, ...]

    @property
    def num_elements(self) -> int:
        """Elements in the pack."""
        return self.inputs[0].length

    @functools.cached_property
    def devices(self) -> tuple[Device, ...]:
        """Every device with a buffer."""
        steps = (buffer for step in self.steps for buffer in targets_of(step))
        return tuple(dict.fromkeys(buffer.device for buffer in (*self.inputs, *steps)))

    @functools.cached_property
    def schedule(self) -> tuple[Scheduled, ...]:
        """The steps with their tracks, for devices that work at the same time."""
        return scheduled(self.steps)

    def traffic(self, *, unsummed: bool = False) -> dict[tuple[Device, Device], int]:
        """Counts the elements copied over each link (from, to), without copies within a device.

        With `unsummed`, partial sums travel as the contributions they are made of: how the step
        executor keeps the order of replicas under `"accurate"` and `"exact"`.
        """
        elements: collections.Counter[tuple[Device, Device]] = collections.Counter()
        for step in self.steps:
            if isinstance(step, Copy) and step.source.device != step.target.device:
                arrays = step.source.num_replicas if unsummed and not step.source.is_finished else 1
                elements[step.source.device, step.target.device] += arrays * step.source.length
        return dict(elements)

    def total_traffic(self, *, unsummed: bool = False) -> int:
        """Counts the elements copied between devices, all links together."""
        return sum(self.traffic(unsummed=unsummed).values())

    def busiest_device_traffic(self) -> int:
        """Returns the maximum of elements that a device sends or receives: the bound on equal links."""
        sent: collections.Counter[Device] = collections.Counter()
        received: collections.Counter[Device] = collections.Counter()
        for (source, target), elements in self.traffic().items():
            sent[source] += elements
            received[target] += elements
        return max([*sent.values(), *received.values()], default=0)

    @functools.cached_property
    def num_rounds(self) -> int:
        """The longest chain of copies between devices that wait for one another."""
        depth: dict[int, int] = {}
        for step in self.steps:
            before = max((depth.get(buffer.number, 0) for buffer in sources_of(step)), default=0)
            crosses = isinstance(step, Copy) and step.source.device != step.target.device
            after = before + (1 if crosses or isinstance(step, EngineAllReduce) else 0)
            for buffer in targets_of(step):
                depth[buffer.number] = after
        return max((depth.get(buffer.number, 0) for buffer in self.outputs), default=0)

    @functools.cached_property
    def last_uses(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the buffers that are last read by each step."""
        needed = {buffer.number for buffer in self.outputs}
        uses: list[tuple[int, ...]] = []
        for step in reversed(self.steps):
            touched = {buffer.number for buffer in (*sources_of(step), *targets_of(step))}
            uses.append(tuple(sorted(touched - needed)))
            needed |= touched
        return tuple(reversed(uses))


def render_plan(plan: Plan, item_bytes: int, *, unsummed: bool = False) -> str:
    """Writes one line per step: operation, device, buffers, and the bytes that a copy sends.

    With `unsummed`, copies of partial sums send the contributions these are made of.
    """
    size = size_text(plan.num_elements * item_bytes)
    travelling = size_text(plan.total_traffic(unsummed=unsummed) * item_bytes)
    lines = [
        f"{counted(len(plan.inputs), 'replica')} of {counted(plan.num_elements, 'element')} ({size}), "
        f"{counted(len(plan.outputs), 'result')}, {counted(plan.num_rounds, 'round')}, "
        f"{travelling} between devices"
    ]
    lines += [f"  b{buffer.number} = replica {i} on {buffer.device}" for i, buffer in enumerate(plan.inputs)]
    lines += [f"  {_line(step, item_bytes, unsummed)}" for step in plan.steps]
    results = ", ".join(f"b{buffer.number} on {buffer.device}" for buffer in plan.outputs)
    return "\n".join([*lines, f"  results: {results}"])


def _line(step: Step, item_bytes: int, unsummed: bool) -> str:
    sources = " ".join(_name(buffer) for buffer in sources_of(step))
    targets = " ".join(_name(buffer) for buffer in targets_of(step))
    size = size_text(sum(buffer.length for buffer in targets_of(step)) * item_bytes)
    match step:
        case steps.Copy():
            arrays = step.source.num_replicas if unsummed and not step.source.is_finished else 1
            sent = size if arrays == 1 else f"{arrays} contributions of {size}"
            return f"{targets} = copy {sources} from {step.source.device} to {step.target.device} ({sent})"
        case steps.Add() | steps.Finish() | steps.Split() | steps.Join():
            verb = type(step).__name__.lower()
            return f"{targets} = {verb} {sources} on {targets_of(step)[0].device}"
        case steps.EngineAllReduce():
            return f"{targets} = engine all-reduce {sources} ({size})"


def _name(buffer: Buffer) -> str:
    return f"b{buffer.number}[{buffer.start}:{buffer.stop}]"
