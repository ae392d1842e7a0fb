"""Around the ring twice: once to sum shards, once to share them."""

from __future__ import annotations

from collections.abc import Sequence

from crossdevice.algorithms.base import PackedOps
from crossdevice.costs.timing import Round
from crossdevice.costs.topology import Topology
from crossdevice.plans.builder import PlanBuilder
from crossdevice.plans.steps import Buffer
from crossdevice.values.device import Device


class RingAllReduce(PackedOps):
    """Passes shards around a ring until each is summed, then passes the sums around again::

        0 ─► 1 ─► 2 ─► 3 ─► 0     N - 1 hops: each shard is summed
        0 ─► 1 ─► 2 ─► 3 ─► 0     N - 1 hops: each sum is shared

    It takes 2 (N - 1) rounds; each device sends and receives 2 (N - 1) / N of an array, the least
    possible, over one link in and one out. Use it for large values; on small ones its rounds cost latency.
    It passes on partial sums, which costs extra traffic under `"accurate"` and `"exact"`: prefer
    `DirectAllReduce` there.

    Args:
        num_packs: the number of packs into which a batch is split; 0 reduces value by value.

    Raises:
        OptionError: `num_packs` is no whole number of 0 or more.

    >>> import numpy as np
    >>> from crossdevice import PerReplica
    >>> value = PerReplica([np.float32([1, 2]), np.float32([3, 4])])
    >>> RingAllReduce().reduce("sum", value, destinations=value).values[1]
    array([4., 6.], dtype=float32)
    """

    def plan_sum(self, build: PlanBuilder, destinations: Sequence[Device]) -> Sequence[Buffer]:
        """Plans the ring: shard c starts after replica c and is complete when it returns to it."""
        devices = [buffer.device for buffer in build.inputs]
        num_replicas = len(devices)
        shards = [build.split(buffer, num_replicas) for buffer in build.inputs]
        sums = [shards[(c + 1) % num_replicas][c] for c in range(num_replicas)]
        for hop in range(2, num_replicas + 1):
            for c in range(num_replicas):
                replica = (c + hop) % num_replicas
                sums[c] = build.add([sums[c], shards[replica][c]], at=devices[replica])
        if set(destinations) != set(devices):
            return [build.join(sums, at=device) for device in destinations]
        parts = [[sums[c]] * num_replicas for c in range(num_replicas)]
        for hop in range(1, num_replicas):
            for c in range(num_replicas):
                replica = (c + hop) % num_replicas
                parts[c][replica] = build.copy(parts[c][replica - 1], to=devices[replica])
        joined = [
            build.join([shard[replica] for shard in parts], at=device)
            for replica, device in enumerate(devices)
        ]
        return build.deliver(joined, destinations)

    def plan_rounds(self, topology: Topology, num_bytes: float) -> Sequence[Round]:
        """Repeats one round: each device sends to the next in the ring."""
        count = topology.num_devices
        transfers = [(replica, (replica + 1) % count) for replica in topology.typical_devices]
        shard, hops = num_bytes / count, count - 1
        # Hop k carries k contributions: count / 2 on average.
        summing = Round(
            transfers, shard, num_added=2, repeats=hops, num_contributions=count / 2, is_ring=True
        )
        return [summing, Round(transfers, shard, repeats=hops, is_ring=True)]
