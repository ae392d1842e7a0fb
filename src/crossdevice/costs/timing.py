"""Predicted time of additions, messages, calls of an engine, and rounds of transfers, on a topology.

Rounds say what every device sends at one time, without a plan: a ring of N devices has 2 N (N - 1) transfers
but only one round, repeated, so that thousands of devices are timed in a second. A round ends when its
slowest transfer does. A test compares this with the event queue of `simulation.py`.
"""

from __future__ import annotations

import collections
import functools
import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

from crossdevice.costs.topology import Cost, Route, Topology
from crossdevice.errors import TopologyError


class Duration(NamedTuple):
    """A predicted time in three parts, along the chain of steps that decides how long a reduction takes."""

    latency_seconds: float = 0.0
    bandwidth_seconds: float = 0.0
    reduction_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """The whole time."""
        return sum(self)

    def plus(self, other: Duration) -> Duration:
        """Adds a time that follows this one."""
        return Duration(*map(operator.add, self, other))

    def times(self, repeats: float) -> Duration:
        """Multiplies this time by a number of repeats."""
        return Duration(*(seconds * repeats for seconds in self))


def addition_duration(num_arrays: int, num_bytes: float, topology: Topology) -> Duration:
    """Returns the time to add arrays of `num_bytes`: each is read once, the sum is written once."""
    return fused_pass_duration(num_arrays, 1, num_bytes, topology)


def fused_pass_duration(num_inputs: int, num_outputs: int, num_bytes: float, topology: Topology) -> Duration:
    """Returns the time of a reduction in one memory: each replica is read once, each result written once."""
    moved = (num_inputs + num_outputs) * num_bytes
    return Duration(topology.step_seconds, 0.0, moved / topology.memory_bytes_per_second)


def served_bytes(num_bytes: float, route: Route) -> float:
    """Returns the bytes of a message, plus what its links could carry during its `message_seconds`."""
    return num_bytes + route.cost.message_seconds * route.bytes_per_second


def transfer_duration(busy_seconds: float, num_bytes: float, route: Route) -> Duration:
    """Returns the time of a message that keeps its links busy for `busy_seconds`, split by cause."""
    served = served_bytes(num_bytes, route)
    bandwidth = busy_seconds * num_bytes / served if served else 0.0
    return Duration(route.cost.latency_seconds + busy_seconds - bandwidth, bandwidth)


HOPS_IN_SWITCH = 4
"""Hops to the switch and back, once to add and once to share."""


def engine_duration(topology: Topology, num_bytes: float) -> Duration:
    """Returns the engine's time of an all-reduce: the faster of rings and, if any, a switch that adds."""
    engine = topology.engine
    if engine is None:
        raise TopologyError(f"topology {topology.name!r} describes no engine; expected an [engine] table")
    count = topology.num_devices
    call = Duration(engine.call_seconds)
    if count == 1:
        return call
    # Around the devices of a node twice, over rings that use every link.
    latency = 2 * (min(count, topology.devices_per_node) - 1) * engine.hop_seconds
    each = topology.ring_bytes_per_second()
    network = topology.network
    if network is not None and topology.num_nodes > 1:
        # Up and down a tree of nodes, through every port.
        latency += 2 * math.ceil(math.log2(topology.num_nodes)) * network.cost.latency_seconds
        each = min(each, network.ports_per_node / network.oversubscription * network.bytes_per_second)
    ways = [_piped(latency, num_bytes * 2 * (count - 1) / (each * count))]
    if engine.in_switch_efficiency > 0 and topology.num_nodes == 1:
        # A device's own share needs no link.
        bandwidth = topology.ring_bytes_per_second() * engine.in_switch_efficiency * (count - 1) / count
        ways.append(_piped(HOPS_IN_SWITCH * engine.hop_seconds, num_bytes / bandwidth))
    return call.plus(min(ways, key=lambda duration: duration.seconds))


def _piped(latency_seconds: float, bytes_seconds: float) -> Duration:
    return Duration(latency_seconds + 2 * math.sqrt(latency_seconds * bytes_seconds), bytes_seconds)


class Round(NamedTuple):
    """Transfers (from, to) of `num_bytes` each at one time, after which receivers add `num_added` arrays.

    `num_contributions` is how many arrays each of them is if partial sums travel unsummed.
    Rounds that form a ring do not wait for each other everywhere: what one device sends next is
    what it just got. They take as long as one shard takes to travel, or as the busiest link is busy.
    """

    transfers: Sequence[tuple[int, int]]
    num_bytes: float
    num_added: int = 0
    repeats: int = 1
    num_contributions: float = 1
    is_ring: bool = False


def rounds_duration(rounds: Sequence[Round], topology: Topology, *, unsummed: bool = False) -> Duration:
    """Returns the total time of the rounds, by cause; `unsummed` as in `Plan.traffic`."""
    total = Duration()
    routes: list[Route] = []
    routed: Sequence[tuple[int, int]] = ()
    for current in rounds:
        num_bytes = current.num_bytes * (current.num_contributions if unsummed else 1)
        if current.transfers and num_bytes and current.repeats:
            if current.transfers is not routed:  # rounds that share their list share their routes
                routed = current.transfers
                routes = [topology.route(source, target) for source, target in routed]
            total = total.plus(_round_duration(current._replace(num_bytes=num_bytes), routes, topology))
    return total


def _round_duration(current: Round, routes: Sequence[Route], topology: Topology) -> Duration:
    num_bytes, repeats = current.num_bytes, current.repeats
    loads: dict[str, float] = collections.defaultdict(float)
    for route in routes:
        served = served_bytes(num_bytes, route)
        for link in route.links:
            loads[link.name] += served
    # Of the thousands of routes most are alike: each kind is timed once.
    kinds: dict[tuple[float, float, Cost], Route] = {}
    counts: collections.Counter[tuple[float, float, Cost]] = collections.Counter()
    for route in routes:
        shared = max([loads[link.name] / link.bytes_per_second for link in route.links])
        kind = (shared, route.bytes_per_second, route.cost)
        kinds[kind] = route
        counts[kind] += 1
    adding = addition_duration(current.num_added, num_bytes, topology) if current.num_added else Duration()
    hops = {}
    for kind, route in kinds.items():
        alone = served_bytes(num_bytes, route) / route.bytes_per_second
        hops[kind] = transfer_duration(max(alone, kind[0]), num_bytes, route).plus(adding)
    if not current.is_ring:
        return max(hops.values(), key=lambda duration: duration.seconds).times(repeats)
    all_shards = functools.reduce(Duration.plus, (hop.times(counts[kind]) for kind, hop in hops.items()))
    one_shard = all_shards.times(repeats / len(routes))
    # Shards that queue for a link follow each other at the link's speed, not at that of its slowest route.
    busiest = max(kinds)
    queue = transfer_duration(repeats * busiest[0], num_bytes, kinds[busiest])
    return max(one_shard, queue, key=lambda duration: duration.seconds)
