"""Leaves on GPUs that do not reach each other: through shared memory of the host, a chunk at a time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import Array
from crossdevice.execution.processes.packs import PackedPiece, ProcessPack, pieces_between, process_packs
from crossdevice.execution.processes.peers import known_peers
from crossdevice.execution.processes.shared_reduction import ALONE_BYTES, chunk_length
from crossdevice.execution.processes.travelling import Delivery, partial_dtype, shard_edges
from crossdevice.execution.reading.leaf_spec import Columns, LeafSpec, Outs
from crossdevice.execution.reading.outputs import delivered
from crossdevice.execution.tracing import Work, recorded
from crossdevice.kernels.host.fused_pass import fused_batch
from crossdevice.kernels.recipe import Recipe
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights

if TYPE_CHECKING:
    import torch

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
    if is_weighted or op.is_of_ranks:
        return True
    return partial_dtype(spec.dtype, op, options.precision, max(counts)) is None


class _Chunk(NamedTuple):
    """A range of a pack that fits into windows: everything in it, and what each rank combines of it."""

    start: int
    pieces: tuple[PackedPiece, ...]
    shards: tuple[tuple[PackedPiece, ...], ...]

    def place(self, piece: PackedPiece, element_bytes: int) -> slice:
        """Where the bytes of a piece are in a window."""
        first, last = piece.in_pack.start - self.start, piece.in_pack.stop - self.start
        return slice(first * element_bytes, last * element_bytes)


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
        assert group.shared is not None
        # Only now: importing PyTorch takes seconds.
        from crossdevice.kernels.cuda import staging, tensors

        self._staging, self._tensors = staging, tensors
        self._specs, self._rank, self._shared = specs, group.rank, group.shared
        self._dtypes = [spec.result_dtype(op, is_weighted) for spec in specs]
        self._packs = process_packs(specs, op, options, counts, is_weighted=is_weighted)
        self._chunks = [_chunks_of(pack) for pack in self._packs]
        device = specs[0].devices[0]
        self._place = tensors.device_named(device.type if not device.is_host else "cpu", device.index)
        self._copies = staging.Staging(self._place)
        if not device.is_host:
            for windows in (*group.shared.brought, *group.shared.made):
                for window in windows:
                    staging.pin(group.shared, window)
        num_bytes = sum(spec.num_bytes for spec in specs)
        self._work = Work("reduce", "through shared memory, in chunks", (device,), num_bytes)

    def run(self, call: GroupCall, columns: Columns, outs: Outs, weights: Weights | None = None) -> Delivery:
        """Reduces with the other ranks; `outs` are written to by whoever calls the delivery."""
        with self._tensors.on_device(self._place), recorded(self._work):
            inputs = [
                [self._staging.bytes_of(tensor) for tensor in self._tensors.tensors_of(column)]
                for column in columns
            ]
            results = [
                self._tensors.empty(spec.shape, dtype, self._place)
                for spec, dtype in zip(self._specs, self._dtypes, strict=True)
            ]
            written = list(map(self._staging.bytes_of, results))
            self._copies.begin()
            try:
                for pack, chunks in zip(self._packs, self._chunks, strict=True):
                    self._run_pack(call, pack, chunks, inputs, written, weights)
            finally:
                self._copies.wait()  # of memory that is free from now on
        return lambda: [
            self._delivered(spec, result, out)
            for spec, result, out in zip(self._specs, results, outs, strict=True)
        ]

    def _run_pack(
        self,
        call: GroupCall,
        pack: ProcessPack,
        chunks: Sequence[_Chunk],
        inputs: Sequence[Sequence[torch.Tensor]],
        written: Sequence[torch.Tensor],
        weights: Weights | None,
    ) -> None:
        """One step for each chunk, and one at the end unless every rank combines everything.

        Whoever comes to a step has copied back what was made before the last one, so a window is never
        written to while it is read (see shared_steps).
        """
        steps, recipe = self._shared.steps, pack.final_recipe.with_weights(weights)
        before: _Chunk | None = None
        self._fetch(pack, chunks[0], steps.parity, inputs)
        for number, chunk in enumerate(chunks):
            self._copies.wait()
            call.step()
            parity = steps.number & 1
            if number + 1 < len(chunks):
                self._fetch(pack, chunks[number + 1], 1 - parity, inputs)
            if before is not None:
                self._put(pack, before, 1 - parity, written)
            self._combine(pack, chunk, parity, recipe)
            before = chunk
        parity = steps.number & 1
        if len(chunks[0].shards) > 1:
            self._copies.wait()
            call.step()
        assert before is not None
        self._put(pack, before, parity, written)
        self._copies.wait()

    def _fetch(
        self, pack: ProcessPack, chunk: _Chunk, parity: int, inputs: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        """Starts to bring this rank's arrays to its window."""
        size = pack.dtype.itemsize
        arrays = _arrays_in(self._shared.brought[parity][self._rank], pack, self._rank)
        for piece in chunk.pieces:
            source = slice(piece.start * size, piece.stop * size)
            for array, tensor in zip(arrays, inputs[piece.leaf], strict=True):
                self._copies.fetch(array[chunk.place(piece, size)], tensor[source])

    def _put(self, pack: ProcessPack, chunk: _Chunk, parity: int, written: Sequence[torch.Tensor]) -> None:
        """Starts to copy what all ranks have made to the results."""
        size = pack.result.itemsize
        makers = range(len(chunk.shards)) if len(chunk.shards) > 1 else [self._rank]
        for maker, shard in zip(makers, chunk.shards, strict=True):
            window = self._shared.made[parity][maker]
            for piece in shard:
                target = written[piece.leaf][piece.start * size : piece.stop * size]
                self._copies.put(target, window[chunk.place(piece, size)])

    def _combine(self, pack: ProcessPack, chunk: _Chunk, parity: int, recipe: Recipe) -> None:
        brought = [
            array
            for rank, window in enumerate(self._shared.brought[parity])
            for array in _arrays_in(window, pack, rank)
        ]
        made = self._shared.made[parity][self._rank]
        mine = chunk.shards[self._rank if len(chunk.shards) > 1 else 0]
        tasks = [
            (
                [array[chunk.place(piece, pack.dtype.itemsize)].view(pack.dtype) for array in brought],
                [made[chunk.place(piece, pack.result.itemsize)].view(pack.result)],
            )
            for piece in mine
        ]
        fused_batch(tasks, recipe)

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
