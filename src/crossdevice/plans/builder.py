"""The builder with which an algorithm writes its plan."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence

from crossdevice.errors import PlanError
from crossdevice.plans import steps
from crossdevice.plans.plan import Plan
from crossdevice.plans.steps import Buffer, Step, sources_of, targets_of
from crossdevice.values.device import Device
from crossdevice.values.quantities import kind_text

MAX_OWNERS = 64
"""Maximum number of devices that sum a shard. Further replicas are models in host memory: with a
shard for each of a thousand, a plan would have two million steps, and take 20 s to build."""

OWNERS_OF_MANY = 16
"""Number of replicas that sum a shard each if there are more."""


class PlanBuilder:
    """Emits the steps of one plan; buffers come in and go out, arrays never appear.

    `inputs` has one buffer per replica. A combination that holds every replica is finished by
    itself before it is copied, joined or returned: an algorithm only says where sums are made.
    """

    def __init__(
        self, devices: Sequence[Device], num_elements: int, pack_number: int = 0, *, has_engine: bool = True
    ) -> None:
        """`has_engine` says that a library's engine can do this reduction, in any order."""
        self.pack_number = pack_number
        self.has_engine = has_engine
        self._num_buffers = 0
        self._steps: list[Step] = []
        self._all_replicas = (1 << len(devices)) - 1
        self._copies: dict[tuple[int, Device], Buffer] = {}
        self._finished: dict[int, Buffer] = {}
        self.inputs: tuple[Buffer, ...] = tuple(
            self._buffer(device, 0, num_elements, 1 << replica) for replica, device in enumerate(devices)
        )

    def copy(self, buffer: Buffer, to: Device) -> Buffer:
        """Copies the buffer's elements to device `to`, at most once; returns the buffer if it is there."""
        buffer = self._finish_if_complete(buffer)
        if buffer.device == to:
            return buffer
        known = self._copies.get((buffer.number, to))
        return known or self._copied(buffer, to)

    def add(self, buffers: Sequence[Buffer], at: Device) -> Buffer:
        """Combines buffers of one range on device `at`, from left to right."""
        if not buffers:
            raise PlanError("add has nothing to add; expected one buffer or more")
        sources = tuple(self.copy(buffer, to=at) for buffer in buffers)
        if len(sources) == 1:
            return sources[0]
        replicas = functools.reduce(operator.or_, (source.replicas for source in sources))
        target = self._buffer(at, sources[0].start, sources[0].stop, replicas)
        self._steps.append(steps.Add(sources, target))
        return target

    def split(self, buffer: Buffer, num_parts: int) -> tuple[Buffer, ...]:
        """Splits a buffer into consecutive parts of nearly equal length, longer ones first, maybe empty."""
        size, longer = divmod(buffer.length, num_parts)
        parts: list[Buffer] = []
        start = buffer.start
        for part in range(num_parts):
            stop = start + size + (part < longer)
            parts.append(self._buffer(buffer.device, start, stop, buffer.replicas, buffer.is_finished))
            start = stop
        self._steps.append(steps.Split(buffer, tuple(parts)))
        return tuple(parts)

    def join(self, buffers: Sequence[Buffer], at: Device) -> Buffer:
        """Joins consecutive parts of one result on device `at`."""
        sources = tuple(self.copy(buffer, to=at) for buffer in buffers)
        if len(sources) == 1:
            return sources[0]
        first, last = sources[0], sources[-1]
        target = self._buffer(at, first.start, last.stop, first.replicas, first.is_finished)
        self._steps.append(steps.Join(sources, target))
        return target

    def add_by_shards(self) -> list[Buffer]:
        """Sums all inputs in shards: replica c's device sums shard c of all, in replica order.

        Of more than `MAX_OWNERS` replicas a few, spread evenly, sum a shard each.
        """
        num_replicas = len(self.inputs)
        num_shards = num_replicas if num_replicas <= MAX_OWNERS else OWNERS_OF_MANY
        owners = [self.inputs[number * num_replicas // num_shards] for number in range(num_shards)]
        shards = [self.split(buffer, num_shards) for buffer in self.inputs]
        return [
            self.add(contributions, at=owner.device)
            for contributions, owner in zip(zip(*shards, strict=True), owners, strict=True)
        ]

    def deliver(self, results: Sequence[Buffer], destinations: Sequence[Device]) -> list[Buffer]:
        """Returns a result for each destination: an existing one, used once, or a copy of the first."""
        there: dict[Device, list[Buffer]] = {}
        for buffer in reversed(results):
            there.setdefault(buffer.device, []).append(buffer)
        return [there[at].pop() if there.get(at) else self.copy(results[0], to=at) for at in destinations]

    def engine_all_reduce(self, buffers: Sequence[Buffer]) -> tuple[Buffer, ...]:
        """Adds one collective of a library over these buffers: a result on each of their devices."""
        everyone = self._all_replicas
        targets = tuple(self._buffer(own.device, own.start, own.stop, everyone, True) for own in buffers)
        self._steps.append(steps.EngineAllReduce(tuple(buffers), targets))
        return targets

    def plan(self, outputs: Sequence[Buffer]) -> Plan:
        """Finishes the plan; copies a buffer that is given twice, so that every output has its own memory."""
        if outputs is None:
            raise PlanError("it is None; expected a buffer for each destination")
        results: dict[int, Buffer] = {}
        for position, buffer in enumerate(outputs):
            if not isinstance(buffer, Buffer):
                raise PlanError(f"output {position} is {kind_text(buffer)}; expected a buffer")
            result = self._finish_if_complete(buffer)
            if not result.is_finished:
                lost = [
                    f"replica {replica} ({source.device})"
                    for replica, source in enumerate(self.inputs)
                    if not result.replicas >> replica & 1
                ]
                raise PlanError(f"{', '.join(lost)} missing from output {position}")
            if result.number in results:
                result = self._copied(result, result.device)
            results[result.number] = result
        return Plan(self.inputs, _needed_steps(self._steps, results), tuple(results.values()))

    def _copied(self, buffer: Buffer, to: Device) -> Buffer:
        target = self._buffer(to, buffer.start, buffer.stop, buffer.replicas, buffer.is_finished)
        self._copies[buffer.number, to] = target
        self._steps.append(steps.Copy(buffer, target))
        return target

    def _finish_if_complete(self, buffer: Buffer) -> Buffer:
        if buffer.is_finished or buffer.replicas != self._all_replicas:
            return buffer
        if buffer.number not in self._finished:
            target = self._buffer(buffer.device, buffer.start, buffer.stop, buffer.replicas, True)
            self._steps.append(steps.Finish(buffer, target))
            self._finished[buffer.number] = target
        return self._finished[buffer.number]

    def _buffer(
        self, device: Device, start: int, stop: int, replicas: int, is_finished: bool = False
    ) -> Buffer:
        if not isinstance(device, Device):
            raise PlanError(f"{device!r} is {kind_text(device)}; expected a Device")
        buffer = Buffer(self._num_buffers, device, start, stop, replicas, is_finished)
        self._num_buffers += 1
        return buffer


def _needed_steps(emitted: Sequence[Step], outputs: Iterable[int]) -> tuple[Step, ...]:
    """Returns the steps that some output depends on, in order."""
    needed = set(outputs)
    kept: list[Step] = []
    for step in reversed(emitted):
        if any(buffer.number in needed for buffer in targets_of(step)):
            needed.update(buffer.number for buffer in sources_of(step))
            kept.append(step)
    return tuple(reversed(kept))
