"""Recursive halving until each device owns one summed shard, then recursive doubling."""

from __future__ import annotations

from collections.abc import Sequence

from crossdevice.algorithms.base import PackedOps
from crossdevice.costs.timing import Round
from crossdevice.costs.topology import Topology
from crossdevice.plans.builder import PlanBuilder
from crossdevice.plans.steps import Buffer
from crossdevice.values.device import Device


class HalvingDoublingAllReduce(PackedOps):
    """Recursive halving to sum shards, recursive doubling to share them (Rabenseifner's algorithm)::

        halves:    0 ⇄ 2, 1 ⇄ 3   then   0 ⇄ 1, 2 ⇄ 3     each ends with one summed shard
        doubling:  0 ⇄ 1, 2 ⇄ 3   then   0 ⇄ 2, 1 ⇄ 3     each ends with everything

    It takes 2 log2 N rounds if N is a power of two, and each device moves 2 (N - 1) / N of an array, as in a
    ring. For other N the surplus replicas first send their arrays to partners and get the result last, in
    2 more rounds of a whole array. Use it for medium sizes, where the rounds of a ring cost too much.

    Args:
        num_packs: the number of packs into which a batch is split; 0 reduces value by value.

    Raises:
        OptionError: `num_packs` is no whole number of 0 or more.

    >>> import numpy as np
    >>> from crossdevice import PerReplica
    >>> value = PerReplica([np.float32([1, 2]), np.float32([3, 4])])
    >>> HalvingDoublingAllReduce().reduce("sum", value, destinations=value).values[1]
    array([4., 6.], dtype=float32)
    """

    def plan_sum(self, build: PlanBuilder, destinations: Sequence[Device]) -> Sequence[Buffer]:
        """Folds in the first surplus pairs; member i of the rest ends up with shard i."""
        num_replicas = len(build.inputs)
        num_members = 1 << (num_replicas.bit_length() - 1)
        num_folded = num_replicas - num_members
        held = [
            build.add(build.inputs[2 * pair : 2 * pair + 2], at=build.inputs[2 * pair].device)
            for pair in range(num_folded)
        ]
        held += build.inputs[2 * num_folded :]
        held = _halved(build, held)
        if set(destinations) != {buffer.device for buffer in build.inputs}:
            return [build.join(held, at=device) for device in destinations]
        results = _doubled(build, held)
        folded = [
            build.copy(results[pair], to=build.inputs[2 * pair + 1].device) for pair in range(num_folded)
        ]
        return build.deliver([*results, *folded], destinations)

    def plan_rounds(self, topology: Topology, num_bytes: float) -> Sequence[Round]:
        """Exchanges with far partners first, then back; folds a surplus in before and serves it after."""
        count = topology.num_devices
        num_members = 1 << (count.bit_length() - 1)
        num_folded = count - num_members
        members = [2 * pair for pair in range(num_folded)] + list(range(2 * num_folded, count))
        folds = [(2 * pair + 1, 2 * pair) for pair in range(num_folded)]
        rounds = [Round(folds, num_bytes, num_added=2)]
        typical = range(num_members) if num_folded else topology.typical_devices
        distance = num_members // 2
        while distance:
            pairs = [(members[member], members[member ^ distance]) for member in typical]
            share = num_members // (2 * distance)
            held = share * (2 if num_folded else 1)
            rounds.append(Round(pairs, num_bytes / (2 * share), num_added=2, num_contributions=held))
            distance //= 2
        shares = [Round(each.transfers, each.num_bytes) for each in reversed(rounds)]
        shares[-1] = Round([(target, source) for source, target in folds], num_bytes)
        return [*rounds, *shares]


def _halved(build: PlanBuilder, held: list[Buffer]) -> list[Buffer]:
    """Halves shards between partners, far ones first; each sums one half of both."""
    distance = len(held) // 2
    while distance:
        halves = [build.split(buffer, 2) for buffer in held]
        for member, buffer in enumerate(held):
            side = 1 if member & distance else 0
            low, high = sorted((member, member ^ distance))
            held[member] = build.add([halves[low][side], halves[high][side]], at=buffer.device)
        distance //= 2
    return held


def _doubled(build: PlanBuilder, held: list[Buffer]) -> list[Buffer]:
    """Doubles shards between partners, near ones first, until all have everything."""
    distance = 1
    while distance < len(held):
        held = [
            build.join([held[member & ~distance], held[member | distance]], at=buffer.device)
            for member, buffer in enumerate(held)
        ]
        distance *= 2
    return held
