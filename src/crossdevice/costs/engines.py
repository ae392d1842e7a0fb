"""The time a library such as NCCL needs for an all-reduce, modelled as chunks in a pipeline.

A message of S bytes cut into c chunks passes p hops of latency a in (p + c) (a + S / (c B)). With the best c
that is (sqrt(p a) + sqrt(S / B))^2: the latency, the bytes, and twice the square root of their product, which
is why bandwidth rises so slowly with size. B, p and a come from NCCL's own tuner (`tuning.cc`, `topo.h`);
the time of a call is the one number measured on each machine.
"""

from __future__ import annotations

import math

from crossdevice.costs.timing import Duration
from crossdevice.costs.topology import Topology
from crossdevice.errors import TopologyError

HOPS_IN_SWITCH = 4
"""To the switch and back, once to add and once to share."""


def engine_duration(topology: Topology, num_bytes: float) -> Duration:
    """One all-reduce by the engine: the faster of rings and, where there is one, a switch that adds."""
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
