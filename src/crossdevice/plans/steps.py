"""The few kinds of step a plan is made of, and the write-once buffers they join.

A plan works on one flat pack of elements. Each buffer holds a range of it: the partial combination of
some replicas' elements or, once finished, the result. "Add" stands for whatever operation the
plan is run with: a sum, a product, a minimum or a maximum.
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

from crossdevice.values.device import Device


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A numbered place on a device for the elements `start` to `stop` of the pack, written once.

    `replicas` has a bit for each replica that counts in it; `is_finished` marks results.
    """

    number: int
    device: Device
    start: int
    stop: int
    replicas: int
    is_finished: bool = False

    @property
    def length(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def num_replicas(self) -> int:
        """Number of replicas that count in it."""
        return self.replicas.bit_count()


@dataclasses.dataclass(frozen=True)
class Copy:
    """The same elements in a new buffer, usually on another device."""

    source: Buffer
    target: Buffer


@dataclasses.dataclass(frozen=True)
class Add:
    """Buffers of one range on one device, combined from left to right."""

    sources: tuple[Buffer, ...]
    target: Buffer


@dataclasses.dataclass(frozen=True)
class Finish:
    """A combination in which every replica counts becomes a result: divided for a mean, rounded once."""

    source: Buffer
    target: Buffer


@dataclasses.dataclass(frozen=True)
class Split:
    """A buffer cut into consecutive parts; the parts are views."""

    source: Buffer
    targets: tuple[Buffer, ...]


@dataclasses.dataclass(frozen=True)
class Join:
    """Consecutive parts put together."""

    sources: tuple[Buffer, ...]
    target: Buffer


@dataclasses.dataclass(frozen=True)
class EngineAllReduce:
    """One collective of a library (NCCL): all sources combined and finished on each of their devices."""

    sources: tuple[Buffer, ...]
    targets: tuple[Buffer, ...]


Step: TypeAlias = Copy | Add | Finish | Split | Join | EngineAllReduce


def sources_of(step: Step) -> tuple[Buffer, ...]:
    """Returns the buffers a step reads."""
    return step.sources if isinstance(step, (Add, Join, EngineAllReduce)) else (step.source,)


def targets_of(step: Step) -> tuple[Buffer, ...]:
    """Returns the buffers a step writes."""
    return step.targets if isinstance(step, (Split, EngineAllReduce)) else (step.target,)
