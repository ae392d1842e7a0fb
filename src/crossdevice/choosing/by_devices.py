"""Which algorithm suits which devices, and why."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.algorithms.direct_all_reduce import DirectAllReduce
from crossdevice.algorithms.nccl_all_reduce import NcclAllReduce
from crossdevice.algorithms.reduction_to_one_device import ReductionToOneDevice
from crossdevice.values.device import Device


class Choice(NamedTuple):
    """An algorithm and the reason it was chosen."""

    cross_device_ops: CrossDeviceOps
    reason: str


def choose_algorithm(devices: Sequence[Device]) -> Choice:
    """The best algorithm for one replica on each of these devices.

    >>> type(choose_algorithm([Device("cuda", 0), Device("cuda", 1)]).cross_device_ops).__name__
    'NcclAllReduce'
    """
    kinds = {device.type for device in devices}
    distinct = set(devices)
    if len(devices) == 1:
        return Choice(ReductionToOneDevice(), "one replica, so values are only copied")
    if kinds == {"cpu"}:
        return Choice(
            DirectAllReduce(),
            "all devices share the host's memory, where every algorithm becomes one fused pass",
        )
    if len(distinct) == 1:
        return Choice(ReductionToOneDevice(), f"all replicas are on {devices[0]}, so nothing has to leave it")
    if kinds != {"cuda"}:
        return Choice(
            ReductionToOneDevice(),
            f"devices of these types share no collective engine: {', '.join(sorted(kinds))}",
        )
    if len(distinct) < len(devices):
        return Choice(
            DirectAllReduce(),
            "several replicas are on one GPU, which NCCL refuses; each replica sums its own shard",
        )
    if sys.platform != "linux":
        return Choice(
            DirectAllReduce(),
            f"NCCL exists on Linux only, not on {sys.platform}; each GPU sums its own shard",
        )
    return Choice(NcclAllReduce(), "one replica on each GPU, which NCCL reduces over their links")
