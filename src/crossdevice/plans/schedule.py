"""Concurrency of a plan's steps: the track each runs on, and what it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, assert_never

from crossdevice.plans import steps
from crossdevice.plans.steps import Step, sources_of, targets_of
from crossdevice.values.device import Track


class Scheduled(NamedTuple):
    """A step, the tracks it runs on, and the numbers of the steps on other tracks that it waits for.

    The steps of one track run in the order of the plan; an engine's step is on the tracks of all its
    devices. A step without tracks makes views, which takes no time: whoever reads them waits for what they
    are views of. `is_awaited` says that a later step waits for this one.
    """

    step: Step
    tracks: tuple[Track, ...]
    waits: tuple[int, ...]
    is_awaited: bool


def scheduled(ordered: Sequence[Step]) -> tuple[Scheduled, ...]:
    """The steps with what they wait for; nothing is waited for that an earlier wait has made certain."""
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
