"""Each device reduces one shard, then shares it."""

from __future__ import annotations

from collections.abc import Sequence

from crossdevice.algorithms.base import PackedOps
from crossdevice.costs.timing import Round
from crossdevice.costs.topology import Topology
from crossdevice.plans.builder import PlanBuilder
from crossdevice.plans.steps import Buffer
from crossdevice.values.device import Device


class DirectAllReduce(PackedOps):
    """Each device sums one shard of all replicas, then sends it to all destinations::

        shard 0 of each replica ─► 0 ─► every destination
        shard 1 of each replica ─► 1 ─► every destination
        ...

    It takes 2 rounds, and each device moves 2 (N - 1) / N of an array, as in a ring. No partial sums
    travel, so all three precisions cost the same. Use it where every device has a direct
    path to every other (NVSwitch, shared memory); on a ring of links it causes congestion.
    `crossdevice.all_reduce` uses it.

    Args:
        num_packs: the number of packs into which a batch is split; 0 reduces value by value.

    Raises:
        OptionError: `num_packs` is no whole number of 0 or more.

    >>> import numpy as np
    >>> from crossdevice import PerReplica
    >>> value = PerReplica([np.float32([1, 2]), np.float32([3, 4])])
    >>> DirectAllReduce().reduce("sum", value, destinations=value).values[1]
    array([4., 6.], dtype=float32)
    """

    def plan_sum(self, build: PlanBuilder, destinations: Sequence[Device]) -> Sequence[Buffer]:
        """Plans sums of shards: replica c sums shard c, in replica order."""
        sums = build.add_by_shards()
        return [build.join(sums, at=device) for device in destinations]

    def plan_rounds(self, topology: Topology, num_bytes: float) -> Sequence[Round]:
        """Sends from every device to every other one, twice."""
        count = topology.num_devices
        transfers = [
            (source, target)
            for source in topology.typical_devices
            for target in range(count)
            if source != target
        ]
        shard = num_bytes / count
        return [Round(transfers, shard, num_added=count), Round(transfers, shard)]
