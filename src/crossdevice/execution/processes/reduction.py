"""Dense leaves over all ranks of a group: shards are exchanged, combined once, and shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import HOST_MEMORY, Array, dtype_named
from crossdevice.execution.processes.packs import PackedPiece, ProcessPack, process_packs
from crossdevice.execution.processes.shared_reduction import SharedPack, chunk_length
from crossdevice.execution.processes.small_reduction import SmallReduction
from crossdevice.execution.processes.travelling import Delivery
from crossdevice.execution.reading.leaf_spec import Columns, LeafSpec, Outs
from crossdevice.execution.reading.outputs import written_view
from crossdevice.execution.tracing import Work, flight_recorder, now, recorded
from crossdevice.kernels.host.fused_pass import fused_batch
from crossdevice.kernels.host.meeting import compiled_meeting
from crossdevice.kernels.host.resources.pool import result_pool
from crossdevice.kernels.recipe import COPYING
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.process_groups.protocol import Message
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights

Flat = NDArray[Any]

SMALLEST_FUSED_BYTES = 1 << 20
"""Below, to lay out a pass takes longer than NumPy takes to copy."""


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
        *,
        is_weighted: bool = False,
        edges: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._specs = specs
        self._rank = rank
        self._shares = [options.share_results or spec.backend.is_immutable for spec in specs]
        self._dtypes = [dtype_named(spec.result_dtype(op, is_weighted)) for spec in specs]
        self._packs = process_packs(specs, op, options, counts, is_weighted=is_weighted, edges=edges)
        self._shared_packs: dict[int, SharedPack] = {}
        self._small: SmallReduction | None = None
        self._is_lone = len(specs) == len(self._packs) == 1 and specs[0].shares_host_memory
        devices = tuple(dict.fromkeys(device for spec in specs for device in spec.devices))
        num_bytes = sum(spec.num_bytes for spec in specs)
        self._packing = Work("pack", "share of this process", devices, num_bytes)
        self._moving = Work("copy", "exchange between processes", devices, num_bytes)
        self._reducing = Work("reduce", "shard of this process", devices, num_bytes // len(counts[0]))
        self._sharing = Work("reduce", "through shared memory", devices, num_bytes)
        self._combining = Work("reduce", "by every process", devices, num_bytes)
        self._unpacking = Work("unpack", "results on each device", devices, num_bytes)

    def run(self, call: GroupCall, columns: Columns, outs: Outs, weights: Weights | None = None) -> Delivery:
        """Exchanges everything with the other ranks; `outs` are written to by whoever calls the delivery.

        Only a large `out` that no input is in comes to hold its result before: should a rank be lost
        meanwhile, all inputs are still there.
        """
        small = self._small_reduction(call)
        if small is not None:
            return small.run(call, columns, outs, weights)
        flats: dict[int, list[Flat]] = {}
        for pack in self._packs:
            leaf = pack.leaves[0].leaf
            direct = self._direct_targets(pack, columns, outs[leaf])
            if direct:
                flats[leaf] = []
                self._run_pack(call, pack, columns, direct[0], {leaf: direct[1:]}, weights)
                continue
            total = result_pool.empty(pack.num_elements, pack.result)
            copies: dict[int, list[Flat]] = {}
            for leaf, start, stop in pack.leaves:
                whole = total[start:stop].view(self._dtypes[leaf])
                flats[leaf] = [whole] if outs[leaf] is not None else self._flats(leaf, whole)
                copies[leaf] = [flat.view(pack.result) for flat in flats[leaf] if flat is not whole]
            self._run_pack(call, pack, columns, total, copies, weights)
        return lambda: [
            self._adopted(leaf, flats[leaf]) if out is None else self._written(leaf, flats[leaf], out)
            for leaf, out in enumerate(outs)
        ]

    def repeated(self, call: GroupCall) -> Callable[[GroupCall, Columns, Outs], Delivery]:
        """As `run`, or a shorter way to do it, for calls like this one."""
        return (self._small_reduction(call) or self).run

    def bound(self, call: GroupCall, columns: Columns, outs: Columns) -> Callable[[GroupCall], None]:
        """A function that reduces these arrays into those of `outs` in a call, whenever it is called."""
        lone = self._shared_pack(call, self._packs[0]) if self._is_lone else None
        if lone is None or not lone.is_small_and_lone:

            def run(call: GroupCall) -> None:
                self.run(call, columns, outs)()

            return run
        pack, backend, written = self._packs[0], self._specs[0].backend, tuple(outs[0])
        targets = [written_view(backend, array).view(pack.result) for array in written]
        reduce = lone.bound(self._views(0, columns[0], pack.dtype), targets)

        def run_lone(call: GroupCall) -> None:
            started = now()
            reduce(call)  # an input in `outs` is written to when all have come: nothing can fail any more
            backend.mark_written(written)
            flight_recorder.events.append((self._sharing, started, now(), 1))

        return run_lone

    def explained(self, group: ProcessGroup) -> Iterator[str]:
        """What this process sends for each pack, or does with it in shared memory, in words."""
        for number, pack in enumerate(self._packs):
            if group.shared is not None and chunk_length(pack):
                how = SharedPack(pack, group.shared).explained()
            else:
                how = pack.explained(group)
            yield f"pack {number} ({len(pack.leaves)} values of {pack.dtype.name}): {how}"

    # ---------------------------------------------------------------- one pack

    def _run_pack(
        self,
        call: GroupCall,
        pack: ProcessPack,
        columns: Columns,
        total: Flat,
        copies: Mapping[int, Sequence[Flat]],
        weights: Weights | None,
    ) -> None:
        """The pack's result in `total` and in copies of its leaves, by a reduce-scatter and an all-gather."""
        shared_pack = self._shared_pack(call, pack)
        if shared_pack is not None:
            views = {leaf: self._views(leaf, columns[leaf], pack.dtype) for leaf, _, _ in pack.leaves}
            with recorded(self._sharing):
                shared_pack.run(call, views, total, copies, weights)
            return
        self._reduce_shard(
            call,
            pack,
            columns,
            lambda piece: [total[piece.in_pack], *(copy[piece.in_leaf] for copy in copies[piece.leaf])],
            weights,
        )
        if pack.is_small:
            return
        with recorded(self._moving):
            call.all_gather_into([[total[shard.place]] for shard in pack.shards])
        with recorded(self._unpacking):
            received = [piece for peer in call.others() for piece in pack.shards[peer].pieces]
            tasks = [
                ([total[piece.in_pack]], [copy[piece.in_leaf] for copy in copies[piece.leaf]])
                for piece in received
                if copies[piece.leaf]
            ]
            fused_batch(tasks, COPYING)

    def _reduce_shard(
        self,
        call: GroupCall,
        pack: ProcessPack,
        columns: Columns,
        targets_of: Callable[[PackedPiece], list[Flat]],
        weights: Weights | None = None,
    ) -> None:
        """This rank's shard of the pack, each piece of it written to its targets.

        What others combine is made ready first, and is on its way while the rest is.
        """
        mine, others = pack.shards[self._rank], call.others()
        views = {leaf: self._views(leaf, columns[leaf], pack.dtype) for leaf, _, _ in pack.leaves}
        share = self._room_for_share(pack, views)
        buffers = {
            peer: [result_pool.empty(mine.length, pack.travelling) for _ in range(pack.num_arrays(peer))]
            for peer in others
        }
        of_others = [mine] if pack.is_small else [pack.shards[peer] for peer in others]
        with recorded(self._packing):
            self._fill(pack, share, views, [piece for shard in of_others for piece in shard.pieces])
        buffers[self._rank] = [array[mine.place] for array in share]
        if pack.is_small:
            with recorded(self._moving):
                call.all_gather_into([buffers[rank] for rank in sorted(buffers)])
        else:
            call.start_exchange(
                [_message(peer, array[pack.shards[peer].place]) for peer in others for array in share],
                [_message(peer, buffer) for peer in others for buffer in buffers[peer]],
            )
            with recorded(self._packing):
                self._fill(pack, share, views, mine.pieces)
            with recorded(self._moving):
                call.wait()
        with recorded(self._reducing):
            contributions = [buffer for rank in sorted(buffers) for buffer in buffers[rank]]
            first = mine.place.start
            tasks = []
            for piece in mine.pieces:
                here = slice(piece.in_pack.start - first, piece.in_pack.stop - first)
                tasks.append(([array[here] for array in contributions], targets_of(piece)))
            fused_batch(tasks, pack.final_recipe.with_weights(weights))

    def _shared_pack(self, call: GroupCall, pack: ProcessPack) -> SharedPack | None:
        """The reduction of a pack through shared memory, if there is any."""
        known = self._shared_packs.get(id(pack))
        shared = call.group.shared
        if known is None and shared is not None and chunk_length(pack):
            shared.steps.meet = compiled_meeting()
            known = self._shared_packs[id(pack)] = SharedPack(pack, shared)
        return known

    def _small_reduction(self, call: GroupCall) -> SmallReduction | None:
        """The reduction of the only leaf if it is so small that every rank combines everything."""
        if self._small is None and self._is_lone:
            pack = self._packs[0]
            shared = self._shared_pack(call, pack)
            is_sent = pack.is_small and pack.is_sent_as_it_is and pack.num_elements > 0
            if is_sent if shared is None else shared.is_small_and_lone:
                what = self._specs[0], self._dtypes[0]
                self._small = SmallReduction(
                    pack, shared, self._rank, *what, shares_results=self._shares[0], work=self._combining
                )
        return self._small

    def _views(self, leaf: int, arrays: Sequence[Array], dtype: np.dtype[Any]) -> list[Flat]:
        """The leaf's replicas on the host."""
        spec = self._specs[leaf]
        backend = spec.backend
        if spec.shares_host_memory:
            views = [backend.host_view(array) for array in arrays]
        else:
            views = [
                backend.host_view(array)
                if backend.memory_of(device) == HOST_MEMORY
                else backend.to_host(array)
                for array, device in zip(arrays, spec.devices, strict=True)
            ]
        return _viewed_as(views, dtype)

    def _room_for_share(self, pack: ProcessPack, views: Mapping[int, Sequence[Flat]]) -> Sequence[Flat]:
        """What this process contributes, before it is filled; a lone leaf's arrays are sent as they are."""
        if pack.is_sent_as_it_is:
            return views[pack.leaves[0].leaf]
        number = pack.num_arrays(self._rank)
        return [result_pool.empty(pack.num_elements, pack.travelling) for _ in range(number)]

    def _fill(
        self,
        pack: ProcessPack,
        share: Sequence[Flat],
        views: Mapping[int, Sequence[Flat]],
        pieces: Sequence[PackedPiece],
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

    # ---------------------------------------------------------------- results

    def _flats(self, leaf: int, whole: Flat) -> list[Flat]:
        """For each destination the host memory its result is to be in: the whole's own where it can be."""
        spec = self._specs[leaf]
        if len(spec.destinations) == 1:
            return [whole]
        is_host = [spec.backend.memory_of(device) == HOST_MEMORY for device in spec.destinations]
        if self._shares[leaf]:
            return [whole] * len(is_host)
        # The first host destination keeps the memory the result arrives in, others there get copies of it;
        # what goes to a GPU is copied from it later, so it needs none of its own.
        new = iter(result_pool.empty_batch([(whole.size, whole.dtype)] * (sum(is_host) - 1)))
        keeper = is_host.index(True) if any(is_host) else -1
        return [next(new) if here and number != keeper else whole for number, here in enumerate(is_host)]

    def _adopted(self, leaf: int, flats: Sequence[Flat]) -> tuple[Array, ...]:
        """New arrays on each destination."""
        return self._specs[leaf].adopted(flats, is_shared=self._shares[leaf])

    def _direct_targets(self, pack: ProcessPack, columns: Columns, out: Sequence[Array] | None) -> list[Flat]:
        """The host memory of `out` in which a pack's only leaf can be received; none if it must be copied."""
        if out is None or pack.is_small or len(pack.leaves) > 1:
            return []
        spec = self._specs[pack.leaves[0].leaf]
        if any(spec.backend.memory_of(device) != HOST_MEMORY for device in spec.destinations):
            return []
        targets = [written_view(spec.backend, array) for array in out]
        inputs = [
            each.backend.host_view(array)
            for each, arrays in zip(self._specs, columns, strict=True)
            for array, device in zip(arrays, each.devices, strict=True)
            if each.backend.memory_of(device) == HOST_MEMORY
        ]
        if any(np.may_share_memory(target, array) for target in targets for array in inputs):
            return []
        return [target.view(pack.result) for target in targets]

    def _written(self, leaf: int, flats: Sequence[Flat], out: Sequence[Array]) -> tuple[Array, ...]:
        """The arrays of `out`, with the result in them; it is there already if there are no `flats`."""
        spec = self._specs[leaf]
        backend = spec.backend
        if not flats:
            backend.mark_written(tuple(out))
            return tuple(out)
        whole = flats[0]
        on_host = [backend.memory_of(device) == HOST_MEMORY for device in spec.destinations]
        targets = [written_view(backend, array) for array, here in zip(out, on_host, strict=True) if here]
        if whole.nbytes < SMALLEST_FUSED_BYTES:
            for target in targets:
                target[:] = whole
        elif targets:
            fused_batch([([whole], targets)], COPYING)
        for array, here, device in zip(out, on_host, spec.destinations, strict=True):
            if here:
                backend.mark_written((array,))
            else:
                backend.write(array, backend.from_host(whole, spec.shape, device))
        return tuple(out)


def _viewed_as(flats: Sequence[Flat], dtype: np.dtype[Any]) -> list[Flat]:
    """The same memory in another dtype, where it has another."""
    return [flat if flat.dtype == dtype else flat.view(dtype) for flat in flats]


def _message(peer: int, memory: Flat) -> Message:
    """A shard's; a byte for one without elements, so that its rank hears of the others as these of it."""
    return Message(peer, memory if memory.size else np.zeros(1, np.uint8))
