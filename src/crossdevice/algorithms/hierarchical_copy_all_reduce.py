"""Two halves, two roots: the hierarchy of a DGX-1."""

from __future__ import annotations

from collections.abc import Sequence

from crossdevice.algorithms.base import PackedOps
from crossdevice.costs.timing import Round
from crossdevice.costs.topology import Topology
from crossdevice.plans.builder import PlanBuilder
from crossdevice.plans.steps import Buffer
from crossdevice.values.device import Device


class HierarchicalCopyAllReduce(PackedOps):
    """Sums each half of the replicas on its own root, adds the two sums, and copies back the same way::

        half A: 1,2,3 ─► 0 ─────► 0 = Σ ─► 1,2,3
                           ▲    │
        half B: 5,6,7 ─► 4 ┘    └─► 4 ───► 5,6,7

    It takes at most 4 rounds and moves 2 (N - 1) arrays; only one pair crosses between the halves.
    It was designed for the DGX-1: two groups of four GPUs, with few links between them. Pack k has its
    root on replica k mod N, so several packs (`num_packs=N`) spread the load over all devices. If the number
    of replicas is odd, the second half is larger.

    Args:
        num_packs: the number of packs into which a batch is split; 0 reduces value by value.

    Raises:
        OptionError: `num_packs` is no whole number of 0 or more.

    >>> import numpy as np
    >>> from crossdevice import PerReplica
    >>> value = PerReplica([np.float32([1, 2]), np.float32([3, 4])])
    >>> HierarchicalCopyAllReduce().reduce("sum", value, destinations=value).values[1]
    array([4., 6.], dtype=float32)
    """

    def plan_sum(self, build: PlanBuilder, destinations: Sequence[Device]) -> Sequence[Buffer]:
        """Adds in each half, then across; each destination copies from the root of its half."""
        num_replicas = len(build.inputs)
        num_first = num_replicas // 2
        root = build.pack_number % num_replicas
        if num_replicas == 1:
            return [build.copy(build.inputs[0], to=device) for device in destinations]
        in_first = root < num_first
        other_root = root + num_first if in_first else (root - num_first) % num_first
        halves = build.inputs[:num_first], build.inputs[num_first:]
        near, far = halves if in_first else halves[::-1]
        here, there = build.inputs[root].device, build.inputs[other_root].device
        total = build.add([build.add(near, at=here), build.add(far, at=there)], at=here)
        far_total = build.copy(total, to=there)
        far_devices = {buffer.device for buffer in far}
        return [
            build.copy(far_total if device in far_devices else total, to=device) for device in destinations
        ]

    def plan_rounds(self, topology: Topology, num_bytes: float) -> Sequence[Round]:
        """Sends to the roots, across, back across while the near half is served, and to the far half."""
        count = topology.num_devices
        if count == 1:
            return []
        far = count // 2
        members = [(near, 0) for near in range(1, far)] + [(other, far) for other in range(far + 1, count)]
        across = Round([(far, 0)], num_bytes, num_added=2, num_contributions=count - far)
        back = [(0, near) for near in range(1, far + 1)]
        return [
            Round(members, num_bytes, num_added=count - far),
            across,
            Round(back, num_bytes),
            Round([(far, other) for other in range(far + 1, count)], num_bytes),
        ]
