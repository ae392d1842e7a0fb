"""Tasks over arrays on GPUs of one host: ranks sum from the memory of all, and write to the memory of all.

One rank of each GPU does the tasks of all ranks there, in one launch. No GPU waits for another process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from crossdevice.backends.protocol import Array
from crossdevice.execution.local.prepared import recipe_for
from crossdevice.execution.processes.gpu_peers import known_peers, peers_unavailable
from crossdevice.execution.processes.programs import Delivery, Inputs, Results
from crossdevice.execution.processes.reduced_batch import (
    LeafParts,
    ReducedBatch,
    Wanted,
    WantedCopies,
    partial_dtype,
)
from crossdevice.execution.reading.leaf_spec import Columns, Dense, LeafSpec, Outs
from crossdevice.execution.reading.outputs import are_apart, delivered
from crossdevice.execution.tracing import Work, recorded
from crossdevice.kernels.cuda.families import (
    AddressOffset,
    KernelTask,
    arranged,
)
from crossdevice.plans.tasks import Ref, Task, TaskPlan
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.dtypes import ITEM_BYTES, result_dtype
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.quantities import counted
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights, refuse_weights

if TYPE_CHECKING:
    from crossdevice.kernels.cuda.families import Start
    from crossdevice.kernels.cuda.gpu_pass import GpuPass


def peer_memory_unavailable(wanted: Wanted) -> str | None:
    """Reason a leaf cannot be reduced from the GPU memory of all ranks; None if it can."""
    spec, op, options, group, counts, is_weighted, _ = wanted
    reason = peers_unavailable(spec, op, options, group)
    if reason is not None or counts is None:
        return reason
    if is_weighted:
        return "weights go through the host"
    return host_bits_unavailable(spec, op, options, counts)


def peer_copies_unavailable(wanted: WantedCopies) -> str | None:
    """Reason ranks do not copy from each other's GPU memory; None if they do."""
    return None if wanted.is_on_gpu else "not all arrays are on GPUs whose memory all ranks reach"


def host_bits_unavailable(
    spec: LeafSpec, op: ReduceOp, options: CommunicationOptions, counts: Sequence[int]
) -> str | None:
    """Reason one kernel over all replicas has other bits than the host; None if it has the same."""
    arrangement = arranged(recipe_for(op, options, sum(counts)), spec.dtype, result_dtype(spec.dtype, op))
    most = None if isinstance(arrangement, str) else arrangement.arithmetic.max_arrays
    if most is not None and sum(counts) > most:
        return f"one kernel reads at most {most} arrays, and there are {sum(counts)}"
    if partial_dtype(spec.dtype, op, options.precision, max(counts)) is not None:
        return (
            "kernels cannot repeat the bits of the host: there each process combines its own replicas first"
        )
    return None


class PeerReduction:
    """Dense leaves of a batch, all on one GPU of each process; prepared before there are arrays."""

    def __init__(self, batch: ReducedBatch) -> None:
        peers = known_peers(batch.group)
        assert peers is not None
        assert peers.gpu is not None
        assert peers.addresses is not None
        # Only now: importing PyTorch and Triton takes seconds.
        from crossdevice.kernels.cuda import gpu_pass, tensors

        self._tensors = tensors
        self._specs, self._dtypes, self._addresses = batch.specs, batch.dtypes, peers.addresses
        self._place = tensors.device_named(peers.gpu.type, peers.gpu.index)
        self._pass: GpuPass | None = None
        self._launched: tuple[list[int], Start] = [], lambda _: None  # the last one: of a loop, the only one
        rank, workers = batch.group.rank, peers.workers
        self.plans = [batch.plan([leaf], workers=workers, seen_by=rank) for leaf in batch.leaves]
        if rank in workers:
            own = [task for plan in self.plans for task in plan.results if task.worker == rank]
            positions = _positions(batch)
            with tensors.on_device(self._place):
                self._pass = gpu_pass.GpuPass([_kernel_task(task, positions) for task in own], self._place)
        self._work = Work("reduce", "from the GPU memory of all processes", (peers.gpu,), batch.num_bytes)

    def run(self, call: GroupCall, columns: Columns, outs: Outs, weights: Weights | None = None) -> Delivery:
        """Reduces with the other ranks; inputs in `outs` are written to by whoever calls the delivery."""
        refuse_weights(weights, "weights go through the host")
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


class PeerReduceScatter(PeerReduction):
    """The same, but each part is written to the rank whose it is."""

    def __init__(self, batch: ReducedBatch) -> None:
        assert batch.parts is not None
        self._parts = batch.parts
        super().__init__(batch)

    def run(self, call: GroupCall, columns: Columns, outs: Outs, weights: Weights | None = None) -> Delivery:
        """Reduces with the other ranks; `outs` that overlap an input are written to by the delivery."""
        refuse_weights(weights, "weights go through the host")
        with self._tensors.on_device(self._place):
            inputs = self._tensors.tensors_of(
                [
                    row
                    for leaf, column in zip(self._parts, columns, strict=True)
                    for row in _rows(leaf, column)
                ]
            )
            buffers = outs if are_apart(list(map(Dense, columns, self._specs, outs))) else [None] * len(outs)
            parts = list(map(self._own_parts, range(len(buffers)), buffers))
            arrays = [*inputs, *(part for of_leaf in parts for part in of_leaf)]
            addresses = self._tensors.addresses_of(arrays)
            # Parts without elements are nowhere; nothing is written there.
            self._reduce(call, arrays, [address or addresses[0] for address in addresses])
        return lambda: list(map(_delivered, self._parts, parts, outs))

    def _own_parts(self, number: int, out: Sequence[Array] | None) -> Sequence[Any]:
        """Memory for the parts of this rank's replicas: `out`, if kernels can write to it as it is."""
        leaf = self._parts[number]
        if out is not None and leaf.axis == 0:
            tensors: list[Any] | None = self._tensors.writable_tensors(out)
            if tensors is not None:
                return tensors
        return [self._tensors.empty(shape, self._dtypes[number], self._place) for shape in leaf.own_rows]


def _rows(leaf: LeafParts, tensors: Sequence[Any]) -> Sequence[Any]:
    """The same tensors with the axis first."""
    return tensors if leaf.axis == 0 else [tensor.movedim(leaf.axis, 0) for tensor in tensors]


def _delivered(leaf: LeafParts, parts: Sequence[Any], out: Sequence[Array] | None) -> tuple[Array, ...]:
    """Parts, which are rows, with the axis in its place again, or `out` with them written to it."""
    backend = leaf.spec.backend
    if out is not None and parts[0] is out[0]:
        backend.mark_written(out)
        return tuple(out)
    if leaf.axis:
        parts = [part.movedim(0, leaf.axis).contiguous() for part in parts]
    return delivered(parts, out, backend)


class PeerCopies:
    """Copies by whoever wants them, from arrays on GPUs that other ranks show: a program, of tensors."""

    def __init__(self, plan: TaskPlan, counts: Sequence[Sequence[int]], group: ProcessGroup) -> None:
        """`counts` has, for each leaf, the number of arrays that each rank shows."""
        peers = known_peers(group)
        assert peers is not None
        assert peers.gpu is not None
        assert peers.addresses is not None
        self._gpu, self._addresses = peers.gpu, peers.addresses
        self.plan = plan
        places = [
            (rank, leaf, replica)
            for rank in range(group.size)
            for leaf, of_ranks in enumerate(counts)
            for replica in range(of_ranks[rank])
        ]
        positions = {place: position for position, place in enumerate(places)}
        own = [task for task in plan.results if task.worker == group.rank]
        self._copies = [
            (task.outputs[0], positions[task.inputs[0].buffer[1:4]], task.inputs[0].start) for task in own
        ]
        self._num_bytes = sum(output.num_bytes for output, _, _ in self._copies)

    def small_arrays(self) -> None:
        """Always None: nothing is combined."""

    def explained(self) -> str:
        """Human-readable description of what this rank does."""
        return f"copies {counted(self._num_bytes, 'byte')} from the GPU memory of other processes"

    def run(self, call: GroupCall, inputs: Inputs, results: Results, weights: Weights | None = None) -> None:
        """Shows arrays to the other ranks, and copies from what all of them show."""
        from crossdevice.kernels.cuda import tensors

        refuse_weights(weights, "copies have none")
        place = tensors.device_named(self._gpu.type, self._gpu.index)

        def copy(addresses: list[int], stream: int) -> None:
            for (buffer, start, stop), position, offset in self._copies:
                target = results[buffer.leaf, buffer.replica][0][start:stop]
                tensors.copy(target, addresses[position] + offset, stream)

        work = Work("copy", "from the GPU memory of all processes", (self._gpu,), self._num_bytes)
        with tensors.on_device(place), recorded(work):
            shown = [array for leaf in sorted(inputs) for array in inputs[leaf]]
            # Arrays without elements are nowhere.
            found = [array if array.numel() else tensors.empty((1,), "uint8", place) for array in shown]
            self._addresses.visit(call, place, found, tensors.addresses_of(found), copy)


def _positions(batch: ReducedBatch) -> dict[tuple[str, int, int, int], int]:
    """Returns the position of each array's address: in the order of ranks, inputs before results."""
    places = []
    for rank in range(batch.group.size):
        for role in ("input", "result"):
            for leaf in batch.leaves:
                number = leaf.counts[rank] if role == "input" or batch.parts is not None else 1
                places += [(role, rank, leaf.number, replica) for replica in range(number)]
    return {place: position for position, place in enumerate(places)}


def _kernel_task(task: Task, positions: dict[tuple[str, int, int, int], int]) -> KernelTask:
    """A task, over addresses."""

    def place(ref: Ref) -> AddressOffset:
        buffer = ref.buffer
        return AddressOffset(positions[buffer[:4]], ref.start * ITEM_BYTES[buffer.dtype])

    dtypes = [refs[0].buffer.dtype for refs in (task.inputs, task.outputs)]
    arrangement = arranged(task.recipe, *dtypes)
    assert not isinstance(arrangement, str), arrangement  # asked before, by peers_unavailable
    order = arrangement.positions or range(len(task.inputs))
    return KernelTask(
        arrangement.arithmetic,
        tuple([place(task.inputs[number]) for number in order]),
        tuple(map(place, task.outputs)),
        task.length,
    )
