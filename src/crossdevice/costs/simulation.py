"""Times a plan on a topology: an event queue over its steps, with links that transfers share fairly."""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, assert_never

from crossdevice.costs.engines import engine_parts
from crossdevice.costs.memory import peak_bytes
from crossdevice.costs.timing import Parts, addition_parts, fused_pass_parts, served_bytes, transfer_parts
from crossdevice.costs.topology import Link, Route, Topology
from crossdevice.errors import TopologyError
from crossdevice.plans import steps
from crossdevice.plans.plan import Plan
from crossdevice.plans.steps import Buffer, sources_of, targets_of
from crossdevice.values.device import Device

SAME_SECONDS = 1e-12
"""Events closer than this happen together: rounding must not turn one event of many flows into many."""


class Span(NamedTuple):
    """When a step of the plan runs."""

    step: int
    start_seconds: float
    stop_seconds: float


class Simulation(NamedTuple):
    """What a plan costs on a topology."""

    parts: Parts
    link_bytes: Mapping[str, int]
    peak_bytes: Mapping[Device, int]
    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """From the first step to the last result."""
        return self.parts.seconds


def simulate(plan: Plan, topology: Topology, item_bytes: int = 4, *, unsummed: bool = False) -> Simulation:
    """Runs the plan's steps in time: replica k is device k of the topology, other devices come after.

    With `unsummed`, partial sums travel as the contributions they are made of, as under `"accurate"`.
    """
    places = places_of(plan)
    if len(places) > topology.num_devices and not topology.shares_memory:
        raise TopologyError(
            f"the plan has {len(places)} devices; topology {topology.name!r} has {topology.num_devices}"
        )
    run = _Run(plan, topology, item_bytes, places, unsummed=unsummed)
    run.run()
    parts = run.parts
    if topology.shares_memory:
        num_bytes = plan.num_elements * item_bytes
        parts = fused_pass_parts(len(plan.inputs), len(plan.outputs), num_bytes, topology)
    peaks = peak_bytes(plan, item_bytes, unsummed=unsummed)
    return Simulation(parts, dict(run.link_bytes), peaks, tuple(sorted(run.spans.values())))


def places_of(plan: Plan) -> dict[Device, int]:
    """A number for each device: replicas first, in order."""
    return {device: number for number, device in enumerate(plan.devices)}


@dataclasses.dataclass
class _Flow:
    """A transfer under way: what is left of it, and how fast it goes since when."""

    route: Route
    left_bytes: float
    entered_seconds: float
    since_seconds: float
    rate: float = 0.0
    version: int = 0


class _Run:
    """The state of one simulation."""

    def __init__(
        self, plan: Plan, topology: Topology, item_bytes: int, places: Mapping[Device, int], *, unsummed: bool
    ) -> None:
        self._unsummed = unsummed
        self._plan, self._topology, self._item_bytes, self._places = plan, topology, item_bytes, places
        self._consumers: dict[int, list[int]] = collections.defaultdict(list)
        self._missing: list[int] = []
        for number, step in enumerate(plan.steps):
            distinct = {buffer.number for buffer in sources_of(step)}
            self._missing.append(len(distinct))
            for source in distinct:
                self._consumers[source].append(number)
        self._before: dict[int, Parts] = {}
        self._after: dict[int, Parts] = {}
        self._free: dict[Device, tuple[float, Parts]] = {}
        self._flows: dict[int, _Flow] = {}
        self._on_link: dict[Link, set[int]] = collections.defaultdict(set)
        self._events: list[tuple[float, int, Any]] = []
        """When, in which order, and what: a function of the time that returns the links it touches."""
        self._order = itertools.count()
        self._outputs = {buffer.number for buffer in plan.outputs}
        self.parts = Parts()
        self.spans: dict[int, Span] = {}
        self.link_bytes: collections.Counter[str] = collections.Counter()

    def run(self) -> None:
        """Until nothing is left to happen."""
        for buffer in self._plan.inputs:
            self._available(buffer, 0.0, Parts())
        while self._events:
            now = self._events[0][0]
            touched: set[Link] = set()
            while self._events and self._events[0][0] <= now + SAME_SECONDS:
                *_, happens = heapq.heappop(self._events)
                touched |= happens(now)
            self._share(touched, now)

    def _push(self, seconds: float, happens: Callable[..., set[Link]], *step: int) -> None:
        heapq.heappush(self._events, (seconds, next(self._order), functools.partial(happens, *step)))

    def _available(self, buffer: Buffer, now: float, parts: Parts) -> None:
        if buffer.number in self._outputs and parts.seconds >= self.parts.seconds:
            self.parts = parts
        for step in self._consumers[buffer.number]:
            self._missing[step] -= 1
            if self._missing[step] == 0:
                self._begin(step, now, parts)

    def _begin(self, number: int, now: float, parts: Parts) -> None:
        step = self._plan.steps[number]
        self._before[number] = parts
        match step:
            case steps.Copy() if step.source.device != step.target.device and step.source.length:
                ends = (self._places[buffer.device] for buffer in (step.source, step.target))
                route = self._topology.route(*ends)
                num_bytes = self._bytes_of(step.source)
                for link in route.links:
                    self.link_bytes[link.name] += num_bytes
                entered = now + route.cost.latency_seconds
                self._flows[number] = _Flow(route, served_bytes(num_bytes, route), entered, entered)
                self.spans[number] = Span(number, now, now)
                self._push(entered, self._enter, number)
            case steps.Copy() | steps.Add():
                num_arrays = len(sources_of(step))
                num_bytes = step.target.length * self._item_bytes
                cost = addition_parts(num_arrays, num_bytes, self._topology) if num_bytes else Parts()
                self._compute(number, step.target.device, now, cost)
            case steps.Finish() | steps.Split() | steps.Join():
                # Rounding is part of the last addition, parts are views, and shards arrive in their place.
                self.spans[number] = Span(number, now, now)
                for target in targets_of(step):
                    self._available(target, now, parts)
            case steps.EngineAllReduce():
                num_bytes = step.sources[0].length * self._item_bytes
                self._take(number, now, parts, engine_parts(self._topology, num_bytes))
            case _:
                assert_never(step)

    def _compute(self, number: int, device: Device, now: float, cost: Parts) -> None:
        """A device does one addition at a time; what it waits for is part of the chain."""
        free, busy_with = self._free.get(device, (0.0, Parts()))
        before = busy_with if free > now else self._before[number]
        done = self._take(number, max(free, now), before, cost)
        self._free[device] = (done, self._after[number])

    def _take(self, number: int, start: float, before: Parts, cost: Parts) -> float:
        """A step that takes its time from here on, whatever others do; returns its end."""
        done = start + cost.seconds
        self._after[number] = before.plus(cost)
        self.spans[number] = Span(number, start, done)
        self._push(done, self._done, number)
        return done

    def _done(self, number: int, now: float) -> set[Link]:
        for target in targets_of(self._plan.steps[number]):
            self._available(target, now, self._after[number])
        return set()

    def _enter(self, number: int, now: float) -> set[Link]:
        flow = self._flows[number]
        flow.since_seconds = now
        for link in flow.route.links:
            self._on_link[link].add(number)
        return set(flow.route.links)

    def _leave(self, number: int, version: int, now: float) -> set[Link]:
        flow = self._flows.get(number)
        # A heap cannot forget: each new rate of a flow leaves its earlier end behind, under an older version.
        if flow is None or flow.version != version:
            return set()
        del self._flows[number]
        for link in flow.route.links:
            self._on_link[link].discard(number)
        num_bytes = self._bytes_of(sources_of(self._plan.steps[number])[0])
        cost = transfer_parts(now - flow.entered_seconds, num_bytes, flow.route)
        self._after[number] = self._before[number].plus(cost)
        self.spans[number] = self.spans[number]._replace(stop_seconds=now)
        self._done(number, now)
        return set(flow.route.links)

    def _share(self, touched: set[Link], now: float) -> None:
        """New rates for the flows on these links: an equal share of the link that has least to give."""
        for number in {flow for link in touched for flow in self._on_link[link]}:
            flow = self._flows[number]
            flow.left_bytes = max(0.0, flow.left_bytes - flow.rate * (now - flow.since_seconds))
            flow.since_seconds = now
            flow.rate = min(
                flow.route.bytes_per_second,
                *(link.bytes_per_second / len(self._on_link[link]) for link in flow.route.links),
            )
            flow.version += 1
            self._push(now + flow.left_bytes / flow.rate, self._leave, number, flow.version)

    def _bytes_of(self, sent: Buffer) -> int:
        arrays = sent.num_replicas if self._unsummed and not sent.is_finished else 1
        return arrays * sent.length * self._item_bytes
