"""Two binary trees, each for half of the data, so that every device works."""

from __future__ import annotations

from collections.abc import Sequence

from crossdevice.algorithms.base import PackedOps
from crossdevice.costs.timing import Round
from crossdevice.costs.topology import Topology
from crossdevice.plans.builder import PlanBuilder
from crossdevice.plans.steps import Buffer
from crossdevice.values.device import Device


class TreeAllReduce(PackedOps):
    """Sums up a binary tree and copies back down it, one half of the data in each of two trees::

        first half of the data        second half
                4                            3
              2   6                        5   1
             1 3 5 7                      6 4 2 0

    It takes about 2 log2 N rounds, and no device sends or receives more than two arrays: an inner node of
    one tree is a leaf of the other (the double binary tree of Sanders, Speck and Traeff, 2009). Use it for
    small values on many devices.

    Args:
        num_packs: the number of packs into which a batch is split; 0 reduces value by value.

    Raises:
        OptionError: `num_packs` is no whole number of 0 or more.

    >>> import numpy as np
    >>> from crossdevice import PerReplica
    >>> value = PerReplica([np.float32([1, 2]), np.float32([3, 4])])
    >>> TreeAllReduce().reduce("sum", value, destinations=value).values[1]
    array([4., 6.], dtype=float32)
    """

    def plan_sum(self, build: PlanBuilder, destinations: Sequence[Device]) -> Sequence[Buffer]:
        """Sums each half up its tree and copies it back down; other devices copy from the roots."""
        num_replicas = len(build.inputs)
        devices = [buffer.device for buffer in build.inputs]
        halves = list(zip(*(build.split(buffer, 2) for buffer in build.inputs), strict=True))
        trees = [_parents(num_replicas, second=second) for second in (False, True)]
        totals = [_summed_up(build, half, tree) for half, tree in zip(halves, trees, strict=True)]
        if set(destinations) != set(devices):
            return [build.join(totals, at=device) for device in destinations]
        shared = [
            _copied_down(build, total, tree, devices) for total, tree in zip(totals, trees, strict=True)
        ]
        joined = [
            build.join(parts, at=device)
            for parts, device in zip(zip(*shared, strict=True), devices, strict=True)
        ]
        return build.deliver(joined, destinations)

    def plan_rounds(self, topology: Topology, num_bytes: float) -> Sequence[Round]:
        """Makes one round for each level of both trees, up and then down."""
        count = topology.num_devices
        levels: dict[int, list[tuple[int, int]]] = {}
        for second in (False, True):
            depth = [0] * count
            for child, parent in _parents(count, second=second).items():
                depth[child] = depth[parent] + 1
                levels.setdefault(depth[child], []).append((child, parent))
        rising = [
            # A family is at most two children and their parent; below a child at depth d are 2^-d of all.
            Round(
                levels[depth],
                num_bytes / 2,
                num_added=2 if depth == 1 else 3,
                num_contributions=count / 2**depth,
            )
            for depth in sorted(levels, reverse=True)
        ]
        falling = [
            Round([(parent, child) for child, parent in levels[depth]], num_bytes / 2)
            for depth in sorted(levels)
        ]
        return [*rising, *falling]


def _parents(num_replicas: int, *, second: bool) -> dict[int, int]:
    """Returns the parent of each replica but the root; parents come before their children.

    In the first tree odd positions are leaves. The second is its mirror image (for an even count) or
    its rotation by one, which exchanges odd and even.

    >>> _parents(5, second=False)
    {4: 0, 2: 4, 1: 2, 3: 2}
    """

    def replica_at(position: int) -> int:
        if not second:
            return position
        return num_replicas - 1 - position if num_replicas % 2 == 0 else (position + 1) % num_replicas

    parents: dict[int, int] = {}
    step = 1 << max(num_replicas - 1, 1).bit_length() - 1
    while step:
        for position in range(step, num_replicas, 2 * step):
            parent = (position & ~step) | (step << 1)
            if parent >= num_replicas:
                parent = position & ~step
            parents[replica_at(position)] = replica_at(parent)
        step >>= 1
    return parents


def _summed_up(build: PlanBuilder, half: Sequence[Buffer], parents: dict[int, int]) -> Buffer:
    """Sums on the root: every replica adds its children's sums to its own, deepest first."""
    family: list[list[Buffer]] = [[buffer] for buffer in half]
    root = next(replica for replica in range(len(half)) if replica not in parents)
    for child, parent in reversed(parents.items()):
        family[parent].append(build.add(family[child], at=half[child].device))
    return build.add(family[root], at=half[root].device)


def _copied_down(
    build: PlanBuilder, total: Buffer, parents: dict[int, int], devices: Sequence[Device]
) -> list[Buffer]:
    """Copies the sum to every replica's device, each from its parent."""
    held = [total] * len(devices)
    for child, parent in parents.items():
        held[child] = build.copy(held[parent], to=devices[child])
    return held
