"""The parts of predicted time: additions and messages on a topology."""

from __future__ import annotations

import operator
from typing import NamedTuple

from crossdevice.costs.topology import Route, Topology


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
        """This time, and then that one."""
        return Duration(*map(operator.add, self, other))

    def times(self, repeats: float) -> Duration:
        """This time, repeated."""
        return Duration(*(seconds * repeats for seconds in self))


def addition_duration(num_arrays: int, num_bytes: float, topology: Topology) -> Duration:
    """Adding arrays of so many bytes on one device: each is read once, the sum is written once."""
    return fused_pass_duration(num_arrays, 1, num_bytes, topology)


def fused_pass_duration(num_inputs: int, num_outputs: int, num_bytes: float, topology: Topology) -> Duration:
    """A whole reduction in one memory: each replica is read once, each result written once."""
    moved = (num_inputs + num_outputs) * num_bytes
    return Duration(topology.step_seconds, 0.0, moved / topology.memory_bytes_per_second)


def served_bytes(num_bytes: float, route: Route) -> float:
    """The bytes of a message, and as many as its links could carry during its `message_seconds`."""
    return num_bytes + route.cost.message_seconds * route.bytes_per_second


def transfer_duration(busy_seconds: float, num_bytes: float, route: Route) -> Duration:
    """One message that keeps its links busy for `busy_seconds`; its bytes account for their share of that."""
    served = served_bytes(num_bytes, route)
    bandwidth = busy_seconds * num_bytes / served if served else 0.0
    return Duration(route.cost.latency_seconds + busy_seconds - bandwidth, bandwidth)
