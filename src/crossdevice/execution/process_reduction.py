"""Dense leaves over all ranks of a group: shards are exchanged, combined once, and shared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import HOST_MEMORY, Array, dtype_named
from crossdevice.execution.fused_passes import written_view
from crossdevice.execution.leaf_spec import LeafSpec
from crossdevice.execution.tracing import Work, flight_recorder, now
from crossdevice.execution.travelling import LINE_ELEMENTS, partial_dtype, shard_edges
from crossdevice.kernels.host.fused_pass import fused_batch, fused_pass
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


class _Pack(NamedTuple):
    """Leaves of one dtype that travel together, each from a cache line of its own on.

    `counts` has the replicas of each rank. `partial` is the dtype of one partial result per process; None
    if the replicas' arrays travel. Complex numbers are pairs of reals here, unless they are multiplied.
    """

    places: tuple[_Place, ...]
    counts: Sequence[int]
    num_elements: int
    dtype: np.dtype[Any]
    partial: np.dtype[Any] | None
    result: np.dtype[Any]
    local_recipe: Recipe
    final_recipe: Recipe


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
        """For each leaf its result on each destination of this process, written to `outs` where given."""
        results: dict[int, tuple[Array, ...]] = {}
        for pack in self._packs:
            started = now()
            share = self._share(pack, columns)
            flight_recorder.events.append((self._packing, started, now(), 1))
            total = self._combined(call, pack, share)
            started = now()
            results.update(self._delivered(pack, total, outs))
            flight_recorder.events.append((self._unpacking, started, now(), 1))
        return [results[number] for number in range(len(self._specs))]

    def explained(self) -> Iterator[str]:
        """What this process sends for each pack, in words."""
        for number, pack in enumerate(self._packs):
            if pack.partial is None:
                what = "its replicas' arrays" if pack.counts[self._rank] > 1 else "its array"
                each = pack.dtype.itemsize * pack.counts[self._rank]
            else:
                what, each = f"one partial result in {pack.partial.name}", pack.partial.itemsize
            others = len(pack.counts) - 1
            if self._is_small(pack):
                how, sent = f"{what} to every other process", others * pack.num_elements * each
            else:
                how = f"shards of {what} to their owners, and its own shard of the result to all"
                edges = shard_edges(pack.num_elements, len(pack.counts))
                own = edges[self._rank + 1] - edges[self._rank]
                sent = (pack.num_elements - own) * each + others * own * pack.result.itemsize
            yield f"pack {number} ({len(pack.places)} values of {pack.dtype.name}): sends {how}, {sent} bytes"

    def _is_small(self, pack: _Pack) -> bool:
        """Whether everything goes to everyone; by the rank with most replicas, so that all choose alike."""
        if pack.partial is None:
            return pack.num_elements * pack.dtype.itemsize * max(pack.counts) <= SMALL_BYTES
        return pack.num_elements * pack.partial.itemsize <= SMALL_BYTES

    def _share(self, pack: _Pack, columns: Sequence[Sequence[Array]]) -> list[Flat]:
        """What this process contributes: one array for each replica, or one for all."""
        views = {
            place.leaf: self._views(place.leaf, columns[place.leaf], pack.dtype) for place in pack.places
        }
        if pack.partial is None:
            if len(pack.places) == 1:
                return views[pack.places[0].leaf]
            arrays = [
                result_pool.empty(pack.num_elements, pack.dtype) for _ in range(pack.counts[self._rank])
            ]
            for leaf, start, stop in pack.places:
                for array, view in zip(arrays, views[leaf], strict=True):
                    array[start:stop] = view
            return arrays
        total = result_pool.empty(pack.num_elements, pack.partial)
        fused_batch(
            [(views[leaf], [total[start:stop]]) for leaf, start, stop in pack.places], pack.local_recipe
        )
        return [total]

    def _views(self, leaf: int, arrays: Sequence[Array], dtype: np.dtype[Any]) -> list[Flat]:
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

    def _combined(self, call: Call, pack: _Pack, share: Sequence[Flat]) -> Flat:
        """The pack's result, combined from what all ranks contribute, in the order of ranks."""
        total = result_pool.empty(pack.num_elements, pack.result)
        is_small = self._is_small(pack)
        edges = [0, pack.num_elements] if is_small else shard_edges(pack.num_elements, call.group.size)
        shards = [slice(*edges)] * call.group.size if is_small else list(map(slice, edges, edges[1:]))
        mine = shards[self._rank]
        others = call.others()
        started = now()
        rooms = {peer: self._rooms(peer, pack, share[0].dtype, mine) for peer in others}
        call.exchange(
            _messages((peer, array[shards[peer]]) for peer in others for array in share),
            _messages((peer, room) for peer in others for room in rooms[peer]),
        )
        moved = now()
        rooms[self._rank] = [array[mine] for array in share]
        if mine.stop > mine.start:
            inputs = [room for rank in range(call.group.size) for room in rooms[rank]]
            fused_pass(inputs, [total[mine]], pack.final_recipe)
        reduced = now()
        if not is_small:
            call.exchange(
                _messages((peer, total[mine]) for peer in others),
                _messages((peer, total[shards[peer]]) for peer in others),
            )
        record = flight_recorder.events.append
        record((self._moving, started, moved, 1))
        record((self._reducing, moved, reduced, 1))
        record((self._moving, reduced, now(), 1))
        return total

    def _rooms(self, peer: int, pack: _Pack, dtype: np.dtype[Any], shard: slice) -> list[Flat]:
        """Memory for what a peer contributes to a shard."""
        number = pack.counts[peer] if pack.partial is None else 1
        return [result_pool.empty(shard.stop - shard.start, dtype) for _ in range(number)]

    def _delivered(
        self, pack: _Pack, total: Flat, outs: Sequence[Sequence[Array] | None]
    ) -> dict[int, tuple[Array, ...]]:
        """Each leaf's result on each destination."""
        wholes = {leaf: total[start:stop].view(self._dtypes[leaf]) for leaf, start, stop in pack.places}
        flats = {leaf: self._flats(leaf, whole, outs[leaf]) for leaf, whole in wholes.items()}
        copies = [
            ([whole], [flat for flat in flats[leaf] if flat is not whole]) for leaf, whole in wholes.items()
        ]
        fused_batch([(source, targets) for source, targets in copies if targets], COPYING)
        return {leaf: self._adopted(leaf, flats[leaf], outs[leaf]) for leaf in wholes}

    def _flats(self, leaf: int, whole: Flat, out: Sequence[Array] | None) -> list[Flat]:
        """For each destination the host memory its result is to be in: the whole's own where it can be."""
        spec = self._specs[leaf]
        is_host = [spec.backend.memory_of(device) == HOST_MEMORY for device in spec.destinations]
        if out is not None:
            return [
                written_view(spec.backend, array) if here else whole
                for array, here in zip(out, is_host, strict=True)
            ]
        if self._shares[leaf]:
            return [whole] * len(is_host)
        new = iter(result_pool.empty_batch([(whole.size, whole.dtype)] * (sum(is_host) - 1)))
        keeper = is_host.index(True) if any(is_host) else -1
        return [next(new) if here and number != keeper else whole for number, here in enumerate(is_host)]

    def _adopted(self, leaf: int, flats: Sequence[Flat], out: Sequence[Array] | None) -> tuple[Array, ...]:
        spec = self._specs[leaf]
        backend = spec.backend
        if out is None:
            results = tuple(map(backend.from_host, flats, repeat(spec.shape), spec.destinations))
            if self._shares[leaf] and not backend.is_immutable:
                return tuple(map(backend.read_only, results, spec.destinations))
            return results
        for array, flat, device in zip(out, flats, spec.destinations, strict=True):
            if backend.memory_of(device) == HOST_MEMORY:
                backend.mark_written(array)
            else:
                backend.write(array, backend.from_host(flat, spec.shape, device))
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
    return _Pack(
        tuple(places),
        counts,
        end,
        stored,
        partly,
        finished,
        local_recipe=Recipe(over_replicas, options.precision),
        final_recipe=Recipe(over_replicas, options.precision, divisor),
    )


def _part(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of which a complex one has two."""
    return np.empty(0, dtype).real.dtype


def _messages(pairs: Iterable[tuple[int, Flat]]) -> list[Message]:
    """Those with anything in them; both sides know which these are."""
    return [Message(peer, memory) for peer, memory in pairs if memory.size]
