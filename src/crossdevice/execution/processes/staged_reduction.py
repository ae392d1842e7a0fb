"""Leaves on GPUs that do not reach each other: through shared memory of the host, a chunk at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import Array
from crossdevice.execution.processes.packs import PackedPiece, ProcessPack, pieces_between, process_packs
from crossdevice.execution.processes.peers import known_peers
from crossdevice.execution.processes.shared_reduction import ALONE_BYTES, chunk_length
from crossdevice.execution.processes.travelling import Delivery, partial_dtype, shard_edges
from crossdevice.execution.reading.leaf_spec import Columns, LeafSpec, Outs
from crossdevice.execution.reading.outputs import delivered
from crossdevice.execution.signature_cache import SignatureCache
from crossdevice.execution.tracing import Work, recorded
from crossdevice.kernels.host.fused_pass import bound_batch
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.process_groups.shared_memory import WINDOW_BYTES
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights

Bytes = NDArray[np.uint8]


def may_be_staged(spec: LeafSpec, group: ProcessGroup) -> bool:
    """Whether a leaf is on one GPU, as the leaves of all ranks are, and ranks share memory of the host."""
    peers = known_peers(group)
    return (
        peers is not None
        and peers.are_on_gpus
        and group.shared is not None
        and spec.backend.name == "torch"
        and spec.shared_gpu is not None
        and spec.num_elements > 0
    )


def travels_as_it_is(
    spec: LeafSpec, op: ReduceOp, options: CommunicationOptions, counts: Sequence[int], is_weighted: bool
) -> bool:
    """Whether the arrays of all replicas are brought to the host, and not one partial result per process."""
    if spec.own_op is not None:  # as packs have it
        op, is_weighted = spec.own_op, False
    if is_weighted or op.is_order_statistic:
        return True
    return partial_dtype(spec.dtype, op, options.precision, max(counts)) is None


class Target(NamedTuple):
    """The elements `start` to `stop` of a leaf go to an address."""

    start: int
    stop: int
    address: int


class _Chunk(NamedTuple):
    """A range of a pack that fits into windows: everything in it, and what each rank combines of it."""

    start: int
    pieces: tuple[PackedPiece, ...]
    shards: tuple[tuple[PackedPiece, ...], ...]

    @property
    def is_combined_by_all(self) -> bool:
        """Whether every rank combines everything."""
        return len(self.shards) == 1

    def offset(self, piece: PackedPiece) -> int:
        """Where a piece begins in a window, in elements."""
        return piece.offset - self.start


class _Windows:
    """The windows of one parity: their memory, and where it is."""

    def __init__(self, brought: Sequence[Bytes], made: Sequence[Bytes]) -> None:
        self.brought, self.made = brought, made
        self.brought_at, self.made_at = (
            [int(window.__array_interface__["data"][0]) for window in windows] for windows in (brought, made)
        )


class StagedReduction:
    """Dense leaves of a batch, on one GPU of each process, reduced by the host's kernels in shared memory.

    While the host combines a chunk, the GPU copies the next one to the host and the results of the last one
    back. The bits are those of any other way through the host: the kernels are the same.
    """

    def __init__(
        self,
        specs: Sequence[LeafSpec],
        op: ReduceOp,
        options: CommunicationOptions,
        counts: Sequence[tuple[int, ...]],
        group: ProcessGroup,
        *,
        is_weighted: bool,
    ) -> None:
        shared = group.shared
        assert shared is not None
        # Only now: importing PyTorch takes seconds.
        from crossdevice.kernels.cuda import staging, tensors

        self._tensors = tensors
        self._specs, self._rank, self._steps = specs, group.rank, shared.steps
        self._dtypes = [spec.result_dtype(op, is_weighted) for spec in specs]
        self._packs = process_packs(specs, op, options, counts, is_weighted=is_weighted)
        self._chunks = [_chunks_of(pack) for pack in self._packs]
        self._windows = list(map(_Windows, shared.brought, shared.made))
        self._passes: SignatureCache[list[Callable[[], None]]] = SignatureCache()
        device = specs[0].devices[0]
        self._place = tensors.device_named(device.type, device.index)
        self._copies = staging.Staging(self._place)
        if not device.is_host:
            for windows in self._windows:
                for address in (*windows.brought_at, *windows.made_at):
                    staging.pin(shared, address, WINDOW_BYTES)
        num_bytes = sum(spec.num_bytes for spec in specs)
        self._work = Work("reduce", "through shared memory, in chunks", (device,), num_bytes)

    def run(self, call: GroupCall, columns: Columns, outs: Outs, weights: Weights | None = None) -> Delivery:
        """Reduces with the other ranks; `outs` are written to by whoever calls the delivery."""
        tensors = self._tensors
        with tensors.on_device(self._place):
            results = [
                tensors.empty(spec.shape, dtype, self._place)
                for spec, dtype in zip(self._specs, self._dtypes, strict=True)
            ]
            targets = [
                [Target(0, spec.num_elements, address)]
                for spec, address in zip(self._specs, tensors.addresses_of(results), strict=True)
            ]
            self._reduce(call, list(map(tensors.tensors_of, columns)), targets, weights)
        return lambda: [
            self._delivered(spec, result, out)
            for spec, result, out in zip(self._specs, results, outs, strict=True)
        ]

    def _reduce(
        self,
        call: GroupCall,
        inputs: Sequence[Sequence[Any]],
        targets: Sequence[Sequence[Target]],
        weights: Weights | None,
    ) -> None:
        """From the inputs of all ranks to the targets of this one."""
        with recorded(self._work):
            sources = list(map(self._tensors.addresses_of, inputs))
            self._copies.begin()
            try:
                for number in range(len(self._packs)):
                    self._run_pack(call, number, sources, targets, weights)
            finally:
                self._copies.wait()  # of memory that is free from now on

    def _run_pack(
        self,
        call: GroupCall,
        number: int,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[Target]],
        weights: Weights | None,
    ) -> None:
        """One step for each chunk, and one at the end unless every rank combines everything.

        Whoever comes to a step has copied back what was made before the last one, so a window is never
        written to while it is read (see shared_steps).
        """
        pack, chunks, steps = self._packs[number], self._chunks[number], self._steps
        self._fetch(pack, chunks[0], self._windows[steps.parity], sources)
        for position, chunk in enumerate(chunks):
            self._copies.wait()
            call.step()
            parity = steps.number & 1
            if position + 1 < len(chunks):
                self._fetch(pack, chunks[position + 1], self._windows[1 - parity], sources)
            if position:
                self._put(pack, chunks[position - 1], self._windows[1 - parity], targets)
            self._combine(number, chunk, parity, weights)
        parity = steps.number & 1
        if not chunks[0].is_combined_by_all:
            self._copies.wait()
            call.step()
        self._put(pack, chunks[-1], self._windows[parity], targets)
        self._copies.wait()

    def _fetch(
        self, pack: ProcessPack, chunk: _Chunk, windows: _Windows, sources: Sequence[Sequence[int]]
    ) -> None:
        """Starts to bring this rank's arrays to its window."""
        size, window = pack.dtype.itemsize, windows.brought_at[self._rank]
        stride = chunk_length(pack) * size
        for piece in chunk.pieces:
            at, num_bytes = window + chunk.offset(piece) * size, (piece.stop - piece.start) * size
            for number, source in enumerate(sources[piece.leaf]):
                self._copies.fetch(at + number * stride, source + piece.start * size, num_bytes)

    def _put(
        self, pack: ProcessPack, chunk: _Chunk, windows: _Windows, targets: Sequence[Sequence[Target]]
    ) -> None:
        """Starts to copy what all ranks have made to the targets."""
        size, per_element = pack.result.itemsize, pack.per_element
        makers = [self._rank] if chunk.is_combined_by_all else range(len(chunk.shards))
        for maker, shard in zip(makers, chunk.shards, strict=True):
            for piece in shard:
                window = windows.made_at[maker] + (chunk.offset(piece) - piece.start) * size
                for target in targets[piece.leaf]:
                    first = target.start * per_element
                    start, stop = max(piece.start, first), min(piece.stop, target.stop * per_element)
                    if start < stop:
                        address = target.address + (start - first) * size
                        self._copies.put(address, window + start * size, (stop - start) * size)

    def _combine(self, number: int, chunk: _Chunk, parity: int, weights: Weights | None) -> None:
        """What this rank combines of a chunk; of chunks that are alike it is laid out once."""
        mine = chunk.shards[0 if chunk.is_combined_by_all else self._rank]
        places = tuple((chunk.offset(piece), piece.stop - piece.start) for piece in mine)
        key = (number, parity, places)
        works = None if weights is not None else self._passes.get(key)
        if works is None:
            pack, windows = self._packs[number], self._windows[parity]
            inputs = [
                array.view(pack.dtype)
                for rank, window in enumerate(windows.brought)
                for array in _arrays_in(window, pack, rank)
            ]
            made = windows.made[self._rank].view(pack.result)
            tasks = [
                ([array[at : at + length] for array in inputs], [made[at : at + length]])
                for at, length in places
            ]
            works = bound_batch(tasks, pack.final_recipe.with_weights(weights))
            if weights is None:
                self._passes[key] = works
        for work in works:
            work()

    def _delivered(self, spec: LeafSpec, result: Any, out: Sequence[Array] | None) -> tuple[Array, ...]:
        if out is not None:
            return delivered([result] * len(out), out, spec.backend)
        return (result, *(spec.backend.copy(result, device) for device in spec.destinations[1:]))


def _chunks_of(pack: ProcessPack) -> list[_Chunk]:
    """The chunks of a pack; there is one shard of each if every rank combines everything."""
    size, length = len(pack.counts), chunk_length(pack)
    all_bytes = pack.num_elements * pack.dtype.itemsize * sum(pack.counts)
    num_shards = 1 if all_bytes <= ALONE_BYTES and pack.num_elements <= length else size
    chunks = []
    for start in range(0, pack.num_elements, length):
        stop = min(start + length, pack.num_elements)
        edges = [start + edge for edge in shard_edges(stop - start, num_shards)]
        shards = tuple(pieces_between(pack.leaves, *ends) for ends in itertools.pairwise(edges))
        chunks.append(_Chunk(start, pieces_between(pack.leaves, start, stop), shards))
    return chunks


def _arrays_in(window: Bytes, pack: ProcessPack, rank: int) -> list[Bytes]:
    """A rank's arrays in its window, one after the other."""
    size = chunk_length(pack) * pack.dtype.itemsize
    return [window[number * size : (number + 1) * size] for number in range(pack.counts[rank])]
