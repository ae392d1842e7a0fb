"""All-reduce through NCCL."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from crossdevice.algorithms.base import PackedOps
from crossdevice.plans.builder import PlanBuilder
from crossdevice.plans.steps import Buffer
from crossdevice.values.device import Device


class NcclAllReduce(PackedOps):
    """Reduces by one NCCL collective over one replica per GPU.

    Use it for several GPUs. NCCL rounds at every hop in its own order, so it is used under `"fast"` only.
    Under `"accurate"` and `"exact"` each GPU sums one shard of all replicas in replica order and sends it
    to the others. The same happens if NCCL is not installed, or would compute a wrong result (a minimum
    with NaN). NCCL needs GPUs and one replica on each; otherwise values are summed on the first destination.
    The log and `explain` say why.

    Args:
        num_packs: the number of packs into which a batch is split; 0 reduces value by value.

    Raises:
        OptionError: `num_packs` is no whole number of 0 or more.

    >>> from crossdevice import PerReplica
    >>> value = PerReplica([1.0, 2.0])
    >>> float(NcclAllReduce().reduce("sum", value, "cpu:0"))  # not on GPUs: summed on the destination
    3.0
    """

    uses_engine = True

    def fallback_reason(self, devices: Sequence[Device]) -> str | None:
        """Returns the reason NCCL cannot reduce values on these devices; None if it can."""
        others = sorted({str(device) for device in devices if device.type != "cuda"})
        if others:
            return f"NCCL works on GPUs only, and values are on {', '.join(others)}"
        crowded = [str(device) for device, count in collections.Counter(devices).items() if count > 1]
        if crowded:
            return f"NCCL takes one replica per GPU, and several are on {', '.join(crowded)}"
        return None

    def plan_sum(self, build: PlanBuilder, destinations: Sequence[Device]) -> Sequence[Buffer]:
        """Plans one engine step; shards without an engine, or the first destination where NCCL cannot be."""
        if self.fallback_reason([buffer.device for buffer in build.inputs]) is None:
            if build.has_engine:
                return build.deliver(build.engine_all_reduce(build.inputs), destinations)
            sums = build.add_by_shards()
            return [build.join(sums, at=device) for device in destinations]
        total = build.add(build.inputs, at=destinations[0])
        return [build.copy(total, to=device) for device in destinations]
