"""Leaves on GPUs of one host: each process sums its shard from the memory of all, and writes it to all."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from crossdevice.backends.protocol import Array
from crossdevice.execution.local.gpu_passes import why_stepped
from crossdevice.execution.local.prepared import recipe_for
from crossdevice.execution.processes.peers import known_peers
from crossdevice.execution.processes.travelling import Delivery, partial_dtype, shard_edges
from crossdevice.execution.reading.leaf_spec import Columns, LeafSpec, Outs
from crossdevice.execution.reading.outputs import delivered
from crossdevice.execution.tracing import Work, recorded
from crossdevice.kernels.cuda.families import MAX_ARRAYS, arranged, parts_in
from crossdevice.kernels.cuda.task import AddressOffset, KernelTask
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.dtypes import ITEM_BYTES, result_dtype
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights

if TYPE_CHECKING:
    from crossdevice.kernels.cuda.gpu_pass import GpuPass
    from crossdevice.kernels.cuda.peer_memory import Exported

DIGEST_BYTES = 16


def is_on_peers(spec: LeafSpec, op: ReduceOp, options: CommunicationOptions, group: ProcessGroup) -> bool:
    """Whether a leaf is on one GPU that other processes of the group reach, and a kernel can reduce it."""
    peers = known_peers(group)
    if group.size == 1 or spec.backend.name != "torch" or not spec.num_elements:
        return False
    if peers is None or peers.why_not is not None:
        return False
    if spec.shared_gpu is None or spec.shared_gpu != peers.gpu or options.lowering != "auto":
        return False
    if op.is_of_ranks or spec.into is not None or spec.own_op is not None:
        return False
    recipe = recipe_for(op, options, group.size)
    return why_stepped(spec, recipe, result_dtype(spec.dtype, op)) is None


def has_bits_of_the_host(
    spec: LeafSpec, op: ReduceOp, options: CommunicationOptions, counts: Sequence[int]
) -> bool:
    """Whether one kernel over the replicas of all ranks gives what shards sent through the host would."""
    if sum(counts) > MAX_ARRAYS:
        return False
    if options.precision == "fast":  # where each process adds its own replicas first
        return max(counts) == 1
    return partial_dtype(spec.dtype, op, options.precision, max(counts)) is None


class PeerReduction:
    """Dense leaves of a batch, all on one GPU of each process; prepared before there are arrays.

    In each call ranks tell each other where their arrays are; a few bytes say that nothing has moved. No GPU
    waits for another one: the host does, before and after the kernel, so that a
    process that is lost leaves nobody's stream stuck.
    """

    def __init__(
        self,
        specs: Sequence[LeafSpec],
        op: ReduceOp,
        options: CommunicationOptions,
        counts: Sequence[tuple[int, ...]],
        group: ProcessGroup,
    ) -> None:
        peers = known_peers(group)
        assert peers is not None
        gpu = peers.gpu
        assert gpu is not None
        # Only now: importing PyTorch and Triton takes seconds.
        from crossdevice.kernels.cuda import gpu_pass, peer_memory, tensors

        self._memory, self._tensors, self._peers = peer_memory, tensors, peers
        self._specs, self._counts, self._gpu = specs, counts, gpu
        self._dtypes = [result_dtype(spec.dtype, op) for spec in specs]
        self._rank, self._size = group.rank, group.size
        self._place = tensors.device_named(gpu.type, gpu.index)
        self._digests: list[bytes] = []
        self._addresses: list[int] = []
        with self._on_gpu():
            self._pass: GpuPass = gpu_pass.GpuPass(self._tasks(op, options), self._place)
        num_bytes = sum(spec.num_bytes for spec in specs)
        self._work = Work("reduce", "shard of this process, from the memory of all", (gpu,), num_bytes)

    def run(self, call: GroupCall, columns: Columns, outs: Outs, weights: Weights | None = None) -> Delivery:
        """Reduces with the other ranks; inputs in `outs` are written to by whoever calls the delivery."""
        assert weights is None, "weights go through the host"
        with self._on_gpu(), recorded(self._work):
            inputs = self._tensors.tensors_of([array for column in columns for array in column])
            results = [self._result(number, columns[number], out) for number, out in enumerate(outs)]
            self._memory.wait_for_gpu(self._place)
            self._meet(call, [*inputs, *results])
            self._pass.run(self._addresses, self._tensors.stream_of(self._place))
            self._memory.wait_for_gpu(self._place)
            call.all_gather(b"done")
            self._peers.forget_old()
        return lambda: [
            self._delivered(number, result, out)
            for number, (result, out) in enumerate(zip(results, outs, strict=True))
        ]

    def _on_gpu(self) -> AbstractContextManager[None]:
        if self._tensors.is_current(self._place):
            return nullcontext()
        return self._tensors.working_on(self._place, None)

    def _tasks(self, op: ReduceOp, options: CommunicationOptions) -> list[KernelTask]:
        """This rank's shard of each leaf. Addresses are in the order of ranks: inputs, then results."""
        firsts = [
            sum(sum(count[:rank]) for count in self._counts) + rank * len(self._specs)
            for rank in range(self._size)
        ]
        tasks = []
        for number, (spec, dtype, count) in enumerate(
            zip(self._specs, self._dtypes, self._counts, strict=True)
        ):
            edges = shard_edges(spec.num_elements, self._size)
            start, stop = edges[self._rank], edges[self._rank + 1]
            arrangement = arranged(recipe_for(op, options, sum(count)), spec.dtype, dtype)
            assert not isinstance(arrangement, str), arrangement  # asked before, by is_on_peers
            inputs = [
                AddressOffset(firsts[rank] + sum(each[rank] for each in self._counts[:number]) + replica)
                for rank in range(self._size)
                for replica in range(count[rank])
            ]
            outputs = [
                AddressOffset(firsts[rank] + sum(each[rank] for each in self._counts) + number)
                for rank in range(self._size)
            ]
            tasks.append(
                KernelTask(
                    arrangement.arithmetic,
                    tuple(
                        inputs[position].moved(start * ITEM_BYTES[spec.dtype])
                        for position in arrangement.positions or range(len(inputs))
                    ),
                    tuple(place.moved(start * ITEM_BYTES[dtype]) for place in outputs),
                    (stop - start) * parts_in(spec.dtype),
                )
            )
        return tasks

    def _result(self, number: int, column: Sequence[Array], out: Sequence[Array] | None) -> Any:
        """Memory that all ranks write to: the first of `out` unless that is an input, which may be needed."""
        spec = self._specs[number]
        if out is not None and not {id(array) for array in out} & {id(array) for array in column}:
            tensors = self._tensors.writable_tensors(out[:1])
            if tensors is not None:
                return tensors[0]
        return self._memory.empty(spec.shape, self._dtypes[number], self._place)

    def _delivered(self, number: int, result: Any, out: Sequence[Array] | None) -> tuple[Array, ...]:
        backend, destinations = self._specs[number].backend, self._specs[number].destinations
        if out is None:
            return (result, *(backend.copy(result, device) for device in destinations[1:]))
        if out[0] is result:
            backend.mark_written(out[:1])
            delivered([result] * (len(out) - 1), out[1:], backend)
            return tuple(out)
        return delivered([result] * len(out), out, backend)

    def _meet(self, call: GroupCall, tensors: Sequence[Any]) -> None:
        """Finds out where the arrays of all ranks are; returns when all ranks have come here."""
        own = self._tensors.addresses_of(tensors)
        record = _packed([self._memory.exported(address) for address in own])
        digest = hashlib.blake2b(record, digest_size=DIGEST_BYTES).digest()
        digests = call.all_gather(digest)
        if digests == self._digests:
            return
        # All ranks have seen the same digests before, so all of them come here.
        self._digests, self._addresses = [], []
        addresses: list[int] = []
        for rank, text in enumerate(call.all_gather_uneven(record)):
            addresses += own if rank == self._rank else self._mapped(rank, text)
        self._addresses, self._digests = addresses, digests

    def _mapped(self, rank: int, record: bytes) -> list[int]:
        return [self._peers.address_of(rank, place) for place in _unpacked(record)]


def _packed(places: Sequence[Exported]) -> bytes:
    """Addresses for others: each allocation's handle once, then which of them, and how far into it."""
    handles = list(dict.fromkeys(place.handle for place in places))
    numbers = [number for place in places for number in (handles.index(place.handle), place.offset)]
    return struct.pack("<q", len(handles)) + b"".join(handles) + struct.pack(f"<{len(numbers)}q", *numbers)


def _unpacked(record: bytes) -> list[Exported]:
    from crossdevice.kernels.cuda.peer_memory import HANDLE_BYTES, Exported

    (number,) = struct.unpack_from("<q", record)
    end = 8 + number * HANDLE_BYTES
    handles = [record[start : start + HANDLE_BYTES] for start in range(8, end, HANDLE_BYTES)]
    return [Exported(handles[which], offset) for which, offset in struct.iter_unpack("<qq", record[end:])]
