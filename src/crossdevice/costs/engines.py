"""How long a library such as NCCL takes for a whole all-reduce: chunks that follow each other through a pipe.

A message of S bytes cut into c chunks passes p hops of latency a in (p + c) (a + S / (c B)). With the best c
that is (sqrt(p a) + sqrt(S / B))^2: the latency, the bytes, and twice the square root of their product, which
is why bandwidth rises so slowly with size. B, p and a come from NCCL's own tuner (`tuning.cc`, `topo.h`);
the time of a call is the one number measured on each machine.
"""

from __future__ import annotations

import math

from crossdevice.costs.timing import Parts
from crossdevice.costs.topology import Topology
from crossdevice.errors import TopologyError

HOPS_IN_SWITCH = 4
"""To the switch and back, once to add and once to share."""


def engine_parts(topology: Topology, num_bytes: float) -> Parts:
    """One all-reduce by the engine: the faster of rings and, where there is one, a switch that adds."""
    engine = topology.engine
    if engine is None:
        raise TopologyError(f"topology {topology.name!r} describes no engine; expected an [engine] table")
    count = topology.num_devices
    call = Parts(engine.call_seconds)
    if count == 1:
        return call
    ways = [_piped(_ring_latency(topology), num_bytes / _ring_bandwidth(topology))]
    if engine.in_switch_efficiency > 0 and topology.num_nodes == 1:
        # A device's own share needs no link.
        bandwidth = topology.ring_bytes_per_second() * engine.in_switch_efficiency * (count - 1) / count
        ways.append(_piped(HOPS_IN_SWITCH * engine.hop_seconds, num_bytes / bandwidth))
    return call.plus(min(ways, key=lambda parts: parts.seconds))


def _piped(latency_seconds: float, bytes_seconds: float) -> Parts:
    return Parts(latency_seconds + 2 * math.sqrt(latency_seconds * bytes_seconds), bytes_seconds)


def _ring_latency(topology: Topology) -> float:
    """Around the devices of a node twice, and up and down a tree of nodes."""
    assert topology.engine is not None
    members = min(topology.num_devices, topology.devices_per_node)
    latency = 2 * (members - 1) * topology.engine.hop_seconds
    if topology.network is not None and topology.num_nodes > 1:
        latency += 2 * math.ceil(math.log2(topology.num_nodes)) * topology.network.cost.latency_seconds
    return latency


def _ring_bandwidth(topology: Topology) -> float:
    """Bytes of the array per second over rings that use every link, and every port between nodes."""
    each = topology.ring_bytes_per_second()
    if topology.network is not None and topology.num_nodes > 1:
        ports = topology.network.ports_per_node / topology.network.oversubscription
        each = min(each, ports * topology.network.bytes_per_second)
    return each * topology.num_devices / (2 * (topology.num_devices - 1))
