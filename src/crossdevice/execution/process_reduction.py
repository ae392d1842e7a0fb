"""Dense leaves over all ranks of a group: shards are exchanged, combined once, and shared."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import HOST_MEMORY, Array, dtype_named
from crossdevice.execution.fused_passes import written_view
from crossdevice.execution.leaf_spec import LeafSpec
from crossdevice.execution.tracing import Work, recorded
from crossdevice.execution.travelling import LINE_ELEMENTS, partial_dtype, shard_edges
from crossdevice.kernels.host.fused_pass import fused_batch
from crossdevice.kernels.host.pool import result_pool
from crossdevice.kernels.host.recipe import Recipe
from crossdevice.plans.packing import Item, Packing
from crossdevice.process_groups.group import Call
from crossdevice.process_groups.protocol import Message
from crossdevice.values.dtypes import COMPLEXES, ITEM_BYTES, result_dtype
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp

Flat = NDArray[Any]

PACK_BYTES = 32 << 20
"""A pack is closed once it is larger, unless the options say otherwise."""

SMALL_BYTES = 32 << 10
"""Up to here every rank gets everything and combines it itself: one exchange instead of two."""

COPYING = Recipe(ReduceOp.SUM, "fast")
"""Of a single input: the input itself."""


class _Place(NamedTuple):
    """Where a leaf lies in its pack."""

    leaf: int
    start: int
    stop: int


class _Piece(NamedTuple):
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


class _Shard(NamedTuple):
    """The part of a pack that one rank combines: its place in the pack, and the pieces of leaves in it."""

    place: slice
    pieces: tuple[_Piece, ...]


class _Pack(NamedTuple):
    """Leaves of one dtype that travel together, each from a cache line of its own on.

    `counts` has the replicas of each rank, `shards` what each combines; of a small pack all combine all.
    `partial` is the dtype of one partial result per process; None if the replicas' arrays travel.
    Complex numbers are pairs of reals here, unless they are multiplied.
    """

    places: tuple[_Place, ...]
    counts: Sequence[int]
    shards: tuple[_Shard, ...]
    is_small: bool
    num_elements: int
    dtype: np.dtype[Any]
    partial: np.dtype[Any] | None
    result: np.dtype[Any]
    local_recipe: Recipe
    final_recipe: Recipe

    @property
    def travelling(self) -> np.dtype[Any]:
        """The dtype in which elements are sent to be combined."""
        return self.dtype if self.partial is None else self.partial

    @property
    def is_sent_as_it_is(self) -> bool:
        """Whether the arrays of its only leaf travel themselves."""
        return self.partial is None and len(self.places) == 1

    def num_arrays(self, rank: int) -> int:
        """How many arrays a rank contributes."""
        return self.counts[rank] if self.partial is None else 1


class ProcessReduction:
    """Everything about a batch of dense leaves on several ranks that does not depend on their elements.

    `counts` has, for each leaf, the number of its replicas on each rank: all ranks come to the same packs.
    """

    def __init__(
        self,
        specs: Sequence[LeafSpec],
        op: ReduceOp,
        options: CommunicationOptions,
        counts: Sequence[tuple[int, ...]],
        rank: int,
    ) -> None:
        self._specs = specs
        self._rank = rank
        self._shares = [options.share_results or spec.backend.is_immutable for spec in specs]
        self._dtypes = [dtype_named(result_dtype(spec.dtype, op)) for spec in specs]
        items = [
            Item(spec.num_elements, ITEM_BYTES[spec.dtype], (spec.dtype, count))
            for spec, count in zip(specs, counts, strict=True)
        ]
        self._packs = [
            _pack_of([segment.item for segment in pack], specs, op, options, counts[pack[0].item])
            for pack in Packing().packs(items, options.bytes_per_pack or PACK_BYTES)
        ]
        devices = tuple(dict.fromkeys(device for spec in specs for device in spec.devices))
        num_bytes = sum(item.num_elements * item.item_bytes for item in items)
        self._packing = Work("pack", "share of this process", devices, num_bytes)
        self._moving = Work("copy", "exchange between processes", devices, num_bytes)
        self._reducing = Work("reduce", "shard of this process", devices, num_bytes // len(counts[0]))
        self._unpacking = Work("unpack", "results on each device", devices, num_bytes)

    def run(
        self, call: Call, columns: Sequence[Sequence[Array]], outs: Sequence[Sequence[Array] | None]
    ) -> list[tuple[Array, ...]]:
        """For each leaf its result on each destination of this process.

        `outs` are written to once everything has arrived: a rank that is lost leaves them as they were.
        """
        flats: dict[int, list[Flat]] = {}
        for pack in self._packs:
            total = result_pool.empty(pack.num_elements, pack.result)
            copies: dict[int, list[Flat]] = {}
            for leaf, start, stop in pack.places:
                whole = total[start:stop].view(self._dtypes[leaf])
                flats[leaf] = [whole] if outs[leaf] is not None else self._flats(leaf, whole)
                copies[leaf] = [flat.view(pack.result) for flat in flats[leaf] if flat is not whole]
            self._run_pack(call, pack, columns, total, copies)
        return [
            self._adopted(leaf, flats[leaf]) if out is None else self._written(leaf, flats[leaf][0], out)
            for leaf, out in enumerate(outs)
        ]

    def explained(self) -> Iterator[str]:
        """What this process sends for each pack, in words."""
        for number, pack in enumerate(self._packs):
            if pack.partial is None:
                what = "its replicas' arrays" if pack.counts[self._rank] > 1 else "its array"
                each = pack.dtype.itemsize * pack.counts[self._rank]
            else:
                what, each = f"one partial result in {pack.partial.name}", pack.partial.itemsize
            others = len(pack.counts) - 1
            if pack.is_small:
                how, sent = f"{what} to every other process", others * pack.num_elements * each
            else:
                how = f"shards of {what} to their owners, and its own shard of the result to all"
                own = _length(pack.shards[self._rank])
                sent = (pack.num_elements - own) * each + others * own * pack.result.itemsize
            yield f"pack {number} ({len(pack.places)} values of {pack.dtype.name}): sends {how}, {sent} bytes"

    # ---------------------------------------------------------------- one pack

    def _run_pack(
        self,
        call: Call,
        pack: _Pack,
        columns: Sequence[Sequence[Array]],
        total: Flat,
        copies: Mapping[int, Sequence[Flat]],
    ) -> None:
        """The pack's result in `total` and in the copies of its leaves.

        What others combine is made ready first, and is on its way while the rest is.
        """
        mine, others = pack.shards[self._rank], call.others()
        views = {leaf: self._views(leaf, columns[leaf], pack.dtype) for leaf, _, _ in pack.places}
        share = self._room_for_share(pack, views)
        rooms = {
            peer: [result_pool.empty(_length(mine), pack.travelling) for _ in range(pack.num_arrays(peer))]
            for peer in others
        }
        of_others = [mine] if pack.is_small else [pack.shards[peer] for peer in others]
        with recorded(self._packing):
            self._fill(pack, share, views, [piece for shard in of_others for piece in shard.pieces])
        call.start_exchange(
            _messages((peer, array[pack.shards[peer].place]) for peer in others for array in share),
            _messages((peer, room) for peer in others for room in rooms[peer]),
        )
        if not pack.is_small:
            with recorded(self._packing):
                self._fill(pack, share, views, mine.pieces)
        with recorded(self._moving):
            call.wait()
        with recorded(self._reducing):
            rooms[self._rank] = [array[mine.place] for array in share]
            self._combine(pack, mine, [room for rank in sorted(rooms) for room in rooms[rank]], total, copies)
        if pack.is_small:
            return
        with recorded(self._moving):
            call.exchange(
                _messages((peer, total[mine.place]) for peer in others),
                _messages((peer, total[pack.shards[peer].place]) for peer in others),
            )
        with recorded(self._unpacking):
            received = [piece for peer in others for piece in pack.shards[peer].pieces]
            tasks = [
                ([total[piece.in_pack]], [copy[piece.in_leaf] for copy in copies[piece.leaf]])
                for piece in received
                if copies[piece.leaf]
            ]
            fused_batch(tasks, COPYING)

    def _views(self, leaf: int, arrays: Sequence[Array], dtype: np.dtype[Any]) -> list[Flat]:
        """The leaf's replicas on the host."""
        spec = self._specs[leaf]
        backend = spec.backend
        return [
            (
                backend.host_view(array)
                if backend.memory_of(device) == HOST_MEMORY
                else backend.to_host(array)
            ).view(dtype)
            for array, device in zip(arrays, spec.devices, strict=True)
        ]

    def _room_for_share(self, pack: _Pack, views: Mapping[int, Sequence[Flat]]) -> Sequence[Flat]:
        """What this process contributes, before it is filled; a lone leaf's arrays are sent as they are."""
        if pack.is_sent_as_it_is:
            return views[pack.places[0].leaf]
        number = pack.num_arrays(self._rank)
        return [result_pool.empty(pack.num_elements, pack.travelling) for _ in range(number)]

    def _fill(
        self,
        pack: _Pack,
        share: Sequence[Flat],
        views: Mapping[int, Sequence[Flat]],
        pieces: Sequence[_Piece],
    ) -> None:
        """Puts pieces of this process's arrays, or of their partial result, into its share."""
        if pack.is_sent_as_it_is:
            return
        if pack.partial is None:
            for piece in pieces:
                for array, view in zip(share, views[piece.leaf], strict=True):
                    array[piece.in_pack] = view[piece.in_leaf]
            return
        (partial,) = share
        tasks = [
            ([view[piece.in_leaf] for view in views[piece.leaf]], [partial[piece.in_pack]])
            for piece in pieces
        ]
        fused_batch(tasks, pack.local_recipe)

    def _combine(
        self,
        pack: _Pack,
        mine: _Shard,
        contributions: Sequence[Flat],
        total: Flat,
        copies: Mapping[int, Sequence[Flat]],
    ) -> None:
        """This rank's shard from what all ranks contribute, in their order, to wherever it is wanted."""
        first = mine.place.start
        tasks = []
        for piece in mine.pieces:
            here = slice(piece.in_pack.start - first, piece.in_pack.stop - first)
            outputs = [total[piece.in_pack], *(copy[piece.in_leaf] for copy in copies[piece.leaf])]
            tasks.append(([array[here] for array in contributions], outputs))
        fused_batch(tasks, pack.final_recipe)

    # ---------------------------------------------------------------- results

    def _flats(self, leaf: int, whole: Flat) -> list[Flat]:
        """For each destination the host memory its result is to be in: the whole's own where it can be."""
        spec = self._specs[leaf]
        is_host = [spec.backend.memory_of(device) == HOST_MEMORY for device in spec.destinations]
        if self._shares[leaf]:
            return [whole] * len(is_host)
        new = iter(result_pool.empty_batch([(whole.size, whole.dtype)] * (sum(is_host) - 1)))
        keeper = is_host.index(True) if any(is_host) else -1
        return [next(new) if here and number != keeper else whole for number, here in enumerate(is_host)]

    def _adopted(self, leaf: int, flats: Sequence[Flat]) -> tuple[Array, ...]:
        """New arrays on each destination."""
        spec = self._specs[leaf]
        backend = spec.backend
        results = tuple(map(backend.from_host, flats, itertools.repeat(spec.shape), spec.destinations))
        if self._shares[leaf] and not backend.is_immutable:
            return tuple(map(backend.read_only, results, spec.destinations))
        return results

    def _written(self, leaf: int, whole: Flat, out: Sequence[Array]) -> tuple[Array, ...]:
        """The arrays of `out`, with the result in them."""
        spec = self._specs[leaf]
        backend = spec.backend
        on_host = [backend.memory_of(device) == HOST_MEMORY for device in spec.destinations]
        targets = [written_view(backend, array) for array, here in zip(out, on_host, strict=True) if here]
        if targets:
            fused_batch([([whole], targets)], COPYING)
        for array, here, device in zip(out, on_host, spec.destinations, strict=True):
            if here:
                backend.mark_written(array)
            else:
                backend.write(array, backend.from_host(whole, spec.shape, device))
        return tuple(out)


def _pack_of(
    leaves: Sequence[int],
    specs: Sequence[LeafSpec],
    op: ReduceOp,
    options: CommunicationOptions,
    counts: Sequence[int],
) -> _Pack:
    dtype = specs[leaves[0]].dtype
    over_replicas = ReduceOp.SUM if op is ReduceOp.MEAN else op
    partial = partial_dtype(dtype, op, options.precision, max(counts))
    divisor = sum(counts) if op is ReduceOp.MEAN else None
    names = (dtype, partial, result_dtype(dtype, op))
    in_parts = dtype in COMPLEXES and op is not ReduceOp.PROD
    stored, partly, finished = (
        None if name is None else _part(dtype_named(name)) if in_parts else dtype_named(name)
        for name in names
    )
    places, end = [], 0
    for leaf in leaves:
        start = -(-end // LINE_ELEMENTS) * LINE_ELEMENTS
        end = start + specs[leaf].num_elements * (2 if in_parts else 1)
        places.append(_Place(leaf, start, end))
    assert stored is not None
    assert finished is not None
    sent_bytes = stored.itemsize * max(counts) if partly is None else partly.itemsize
    is_small = end * sent_bytes <= SMALL_BYTES  # by the rank with most replicas, so that all choose alike
    edges = [0, end] if is_small else shard_edges(end, len(counts))
    shards = tuple(_shard(places, start, stop) for start, stop in itertools.pairwise(edges))
    return _Pack(
        tuple(places),
        counts,
        shards * len(counts) if is_small else shards,
        is_small,
        end,
        stored,
        partly,
        finished,
        local_recipe=Recipe(over_replicas, options.precision),
        final_recipe=Recipe(over_replicas, options.precision, divisor),
    )


def _shard(places: Sequence[_Place], start: int, stop: int) -> _Shard:
    pieces = tuple(
        _Piece(leaf, max(start, first) - first, min(stop, end) - first, max(start, first))
        for leaf, first, end in places
        if max(start, first) < min(stop, end)
    )
    return _Shard(slice(start, stop), pieces)


def _length(shard: _Shard) -> int:
    return int(shard.place.stop - shard.place.start)


def _part(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of which a complex one has two."""
    return np.empty(0, dtype).real.dtype


def _messages(pairs: Iterable[tuple[int, Flat]]) -> list[Message]:
    """Those with anything in them; both sides know which these are."""
    return [Message(peer, memory) for peer, memory in pairs if memory.size]
