"""Times a plan on a topology: an event queue over its steps, with links that transfers share fairly."""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, assert_never

from crossdevice.costs.timing import (
    Duration,
    addition_duration,
    engine_duration,
    fused_pass_duration,
    served_bytes,
    transfer_duration,
)
from crossdevice.costs.topology import Link, Route, Topology
from crossdevice.errors import TopologyError
from crossdevice.plans import steps
from crossdevice.plans.plan import Plan
from crossdevice.plans.steps import Add, Buffer, Finish, Split, sources_of, targets_of
from crossdevice.values.device import Device
from crossdevice.values.quantities import counted


def peak_bytes(plan: Plan, item_bytes: int, *, unsummed: bool = False) -> dict[Device, int]:
    """Returns the maximum of bytes that inputs and buffers occupy on each device at one time.

    Inputs stay. Parts are views, and results are rounded in place of their sum. With `unsummed` a partial sum
    is the list of its contributions: adding to it allocates nothing, finishing it allocates one array.
    """
    inputs = {buffer.number for buffer in plan.inputs}
    held: collections.Counter[Device] = collections.Counter()
    for buffer in plan.inputs:
        held[buffer.device] += buffer.length * item_bytes
    peak = collections.Counter(held)
    owned = dict.fromkeys(inputs, 0)  # what is given back when a buffer is no longer needed
    for step, last_uses in zip(plan.steps, plan.last_uses, strict=True):
        targets = targets_of(step)
        takes_over = isinstance(step, (Split, Add) if unsummed else (Split, Finish))
        taken = sum(owned.pop(b.number, 0) for b in sources_of(step) if takes_over and b.number in last_uses)
        for buffer in targets:
            if takes_over:
                made = _share(buffer, targets, taken)
            else:
                arrays = buffer.num_replicas if unsummed and not buffer.is_finished else 1
                made = arrays * buffer.length * item_bytes
                held[buffer.device] += made
            owned[buffer.number] = made
            peak[buffer.device] = max(peak[buffer.device], held[buffer.device])
        devices = {b.number: b.device for b in (*sources_of(step), *targets)}
        for number in last_uses:
            held[devices[number]] -= owned.pop(number, 0)
    return dict(peak)


def _share(buffer: Buffer, targets: tuple[Buffer, ...], taken: int) -> int:
    """Returns a part's share of the memory that is freed with its whole."""
    whole = sum(target.length for target in targets)
    return taken * buffer.length // whole if whole else 0


SAME_SECONDS = 1e-12
"""Events closer than this happen together: rounding must not turn one event of many flows into many."""


class Span(NamedTuple):
    """Start and end of one step of the plan."""

    step: int
    start_seconds: float
    stop_seconds: float


class Simulation(NamedTuple):
    """The simulated run of a plan on a topology."""

    duration: Duration
    link_bytes: Mapping[str, int]
    peak_bytes: Mapping[Device, int]
    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """Seconds from the first step to the last result."""
        return self.duration.seconds


def simulate(plan: Plan, topology: Topology, item_bytes: int = 4, *, unsummed: bool = False) -> Simulation:
    """Runs the plan's steps in time: replica k is device k of the topology, other devices come after.

    With `unsummed`, partial sums travel as the contributions they are made of, as under `"accurate"`.
    """
    places = places_of(plan)
    if len(places) > topology.num_devices and not topology.shares_memory:
        found = f"the plan has {counted(len(places), 'device')}"
        raise TopologyError(f"{found}; topology {topology.name!r} has {topology.num_devices}")
    run = _Run(plan, topology, item_bytes, places, unsummed=unsummed)
    run.run()
    duration = run.duration
    if topology.shares_memory:
        num_bytes = plan.num_elements * item_bytes
        duration = fused_pass_duration(len(plan.inputs), len(plan.outputs), num_bytes, topology)
    peaks = peak_bytes(plan, item_bytes, unsummed=unsummed)
    return Simulation(duration, dict(run.link_bytes), peaks, tuple(sorted(run.spans.values())))


def places_of(plan: Plan) -> dict[Device, int]:
    """Numbers the devices: replicas first, in order."""
    return {device: number for number, device in enumerate(plan.devices)}


@dataclasses.dataclass
class _Flow:
    """A transfer in progress: its remaining bytes, its rate, and since when."""

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
        self._before: dict[int, Duration] = {}
        self._after: dict[int, Duration] = {}
        self._free: dict[Device, tuple[float, Duration]] = {}
        self._flows: dict[int, _Flow] = {}
        self._on_link: dict[Link, set[int]] = collections.defaultdict(set)
        self._events: list[tuple[float, int, Any]] = []
        """The time, the order among equal times, and a function of the time that returns changed links."""
        self._order = itertools.count()
        self._outputs = {buffer.number for buffer in plan.outputs}
        self.duration = Duration()
        self.spans: dict[int, Span] = {}
        self.link_bytes: collections.Counter[str] = collections.Counter()

    def run(self) -> None:
        """Handles events until none are left."""
        for buffer in self._plan.inputs:
            self._available(buffer, 0.0, Duration())
        while self._events:
            now = self._events[0][0]
            touched: set[Link] = set()
            while self._events and self._events[0][0] <= now + SAME_SECONDS:
                *_, happens = heapq.heappop(self._events)
                touched |= happens(now)
            self._share(touched, now)

    def _push(self, seconds: float, happens: Callable[..., set[Link]], *step: int) -> None:
        heapq.heappush(self._events, (seconds, next(self._order), functools.partial(happens, *step)))

    def _available(self, buffer: Buffer, now: float, chain: Duration) -> None:
        if buffer.number in self._outputs and chain.seconds >= self.duration.seconds:
            self.duration = chain
        for step in self._consumers[buffer.number]:
            self._missing[step] -= 1
            if self._missing[step] == 0:
                self._begin(step, now, chain)

    def _begin(self, number: int, now: float, chain: Duration) -> None:
        step = self._plan.steps[number]
        self._before[number] = chain
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
                cost = addition_duration(num_arrays, num_bytes, self._topology) if num_bytes else Duration()
                self._compute(number, step.target.device, now, cost)
            case steps.Finish() | steps.Split() | steps.Join():
                # Rounding is part of the last addition, parts are views, and shards arrive in their place.
                self.spans[number] = Span(number, now, now)
                for target in targets_of(step):
                    self._available(target, now, chain)
            case steps.EngineAllReduce():
                num_bytes = step.sources[0].length * self._item_bytes
                self._take(number, now, chain, engine_duration(self._topology, num_bytes))
            case _:
                assert_never(step)

    def _compute(self, number: int, device: Device, now: float, cost: Duration) -> None:
        """Adds on a device, one addition at a time; waiting for earlier ones is part of the chain."""
        free, busy_with = self._free.get(device, (0.0, Duration()))
        before = busy_with if free > now else self._before[number]
        done = self._take(number, max(free, now), before, cost)
        self._free[device] = (done, self._after[number])

    def _take(self, number: int, start: float, before: Duration, cost: Duration) -> float:
        """Adds a step with a fixed time from `start` on; returns its end."""
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
        cost = transfer_duration(now - flow.entered_seconds, num_bytes, flow.route)
        self._after[number] = self._before[number].plus(cost)
        self.spans[number] = self.spans[number]._replace(stop_seconds=now)
        self._done(number, now)
        return set(flow.route.links)

    def _share(self, touched: set[Link], now: float) -> None:
        """Sets new rates for the flows on these links: an equal share of their slowest link."""
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
