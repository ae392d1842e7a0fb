"""Packs: lists of ranges of values that travel together, so packing itself copies nothing.

A batch is first grouped by `key` (dtype, devices and destinations): only equal keys share a pack.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from crossdevice.values.options import whole_number


class Item(NamedTuple):
    """One value of a batch, as packing sees it."""

    num_elements: int
    item_bytes: int
    key: Hashable


class Segment(NamedTuple):
    """The elements `start` to `stop` of the batch's value number `item`."""

    item: int
    start: int
    stop: int


Pack = tuple[Segment, ...]


@dataclasses.dataclass(frozen=True)
class Packing:
    """Packing rule of an algorithm: `num_packs` if not 0, else small values in groups, else one by one.

    >>> for pack in Packing(num_packs=2).packs([Item(3, 4, "f"), Item(2, 4, "f")]):
    ...     print([tuple(segment) for segment in pack])
    [(0, 0, 2)]
    [(0, 2, 3), (1, 0, 2)]
    """

    num_packs: int = 0
    small_max_bytes: int = 0
    small_max_group: int = 10

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            # What TensorFlow and we call them outside.
            name = field.name.replace("small_", "agg_small_grads_")
            object.__setattr__(self, field.name, whole_number(name, getattr(self, field.name)))

    def packs(self, items: Sequence[Item], bytes_per_pack: int = 0) -> list[Pack]:
        """Returns the packs of a batch; the caller's `bytes_per_pack` has precedence if not zero."""
        groups: dict[Hashable, list[int]] = {}
        for number, item in enumerate(items):
            groups.setdefault(item.key, []).append(number)
        packs: list[Pack] = []
        for members in groups.values():
            if bytes_per_pack > 0:
                packs += _by_bytes(items, members, bytes_per_pack)
            elif self.num_packs > 0:
                packs += _evenly(items, members, self.num_packs)
            elif self.small_max_bytes > 0 and self.small_max_group > 0:
                packs += _small_together(items, members, self.small_max_bytes, self.small_max_group)
            else:
                packs += [(_whole(items, member),) for member in members]
        return packs


def _whole(items: Sequence[Item], member: int) -> Segment:
    return Segment(member, 0, items[member].num_elements)


def _evenly(items: Sequence[Item], members: Sequence[int], num_packs: int) -> list[Pack]:
    """Cuts all values end to end into equal packs; the last takes the remainder, as in TensorFlow."""
    total = sum(items[member].num_elements for member in members)
    size = total // num_packs
    edges = [*(size * number for number in range(num_packs)), total]
    offsets = [0, *itertools.accumulate(items[member].num_elements for member in members)]
    packs = [
        tuple(
            Segment(member, max(start, low) - low, min(stop, high) - low)
            for member, (low, high) in zip(members, itertools.pairwise(offsets), strict=True)
            if max(start, low) < min(stop, high)
        )
        for start, stop in itertools.pairwise(edges)
    ]
    empty = [(_whole(items, member),) for member in members if items[member].num_elements == 0]
    return [pack for pack in packs if pack] + empty


def _by_bytes(items: Sequence[Item], members: Sequence[int], bytes_per_pack: int) -> list[Pack]:
    """Packs whole values from last to first; closes a pack once it exceeds the limit, as in TensorFlow.

    From last to first because gradients of the last layers are ready first.
    """
    packs: list[Pack] = []
    current: list[Segment] = []
    held_bytes = 0
    for member in reversed(members):
        if held_bytes > bytes_per_pack:
            packs.append(tuple(current))
            current, held_bytes = [], 0
        current.append(_whole(items, member))
        held_bytes += items[member].num_elements * items[member].item_bytes
    return [*packs, tuple(current)]


def _small_together(
    items: Sequence[Item], members: Sequence[int], max_bytes: int, max_group: int
) -> list[Pack]:
    """Packs runs of two or more consecutive small values together; these packs come first."""
    runs: list[list[int]] = [[]]
    alone: list[int] = []
    for member in members:
        is_small = items[member].num_elements * items[member].item_bytes < max_bytes
        if not is_small or len(runs[-1]) == max_group:
            runs.append([])
        (runs[-1] if is_small else alone).append(member)
    alone += [run[0] for run in runs if len(run) == 1]
    packs = [tuple(_whole(items, member) for member in run) for run in runs if len(run) > 1]
    return packs + [(_whole(items, member),) for member in sorted(alone)]
