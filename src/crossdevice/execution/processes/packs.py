"""What travels between processes together, and which part of it each rank combines: the same on all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from crossdevice.backends.protocol import dtype_named
from crossdevice.execution.processes.travelling import LINE_ELEMENTS, partial_dtype, shard_edges
from crossdevice.execution.reading.leaf_spec import LeafSpec
from crossdevice.kernels.recipe import Recipe
from crossdevice.plans.packing import Item, Packing
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.values.dtypes import COMPLEXES, ITEM_BYTES
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import UNKNOWN_WEIGHTS

PACK_BYTES = 32 << 20
"""A pack is closed once it is larger, unless the options say otherwise."""

SMALL_BYTES = 32 << 10
"""Up to here every rank gets everything and combines it itself: one exchange instead of two."""


class PackedLeaf(NamedTuple):
    """A leaf, and where it lies in its pack."""

    leaf: int
    start: int
    stop: int


class PackedPiece(NamedTuple):
    """The elements `start` to `stop` of a leaf, at `offset` in its pack."""

    leaf: int
    start: int
    stop: int
    offset: int

    @property
    def in_leaf(self) -> slice:
        """Where it is in its leaf."""
        return slice(self.start, self.stop)

    @property
    def in_pack(self) -> slice:
        """Where it is in its pack."""
        return slice(self.offset, self.offset + self.stop - self.start)


class Shard(NamedTuple):
    """The part of a pack that one rank combines: its place in the pack, and the pieces of leaves in it."""

    place: slice
    pieces: tuple[PackedPiece, ...]

    @property
    def length(self) -> int:
        """How many elements it has."""
        return int(self.place.stop - self.place.start)


class ProcessPack(NamedTuple):
    """Leaves of one dtype that travel together, each from a cache line of its own on.

    `counts` has the replicas of each rank, `shards` what each combines; of a small pack all combine all.
    `partial` is the dtype of one partial result per process; None if the replicas' arrays travel.
    Complex numbers are pairs of reals here, unless they are multiplied: `per_element` is 2 then.
    """

    leaves: tuple[PackedLeaf, ...]
    counts: Sequence[int]
    shards: tuple[Shard, ...]
    is_small: bool
    num_elements: int
    dtype: np.dtype[Any]
    partial: np.dtype[Any] | None
    result: np.dtype[Any]
    local_recipe: Recipe
    final_recipe: Recipe
    per_element: int

    @property
    def travelling(self) -> np.dtype[Any]:
        """The dtype in which elements are sent to be combined."""
        return self.dtype if self.partial is None else self.partial

    @property
    def is_sent_as_it_is(self) -> bool:
        """Whether the arrays of its only leaf travel themselves."""
        return self.partial is None and len(self.leaves) == 1

    def num_arrays(self, rank: int) -> int:
        """How many arrays a rank contributes."""
        return self.counts[rank] if self.partial is None else 1

    def explained(self, group: ProcessGroup) -> str:
        """What a rank of a group sends of it over the engine, in words."""
        rank, hosts = group.rank, group.hosts
        far = [peer for peer in range(group.size) if peer != rank] if hosts is None else hosts.far
        num_copies = len(far) if hosts is None else len(hosts.ranks) - 1
        everybody = "every other process" if hosts is None else "a process of each other host"
        each = self.travelling.itemsize * self.num_arrays(rank)
        if self.partial is not None:
            what = f"one partial result in {self.partial.name}"
        else:
            what = "its replicas' arrays" if self.counts[rank] > 1 else "its array"
        if self.is_small:
            return f"sends {what} to {everybody}, {num_copies * self.num_elements * each} bytes"
        sent = sum(self.shards[peer].length for peer in far) * each
        sent += num_copies * self.shards[rank].length * self.result.itemsize
        return (
            f"sends shards of {what} to their owners, and its own shard of the result to {everybody}, "
            f"{sent} bytes"
        )


def process_packs(
    specs: Sequence[LeafSpec],
    op: ReduceOp,
    options: CommunicationOptions,
    counts: Sequence[tuple[int, ...]],
    *,
    is_weighted: bool = False,
    edges: Sequence[Sequence[int]] | None = None,
) -> list[ProcessPack]:
    """The packs of a batch; `counts` has, for each leaf, the number of its replicas on each rank.

    With `edges`, the elements of each leaf at which the parts of all replicas begin and end, a rank's shard
    has the parts of its own replicas. Without them shards are as equal as possible.
    """
    items = [
        Item(spec.num_elements, ITEM_BYTES[spec.dtype], (spec.dtype, spec.into, count))
        for spec, count in zip(specs, counts, strict=True)
    ]
    return [
        _pack_of(
            [segment.item for segment in pack], specs, op, options, counts[pack[0].item], is_weighted, edges
        )
        for pack in Packing().packs(items, options.bytes_per_pack or PACK_BYTES)
    ]


def _pack_of(
    leaves: Sequence[int],
    specs: Sequence[LeafSpec],
    op: ReduceOp,
    options: CommunicationOptions,
    counts: Sequence[int],
    is_weighted: bool,
    edges: Sequence[Sequence[int]] | None,
) -> ProcessPack:
    spec = specs[leaves[0]]
    result = spec.result_dtype(op, is_weighted)
    if spec.own_op is not None:
        op, is_weighted = spec.own_op, False
    in_parts = spec.dtype in COMPLEXES and op is not ReduceOp.PROD

    def element(name: str) -> np.dtype[Any]:
        dtype = dtype_named(name)
        return np.empty(0, dtype).real.dtype if in_parts else dtype

    partial = None
    # With weights the arrays travel themselves, so that bits do not depend on which process has which. Of
    # values that are to be sorted there are no partial results.
    if not is_weighted and not op.is_order_statistic:
        partial = partial_dtype(spec.dtype, op, options.precision, max(counts))
    stored, travelling = element(spec.dtype), None if partial is None else element(partial)
    per_element = 2 if in_parts else 1
    packed = _packed(leaves, specs, per_element)
    sent_bytes = stored.itemsize * max(counts) if travelling is None else travelling.itemsize
    # By the rank with most replicas, so that all choose alike.
    is_small = edges is None and packed[-1].stop * sent_bytes <= SMALL_BYTES
    if edges is not None:
        shards = _shards_of_replicas(leaves, edges, counts, per_element)
    elif is_small:
        shards = (_shard(packed, 0, packed[-1].stop),) * len(counts)
    else:
        pairs = itertools.pairwise(shard_edges(packed[-1].stop, len(counts)))
        shards = tuple(_shard(packed, start, stop) for start, stop in pairs)
    over_replicas = ReduceOp.SUM if op is ReduceOp.MEAN else op
    final_recipe = Recipe(over_replicas, options.precision)
    if is_weighted:
        final_recipe = final_recipe._replace(weights=UNKNOWN_WEIGHTS)
    elif op is ReduceOp.MEAN:
        final_recipe = final_recipe._replace(divisor=sum(counts))
    return ProcessPack(
        packed,
        counts,
        shards,
        is_small,
        shards[-1].place.stop,
        stored,
        travelling,
        element(result),
        local_recipe=Recipe(over_replicas, options.precision),
        final_recipe=final_recipe,
        per_element=per_element,
    )


def _packed(leaves: Sequence[int], specs: Sequence[LeafSpec], per_element: int) -> tuple[PackedLeaf, ...]:
    """Leaves one after the other, each from a line of its own on."""
    packed: list[PackedLeaf] = []
    for leaf in leaves:
        start = _next_line(packed[-1].stop) if packed else 0
        packed.append(PackedLeaf(leaf, start, start + specs[leaf].num_elements * per_element))
    return tuple(packed)


def pieces_between(packed: Sequence[PackedLeaf], start: int, stop: int) -> tuple[PackedPiece, ...]:
    """What leaves have in a range of their pack."""
    return tuple(
        PackedPiece(leaf, max(start, first) - first, min(stop, end) - first, max(start, first))
        for leaf, first, end in packed
        if max(start, first) < min(stop, end)
    )


def _shard(packed: Sequence[PackedLeaf], start: int, stop: int) -> Shard:
    return Shard(slice(start, stop), pieces_between(packed, start, stop))


def _shards_of_replicas(
    leaves: Sequence[int], edges: Sequence[Sequence[int]], counts: Sequence[int], per_element: int
) -> tuple[Shard, ...]:
    """For each rank the parts of its replicas; a lone leaf lies in its pack as it does in memory."""
    shards, replica, end = [], 0, 0
    for count in counts:
        start, pieces = end, []
        for leaf in leaves:
            for number in range(replica, replica + count):
                first, last = (edge * per_element for edge in edges[leaf][number : number + 2])
                offset = end if len(leaves) == 1 else _next_line(end)
                end = offset + last - first
                if first < last:
                    pieces.append(PackedPiece(leaf, first, last, offset))
        shards.append(Shard(slice(start, end), tuple(pieces)))
        replica += count
    return tuple(shards)


def _next_line(element: int) -> int:
    return -(-element // LINE_ELEMENTS) * LINE_ELEMENTS
