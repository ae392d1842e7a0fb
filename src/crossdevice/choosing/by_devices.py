"""The answer of `choose_algorithm`, and the choice by devices alone, without a model of the machine."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.algorithms.registry import ALGORITHMS
from crossdevice.values.device import Device


class Choice(NamedTuple):
    """An algorithm, why it was chosen and, if by cost, the seconds that each would take, fastest first."""

    name: str
    cross_device_ops: CrossDeviceOps
    reason: str
    seconds: Mapping[str, float] = types.MappingProxyType({})


def chosen(name: str, reason: str, seconds: Mapping[str, float] = types.MappingProxyType({})) -> Choice:
    """Returns the algorithm of that name with its default settings, as a choice."""
    return Choice(name, ALGORITHMS.load(name)(), reason, seconds)


def choice_by_devices(devices: Sequence[Device]) -> Choice:
    """Chooses for one replica on each of these devices; NCCL's algorithm where it is available.

    >>> choice_by_devices([Device("cuda:0"), Device("cuda:1")]).name
    'nccl'
    """
    kinds = {device.type for device in devices}
    distinct = set(devices)
    if len(devices) == 1:
        return chosen("one_device", "one replica, so values are only copied")
    if kinds == {"cpu"}:
        reason = "all devices share the host's memory, where every algorithm becomes one fused pass"
        return chosen("direct", reason)
    if len(distinct) == 1:
        return chosen("one_device", f"all replicas are on {devices[0]}, so nothing has to leave it")
    if kinds != {"cuda"}:
        names = ", ".join(sorted(kinds))
        return chosen("one_device", f"devices of these types share no collective engine: {names}")
    if len(distinct) < len(devices):
        reason = "several replicas are on one GPU, which NCCL refuses; each replica sums its own shard"
        return chosen("direct", reason)
    if sys.platform != "linux":
        reason = f"NCCL exists on Linux only, not on {sys.platform}; each GPU sums its own shard"
        return chosen("direct", reason)
    return chosen("nccl", "one replica on each GPU, which NCCL reduces over their links")
