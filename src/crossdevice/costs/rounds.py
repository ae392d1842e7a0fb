"""Timing without a plan, from what every device sends in each round: thousands of devices in a second.

A ring of N devices has 2 N (N - 1) transfers but only one round, repeated. Rounds are timed by the bytes that
meet on each link; a round ends when its slowest transfer does. A test compares this with the event queue.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from typing import NamedTuple

from crossdevice.costs.timing import Duration, addition_duration, served_bytes, transfer_duration
from crossdevice.costs.topology import Cost, Route, Topology


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
