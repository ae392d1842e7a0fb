"""Positions of the replicas in a run, in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from crossdevice.execution.reading.values import few, replica_at
from crossdevice.values.device import Device

MAX_NAMED = 8
"""A message names this many replicas, then counts."""


class RollCall(NamedTuple):
    """Replicas that wait, have returned, or have failed, and what the others are doing.

    >>> devices = [Device("cpu", 0), Device("cpu", 1)]
    >>> str(RollCall(devices, {0: "call 1, all_reduce(SUM)"}, {1}, set(), lambda replica: ""))
    'waiting at call 1, all_reduce(SUM): replica 0 (cpu:0); returned: replica 1 (cpu:1)'
    """

    devices: Sequence[Device]
    waiting: Mapping[int, str]
    returned: AbstractSet[int]
    failed: AbstractSet[int]
    place_of: Callable[[int], str]

    def __str__(self) -> str:
        groups: dict[str, list[int]] = {}
        for replica in range(len(self.devices)):
            groups.setdefault(self._state_of(replica), []).append(replica)
        if len(groups) == 1:
            return f"{next(iter(groups))}: all {len(self.devices)} replicas"
        return "; ".join(f"{state}: {named(replicas, self.devices)}" for state, replicas in groups.items())

    def _state_of(self, replica: int) -> str:
        if replica in self.waiting:
            return f"waiting at {self.waiting[replica]}"
        if replica in self.returned:
            return "returned"
        if replica in self.failed:
            return "failed"
        place = self.place_of(replica)
        state = "missing, still running" if self.waiting else "still running"
        return f"{state} at {place}" if place else state


def named(replicas: Sequence[int], devices: Sequence[Device]) -> str:
    """Replicas by number and device: `replica 3 (cpu:3)`."""
    return few([replica_at(replica, devices[replica]) for replica in replicas], MAX_NAMED)
