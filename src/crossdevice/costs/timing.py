"""Where predicted time goes, and what additions and messages cost on a topology."""

from __future__ import annotations

import operator
from typing import NamedTuple

from crossdevice.costs.topology import Route, Topology


class Parts(NamedTuple):
    """Seconds along the chain of steps that decides how long a reduction takes."""

    latency_seconds: float = 0.0
    bandwidth_seconds: float = 0.0
    reduction_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """All of them."""
        return sum(self)

    def plus(self, other: Parts) -> Parts:
        """This chain, and then that one."""
        return Parts(*map(operator.add, self, other))

    def times(self, repeats: float) -> Parts:
        """The same chain so many times."""
        return Parts(*(seconds * repeats for seconds in self))


def addition_parts(num_arrays: int, num_bytes: float, topology: Topology) -> Parts:
    """Adding arrays of so many bytes on one device: each is read once, the sum is written once."""
    return fused_pass_parts(num_arrays, 1, num_bytes, topology)


def fused_pass_parts(num_inputs: int, num_outputs: int, num_bytes: float, topology: Topology) -> Parts:
    """A whole reduction in one memory: each replica is read once, each result written once."""
    moved = (num_inputs + num_outputs) * num_bytes
    return Parts(topology.step_seconds, 0.0, moved / topology.memory_bytes_per_second)


def served_bytes(num_bytes: float, route: Route) -> float:
    """A message's bytes, and those that could have passed while it kept its links busy for itself."""
    return num_bytes + route.cost.message_seconds * route.bytes_per_second


def transfer_parts(busy_seconds: float, num_bytes: float, route: Route) -> Parts:
    """One message that keeps its links for `busy_seconds`, of which its bytes take their share."""
    served = served_bytes(num_bytes, route)
    bandwidth = busy_seconds * num_bytes / served if served else 0.0
    return Parts(route.cost.latency_seconds + busy_seconds - bandwidth, bandwidth)
