"""Reduction on one device, then a copy to each destination."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.costs.timing import Round
from crossdevice.costs.topology import Topology
from crossdevice.plans.builder import PlanBuilder
from crossdevice.plans.steps import Buffer
from crossdevice.values.device import Device


class ReductionToOneDevice(CrossDeviceOps):
    """Sums all replicas on one device, then copies the result to each destination::

        1 ─┐          ┌─► 1
        2 ─┼─► 0 = Σ ─┼─► 2
        3 ─┘          └─► 3

    For N replicas and D destinations, N - 1 arrays go into that device and D - 1 come out, in 2 rounds.
    Use it for few devices, small values, a single destination, or an `accumulation_fn` of your own. It is
    slow for large values on many GPUs.

    Args:
        reduce_to_device: where to sum; by default the first destination.
        accumulation_fn: combines the tuple of all replicas' arrays, copied to that device; by default they
            are added. For a mean the result is then divided. Not used for `IndexedSlices`.

    Raises:
        DeviceError: a device name cannot be read, or there is no such device.
        TypeError: `accumulation_fn` cannot be called.

    >>> from crossdevice import PerReplica
    >>> float(ReductionToOneDevice().reduce("mean", PerReplica([1.0, 2.0, 6.0]), destinations="cpu:0"))
    3.0
    """

    def __init__(
        self,
        reduce_to_device: Device | str | None = None,
        accumulation_fn: Callable[[tuple[Any, ...]], Any] | None = None,
    ) -> None:
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise TypeError(f"accumulation_fn must be callable, got {accumulation_fn!r}")
        is_given = reduce_to_device is not None and not isinstance(reduce_to_device, str)
        self.reduce_to_device = Device.parse(reduce_to_device) if is_given or reduce_to_device else None
        self.accumulation_fn = accumulation_fn

    def plan_sum(self, build: PlanBuilder, destinations: Sequence[Device]) -> Sequence[Buffer]:
        """Adds at one device, copies out."""
        total = build.add(build.inputs, at=self.reduce_to_device or destinations[0])
        return [build.copy(total, to=device) for device in destinations]

    def plan_rounds(self, topology: Topology, num_bytes: float) -> Sequence[Round]:
        """Sends all arrays to device 0, then the result to all others."""
        others = range(1, topology.num_devices)
        return [
            Round([(other, 0) for other in others], num_bytes, num_added=topology.num_devices),
            Round([(0, other) for other in others], num_bytes),
        ]
