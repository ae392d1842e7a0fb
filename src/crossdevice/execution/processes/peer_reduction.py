"""Leaves on GPUs of one host: each process sums its shard from the memory of all, and writes it to all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from crossdevice.backends.protocol import Array
from crossdevice.execution.local.gpu_passes import why_stepped
from crossdevice.execution.local.prepared import recipe_for
from crossdevice.execution.processes.peers import known_peers
from crossdevice.execution.processes.travelling import Delivery, partial_dtype, shard_edges
from crossdevice.execution.reading.leaf_spec import Columns, LeafSpec, Outs
from crossdevice.execution.reading.outputs import delivered
from crossdevice.execution.tracing import Work, recorded
from crossdevice.kernels.cuda.families import MAX_ARRAYS, MAX_EXACT_ARRAYS, arranged, parts_in
from crossdevice.kernels.cuda.task import AddressOffset, KernelTask
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.dtypes import ITEM_BYTES, result_dtype
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights

if TYPE_CHECKING:
    from crossdevice.kernels.cuda.gpu_pass import GpuPass
    from crossdevice.kernels.cuda.task import Start


def is_on_peers(spec: LeafSpec, op: ReduceOp, options: CommunicationOptions, group: ProcessGroup) -> bool:
    """Whether a leaf is on one GPU that other processes of the group reach, and a kernel can reduce it."""
    peers = known_peers(group)
    if group.size == 1 or spec.backend.name != "torch" or not spec.num_elements:
        return False
    if peers is None or peers.why_not is not None:
        return False
    if spec.shared_gpu is None or spec.shared_gpu != peers.gpu or options.lowering != "auto":
        return False
    if op.is_order_statistic or spec.into is not None or spec.own_op is not None:
        return False
    recipe = recipe_for(op, options, group.size)
    return why_stepped(spec, recipe, result_dtype(spec.dtype, op)) is None


def has_bits_of_the_host(
    spec: LeafSpec, op: ReduceOp, options: CommunicationOptions, counts: Sequence[int]
) -> bool:
    """Whether one kernel over the replicas of all ranks gives what shards sent through the host would."""
    if sum(counts) > (MAX_EXACT_ARRAYS if options.precision == "exact" else MAX_ARRAYS):
        return False
    if options.precision == "fast":  # where each process adds its own replicas first
        return max(counts) == 1
    return partial_dtype(spec.dtype, op, options.precision, max(counts)) is None


class Piece(NamedTuple):
    """The elements `start` to `stop` of a leaf, which one rank reduces, and where the results begin."""

    start: int
    stop: int
    outputs: tuple[AddressOffset, ...]


class PeerReduction:
    """Dense leaves of a batch, all on one GPU of each process; prepared before there are arrays.

    One rank of each GPU reduces a part of every leaf, in one launch. No GPU waits for another process.
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
        assert peers.gpu is not None
        assert peers.addresses is not None
        # Only now: importing PyTorch and Triton takes seconds.
        from crossdevice.kernels.cuda import gpu_pass, tensors

        self._tensors = tensors
        self._specs, self._counts, self._addresses = specs, counts, peers.addresses
        self._dtypes = [result_dtype(spec.dtype, op) for spec in specs]
        self._rank, self._size, self._workers = group.rank, group.size, peers.workers
        self._num_inputs = [sum(count[rank] for count in counts) for rank in range(self._size)]
        # Addresses are in the order of ranks, of each its inputs, then its results.
        numbers = [self._num_inputs[rank] + self._num_results(rank) for rank in range(self._size)]
        self._firsts = list(itertools.accumulate(numbers, initial=0))
        self._place = tensors.device_named(peers.gpu.type, peers.gpu.index)
        self._pass: GpuPass | None = None
        self._launched: tuple[list[int], Start] = [], lambda _: None  # the last one: of a loop, the only one
        if self._rank in self._workers:
            with tensors.on_device(self._place):
                self._pass = gpu_pass.GpuPass(self._tasks(op, options), self._place)
        num_bytes = sum(spec.num_bytes for spec in specs)
        self._work = Work("reduce", "from the GPU memory of all processes", (peers.gpu,), num_bytes)

    def run(self, call: GroupCall, columns: Columns, outs: Outs, weights: Weights | None = None) -> Delivery:
        """Reduces with the other ranks; inputs in `outs` are written to by whoever calls the delivery."""
        assert weights is None, "weights go through the host"
        with self._tensors.on_device(self._place):
            inputs = self._tensors.tensors_of([array for column in columns for array in column])
            results = [self._result(number, columns[number], out) for number, out in enumerate(outs)]
            arrays = [*inputs, *results]
            self._reduce(call, arrays, self._tensors.addresses_of(arrays))
        return lambda: [
            self._delivered(number, result, out)
            for number, (result, out) in enumerate(zip(results, outs, strict=True))
        ]

    def bound(self, columns: Columns, outs: Columns) -> Callable[[GroupCall], None]:
        """A function that reduces these arrays into those of `outs` in a call, whenever it is called."""
        inputs = [array for column in columns for array in column]
        results = [self._result(number, column, outs[number]) for number, column in enumerate(columns)]
        written = [array for out in outs for array in out]
        arrays = [*inputs, *results]
        if not self._tensors.are_plain(inputs) or list(map(id, results)) != list(map(id, written)):
            # Copies have to be made in each call.
            def run(call: GroupCall) -> None:
                self.run(call, columns, outs)()

            return run
        addresses, backend = self._tensors.addresses_of(arrays), self._specs[0].backend

        def launch(call: GroupCall) -> None:
            with self._tensors.on_device(self._place):
                self._reduce(call, arrays, addresses)
            backend.mark_written(written)

        return launch

    def _reduce(self, call: GroupCall, arrays: Sequence[Any], own: Sequence[int]) -> None:
        """From the inputs of all ranks to their results, which are among the arrays at these addresses."""
        with recorded(self._work):
            work = None if self._pass is None else self._launch
            self._addresses.visit(call, self._place, arrays, own, work)

    def _launch(self, addresses: list[int], stream: int) -> None:
        if addresses is not self._launched[0]:
            assert self._pass is not None
            self._launched = addresses, self._pass.bound(addresses)
        self._launched[1](stream)

    def _tasks(self, op: ReduceOp, options: CommunicationOptions) -> list[KernelTask]:
        """This rank's pieces of each leaf."""
        tasks = []
        for number, (spec, dtype, count) in enumerate(
            zip(self._specs, self._dtypes, self._counts, strict=True)
        ):
            arrangement = arranged(recipe_for(op, options, sum(count)), spec.dtype, dtype)
            assert not isinstance(arrangement, str), arrangement  # asked before, by is_on_peers
            inputs = [
                AddressOffset(
                    self._firsts[rank] + sum(each[rank] for each in self._counts[:number]) + replica
                )
                for rank in range(self._size)
                for replica in range(count[rank])
            ]
            tasks += [
                KernelTask(
                    arrangement.arithmetic,
                    tuple(
                        inputs[position].moved(start * ITEM_BYTES[spec.dtype])
                        for position in arrangement.positions or range(len(inputs))
                    ),
                    outputs,
                    (stop - start) * parts_in(spec.dtype),
                )
                for start, stop, outputs in self._pieces(number)
            ]
        return tasks

    def _num_results(self, rank: int) -> int:  # noqa: ARG002 - of interest where each has its own parts
        """How many arrays of a rank are written to."""
        return len(self._specs)

    def _first_result(self, rank: int) -> int:
        """The position of its address among those of all."""
        return self._firsts[rank] + self._num_inputs[rank]

    def _pieces(self, number: int) -> Iterator[Piece]:
        """What this rank reduces of a leaf: its shard, which goes to the results of all ranks."""
        workers = list(dict.fromkeys(self._workers))
        edges = shard_edges(self._specs[number].num_elements, len(workers))
        start, stop = edges[workers.index(self._rank) :][:2]
        offset = start * ITEM_BYTES[self._dtypes[number]]
        ranks = range(self._size)
        yield Piece(
            start, stop, tuple(AddressOffset(self._first_result(rank) + number, offset) for rank in ranks)
        )

    def _result(self, number: int, column: Sequence[Array], out: Sequence[Array] | None) -> Any:
        """Memory that all ranks write to: the first of `out` unless that is an input, which may be needed."""
        spec = self._specs[number]
        if out is not None and not {id(array) for array in out} & {id(array) for array in column}:
            tensors = self._tensors.writable_tensors(out[:1])
            if tensors is not None:
                return tensors[0]
        return self._tensors.empty(spec.shape, self._dtypes[number], self._place)

    def _delivered(self, number: int, result: Any, out: Sequence[Array] | None) -> tuple[Array, ...]:
        backend, destinations = self._specs[number].backend, self._specs[number].destinations
        if out is None:
            return (result, *(backend.copy(result, device) for device in destinations[1:]))
        if out[0] is result:
            backend.mark_written(out[:1])
            delivered([result] * (len(out) - 1), out[1:], backend)
            return tuple(out)
        return delivered([result] * len(out), out, backend)
