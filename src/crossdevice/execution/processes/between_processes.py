"""Reductions, gathers and broadcasts in which all ranks of a group take part, each with its own replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from crossdevice.backends.protocol import Array, Backend, dtype_named
from crossdevice.errors import ConversionError, OptionError
from crossdevice.execution.local.batch import CheckedBatch, CheckedLeaf, Request
from crossdevice.execution.local.planning import LogOnce
from crossdevice.execution.local.scattering import Scatter
from crossdevice.execution.local.sparse import RowsBesideDense, SparseReduction
from crossdevice.execution.processes.agreement import (
    Description,
    LeafDescription,
    agreed_call,
    seconds_of,
    structure_text,
    weights_of_all_ranks,
)
from crossdevice.execution.processes.choice import parts_of, transport_of
from crossdevice.execution.processes.copied_rows import Copies
from crossdevice.execution.processes.gpu_peers import explained_peers, offered_gpu
from crossdevice.execution.processes.group_copies import CopiedLeaf, GroupCopies
from crossdevice.execution.processes.group_reduction import GroupReduction
from crossdevice.execution.processes.host_reduction import HostReduction
from crossdevice.execution.processes.reduced_batch import Prepare, ReducedBatch, Wanted
from crossdevice.execution.processes.verifying import Verification, verified_copies
from crossdevice.execution.reading.leaf_spec import Dense, LeafSpec
from crossdevice.execution.reading.shards import AllToAll, Gathering, Placed, array_of_rows, check_gather
from crossdevice.execution.reading.values import Leaf, at, one_backend, read_value
from crossdevice.execution.signature_cache import SignatureCache
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.device import Device
from crossdevice.values.distributed import IndexedSlices, component_of
from crossdevice.values.nesting import unflatten
from crossdevice.values.options import CommunicationImplementation, CommunicationOptions, whole_number
from crossdevice.values.quantities import counted
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights

SMALLEST_SHARED_BYTES = 1 << 20
"""Results that are smaller are copied: a file for each of hundreds would cost more than it saves."""


ON_DEVICE = ("peer memory", "NCCL all-reduce", "NCCL shards")

HOW = {
    "NCCL all-reduce": "the engine's own all-reduce, on the devices they are on",
    "NCCL shards": (
        "the engine's all-to-all of shards, one fused pass on the devices they are on, and the engine's "
        "all-gather"
    ),
    "staged": (
        "through memory of the host that processes share, in chunks: one is combined while others are "
        "copied from and to the GPU"
    ),
}
"""What transports on GPUs do, for `explain`."""


class BetweenProcesses:
    """The calls of one algorithm on one group; what was prepared for a signature is kept."""

    def __init__(self, group: ProcessGroup, prepare: Prepare) -> None:
        """`prepare` says how the devices of this process are reduced where that is done on them."""
        self.group = group
        self._prepare = prepare
        self._log_once = LogOnce()
        self._reductions: SignatureCache[GroupReduction] = SignatureCache()
        self._copies = Copies(group)

    def reduce(self, batch: CheckedBatch) -> list[Any]:
        """The wrapped result of each request, over the replicas of all ranks."""
        self._say_if_not_nccl(batch)
        reduction = self.reduction(batch)
        columns, outs = [leaf.arrays for leaf in batch.dense], [leaf.out for leaf in batch.dense]
        if len(batch.dense) == len(batch.all_leaves):
            return batch.wrapped(reduction.run(columns, outs, batch.weights))
        with reduction.call.agreed() as (call, of_ranks):
            exchange = reduction.exchange(call, of_ranks)
            weights = None
            if batch.factors is not None:
                counts = [replicas[0] for replicas in of_ranks]
                weights = weights_of_all_ranks(call, batch.op, batch.factors, counts)
            if batch.options.verify:
                Verification(call)  # of which the call tells from now on
            # Rows first, which are copied: `out` of a dense leaf may be written to while that travels.
            counts_of_leaves = list(zip(*of_ranks, strict=True))
            gathered = gathered_rows(call, self._copies, batch.all_leaves, counts_of_leaves, weights)
            delivery = exchange(call, columns, outs, weights)
        rows: dict[int, Any] = {number: leaf.run() for number, leaf in gathered.items()}
        left = iter(delivery())  # inputs in `out` are written to when nothing can fail any more
        return batch.wrapped(
            rows[number] if number in rows else next(left) for number in range(len(batch.all_leaves))
        )

    def reduction(self, batch: CheckedBatch) -> GroupReduction:
        """The reduction of a batch, without its arrays."""
        replicas = tuple([len(each.value.devices) for each in batch.requests for _ in each.value.leaves])
        numbers = [number for number, leaf in enumerate(batch.all_leaves) if isinstance(leaf, Dense)]
        specs = tuple([leaf.spec for leaf in batch.dense])
        work = (specs, batch.op, batch.options)
        reduced = ReducedBatch(*work, (), self.group, self._prepare, batch.is_weighted)
        return self._reduction(self._description(batch), replicas, reduced, numbers)

    def can_repeat(self, batch: CheckedBatch) -> bool:
        """True if a batch can be repeated: its arrays are dense, all on the host or all on a GPU."""
        specs = [leaf.spec for leaf in batch.dense]
        choices = [transport_of(Wanted(spec, batch.op, batch.options, self.group)) for spec in specs]
        are_on_host = all(
            spec.shares_host_memory and choice.is_on_host for spec, choice in zip(specs, choices, strict=True)
        )
        are_simple = are_on_host or {choice.name for choice in choices} in ({"peer memory"}, {"staged"})
        return are_simple and len(specs) == len(batch.all_leaves)

    def reduce_scatter(
        self,
        scatters: Sequence[Scatter],
        op: ReduceOp,
        options: CommunicationOptions,
        *,
        is_weighted: bool,
    ) -> GroupReduction:
        """The reduction of values of which each replica of each rank gets its own part."""
        if options.precision == "fast" and (is_weighted or op.is_order_statistic):
            options = dataclasses.replace(options, precision="accurate")
        leaves = [leaf for scatter in scatters for leaf in scatter.leaves]
        axes, sizes = tuple([leaf.axis for leaf in leaves]), scatters[0].sizes
        more = ", with weights" if is_weighted else ""
        more += ", verified" if options.verify else ""
        packs = f", packs of {options.bytes_per_pack} bytes" if options.bytes_per_pack else ""
        along = " and ".join(map(str, sorted(set(axes)))) + (
            "" if sizes is None else f", sizes {list(sizes)}"
        )
        description = Description(
            f"reduce_scatter {op.name} ({options.precision}{packs}{more}) along axis {along}",
            tuple(structure_text(scatter.value.structure) for scatter in scatters),
            tuple(
                LeafDescription(leaf.path, self._kind_of(spec, op, options), spec.dtype, spec.shape)
                for leaf, spec, _ in leaves
            ),
        )
        specs = tuple([leaf.spec for leaf in leaves])
        batch = ReducedBatch(specs, op, options, (), self.group, self._prepare, is_weighted)
        replicas = tuple([len(spec.devices) for spec in specs])
        return self._reduction(description, replicas, batch, range(len(specs)), axes, sizes)

    def gather(self, placed: Sequence[Placed], axis: int, options: CommunicationOptions) -> GroupCopies:
        """Checks values that are to be put end to end with those of all other ranks."""
        leaves, described = [], []
        for entry, (value, destinations, _) in enumerate(placed):
            for leaf in value.leaves:
                gathering = check_gather(leaf, value.devices, destinations, axis)
                leaves.append(CopiedLeaf(gathering.backend, gathering.axis, destinations, value.devices))
                described.append((_place(leaf, entry, len(placed)), gathering))
        # As counted from the front, which is not the same for arrays of different ranks.
        axes = sorted({leaf.axis for leaf in leaves}) or [axis]
        operation = f"gather along axis {' and '.join(map(str, axes))}"
        return self._copying(operation, placed, leaves, described, options)

    def all_to_all(self, moves: Sequence[AllToAll], options: CommunicationOptions) -> GroupCopies:
        """The parts that all ranks have for this rank's replicas."""
        leaves, described = [], []
        for entry, (value, gatherings, sizes, _) in enumerate(moves):
            for leaf, gathering in zip(value.leaves, gatherings, strict=True):
                _, backend, axis = gathering
                leaves.append(CopiedLeaf(backend, axis, value.devices, value.devices, sizes))
                described.append((_place(leaf, entry, len(moves)), gathering))
        # The number of lengths is compared, but not the lengths, which may differ.
        numbers = sorted({len(sizes) for move in moves for sizes in move.sizes if sizes is not None})
        axes = " and ".join(map(str, sorted({leaf.axis for leaf in leaves})))
        operation = f"all_to_all along axis {axes}" + "".join(f", {number} sizes" for number in numbers)
        placed = [(move.value, move.value.devices, move.out) for move in moves]
        return self._copying(operation, placed, leaves, described, options)

    def empty_results(self, spec: LeafSpec, dtype: str) -> tuple[Array, ...]:
        """Memory for a leaf's result on each destination, the first where other ranks can write to it."""
        element = dtype_named(dtype)
        is_large = spec.shares_host_memory and spec.num_elements * element.itemsize >= SMALLEST_SHARED_BYTES
        flats = [(self.group.empty if is_large else np.empty)(spec.num_elements, element)]
        flats += [np.empty(spec.num_elements, element) for _ in spec.destinations[1:]]
        return spec.adopted(flats, is_shared=False)

    def explained(self, request: Request, op: ReduceOp, options: CommunicationOptions) -> str:
        """Describes what `reduce` would send, if every process has as many replicas as this one."""
        group, here = self.group, len(request.value.devices)
        (checked,) = CheckedBatch([request], op, options).leaves
        specs = [leaf.spec for leaf in checked if isinstance(leaf, Dense)]
        all_alike = ((here,) * group.size,) * len(specs)
        batch = ReducedBatch(specs, op, options, all_alike, group, self._prepare)
        choices = [transport_of(batch.wanted(number)) for number in range(len(specs))]
        names = [choice.name for choice in choices]
        lines = [
            f"{op.name} of {counted(here, 'replica')} in each of "
            f"{counted(group.size, 'process', 'processes')} on {group.engine_name}, "
            f"precision {options.precision}; this is rank {group.rank}"
        ]
        if group.hosts is not None:
            lines.append(
                f"through shared memory within hosts ({group.hosts}), over {group.engine_name} between them: "
                f"{group.not_shared_reason}"
            )
        elif group.shared is None:
            lines.append(f"not through shared memory: {group.not_shared_reason}")
        if len(specs) < len(checked):
            lines.append(f"{len(checked) - len(specs)} sparse: all rows go to every process")
        for name in sorted(set(names)):
            how = explained_peers(group) if name == "peer memory" else HOW.get(name)
            lines.append(
                f"{counted(names.count(name), 'value')} by {name}{'' if how is None else f': {how}'}"
            )
            of_name = [number for number, choice in enumerate(choices) if choice.name == name]
            lines += dict.fromkeys(
                f"  not by {other}: {reason}"
                for number in of_name
                for other, reason in choices[number].reasons.items()
            )
            for part in parts_of(batch.of_leaves(of_name)) if choices[of_name[0]].is_on_host else ():
                assert isinstance(part.prepared, HostReduction)
                lines += part.prepared.explained()
        return "\n".join(lines)

    def value_of_rank(self, value: Any, rank: int, options: CommunicationOptions) -> Any:
        """One rank's value, on every rank; all bring one of the same structure, shapes and dtypes."""
        if whole_number("from_rank", rank) >= self.group.size:
            raise OptionError(f"from_rank must be a rank from 0 to {self.group.size - 1}, got {rank!r}")
        read = read_value(component_of(value))
        backends = [_dense_backend(leaf, read.devices) for leaf in read.leaves]
        arrays = [leaf.arrays[0] for leaf in read.leaves]
        shapes = [backend.shape_of(array) for backend, array in zip(backends, arrays, strict=True)]
        described = tuple(
            LeafDescription(leaf.path, "array", backend.dtype_of(array), shape)
            for leaf, backend, array, shape in zip(read.leaves, backends, arrays, shapes, strict=True)
        )
        operation = f"broadcast from rank {rank}" + (", verified" if options.verify else "")
        description = Description(operation, (structure_text(read.structure),), described)
        is_offered = offered_gpu(arrays, self.group) is not None
        flats = [
            backend.flat(array) if is_offered else backend.to_host(array)
            for backend, array in zip(backends, arrays, strict=True)
        ]
        with (
            agreed_call(self.group, description, (1,) * len(flats), seconds_of(options)) as (call, _),
            verified_copies(call) if options.verify else nullcontext() as verification,
        ):
            received = self._copies.of_rank(call, flats, rank)
            if verification is not None:
                verification.note_copies(
                    dict(zip([leaf.path for leaf in description.leaves], received, strict=True))
                )
        if self.group.rank == rank:
            return value
        leaves = [
            backend.from_host(flat, shape, read.devices[0])
            if isinstance(flat, np.ndarray)
            else backend.reshape(flat, shape)
            for backend, flat, shape in zip(backends, received, shapes, strict=True)
        ]
        return leaves[0] if read.structure is None else unflatten(read.structure, leaves)

    def _say_if_not_nccl(self, batch: CheckedBatch) -> None:
        """A warning, once, if NCCL was asked for and cannot be had."""
        if batch.options.implementation is not CommunicationImplementation.NCCL:
            return
        if not all(
            isinstance(leaf, Dense)
            and transport_of(Wanted(leaf.spec, batch.op, batch.options, self.group)).name in ON_DEVICE
            for leaf in batch.all_leaves
        ):
            self._log_once.warning(
                "NCCL takes PyTorch's dense tensors on GPUs, and unless precision is 'fast' one replica per "
                f"process; everything else goes through {self.group.engine_name}"
            )

    def _reduction(
        self,
        description: Description,
        replicas: tuple[int, ...],
        batch: ReducedBatch,
        numbers: Sequence[int],
        axes: tuple[int, ...] | None = None,
        sizes: tuple[int, ...] | None = None,
    ) -> GroupReduction:
        """A reduction like one before, or a new one; arguments are those of `GroupReduction`."""
        key = (description, replicas, batch.specs, batch.op, batch.options, batch.is_weighted, axes, sizes)
        known = self._reductions.get(key)
        if known is None:
            known = GroupReduction(description, replicas, batch, numbers, axes, sizes)
            self._reductions[key] = known
        return known

    def _copying(
        self,
        operation: str,
        placed: Sequence[Placed],
        leaves: Sequence[CopiedLeaf],
        described: Sequence[tuple[str, Gathering]],
        options: CommunicationOptions,
    ) -> GroupCopies:
        description = Description(
            operation + (", verified" if options.verify else ""),
            tuple(structure_text(value.structure) for value, *_ in placed),
            tuple(
                LeafDescription(path, "array", gathering.dtype, gathering.shape_with(None))
                for path, gathering in described
            ),
        )
        return GroupCopies(self.group, self._copies, description, leaves, options)

    def _kind_of(self, spec: LeafSpec, op: ReduceOp, options: CommunicationOptions) -> str:
        """Names the kind of a leaf, which ranks compare."""
        is_on_host = transport_of(Wanted(spec, op, options, self.group)).is_on_host
        return "array" if is_on_host else f"array on {spec.devices[0].type}"

    def _description(self, batch: CheckedBatch) -> Description:
        requests, op, options = batch.requests, batch.op, batch.options
        described = tuple(
            self._described(_place(leaf, entry, len(requests)), reduction, op, options)
            for entry, (request, of_request) in enumerate(zip(requests, batch.leaves, strict=True))
            for leaf, reduction in zip(request.value.leaves, of_request, strict=True)
        )
        packs = f", packs of {options.bytes_per_pack} bytes" if options.bytes_per_pack else ""
        more = ", with weights" if batch.is_weighted else ""
        more += ", verified" if options.verify else ""
        more += f", integers by {options.integers}" if options.integers != "mean" else ""
        return Description(
            f"reduce {op.name} ({options.precision}{packs}{more})",
            tuple(structure_text(request.value.structure) for request in requests),
            described,
        )

    def _described(
        self, path: str, leaf: CheckedLeaf, op: ReduceOp, options: CommunicationOptions
    ) -> LeafDescription:
        if isinstance(leaf, Dense):
            kind = self._kind_of(leaf.spec, op, options)
            kind += f" into {leaf.spec.into}" if leaf.spec.into else ""
            return LeafDescription(path, kind, leaf.spec.dtype, leaf.spec.shape)
        if isinstance(leaf, RowsBesideDense):
            raise ConversionError(
                f"a replica holds repeated rows{at(path)} beside dense arrays of others; between "
                "processes their exact sum would be rounded twice: add repeated rows up first, or use "
                "precision accurate"
            )
        backend, first = leaf.backend, leaf.slices[0]
        indices = index_dtype(leaf)
        rows = (None, *backend.shape_of(first.values)[1:])
        dtype = f"{backend.dtype_of(first.values)}, {indices} indices"
        return LeafDescription(path, "rows", dtype, rows, leaf.dense_shape)


def _place(leaf: Leaf, entry: int, num_entries: int) -> str:
    """Names a leaf in an error: by its path, and by its entry if there are several."""
    if num_entries == 1:
        return leaf.path
    return f"{leaf.path} of entry {entry}" if leaf.path else f"entry {entry}"


def _dense_backend(leaf: Leaf, devices: tuple[Device, ...]) -> Backend:
    if isinstance(leaf.arrays[0], IndexedSlices):
        raise ConversionError(
            f"broadcast between processes takes arrays, and there are IndexedSlices{leaf.at_path}; "
            "broadcast their values and indices"
        )
    return one_backend(leaf.arrays, devices, leaf.path)


def index_dtype(leaf: SparseReduction) -> str:
    """The dtype of the indices of all replicas; the wider one if they differ."""
    dtypes = {leaf.backend.dtype_of(part.indices) for part in leaf.slices}
    return dtypes.pop() if len(dtypes) == 1 else "int64"


def gathered_rows(
    call: GroupCall,
    copies: Copies,
    leaves: Sequence[CheckedLeaf],
    counts: Sequence[tuple[int, ...]],
    weights: Weights | None,
) -> dict[int, SparseReduction]:
    """Sparse leaves, by their numbers, with the rows of all ranks in the order of ranks and replicas."""
    rank = call.group.rank
    sparse = {
        number: leaf.with_weights(weights, sum(counts[number][:rank]))
        for number, leaf in enumerate(leaves)
        if isinstance(leaf, SparseReduction)
    }
    if not sparse:
        return {}
    both = [each for leaf in sparse.values() for part in leaf.slices for each in (part.values, part.indices)]
    join = _joined_on_host if offered_gpu(both, call.group) is None else _joined_on_gpu
    flats = [flat for leaf in sparse.values() for flat in join(leaf)]
    wholes = copies.gathered(call, flats)
    gathered = {}
    for order, (number, leaf) in enumerate(sparse.items()):
        backend, first = leaf.backend, leaf.slices[0]
        device = Device.parse(first.device)
        values, indices = (
            array_of_rows(whole, whole.shape, 0, backend, device)
            for whole in wholes[2 * order : 2 * order + 2]
        )
        shape = (*backend.shape_of(indices), *backend.shape_of(first.values)[1:])
        rows = type(first)(backend.reshape(values, shape), indices, leaf.dense_shape)
        gathered[number] = dataclasses.replace(
            leaf, slices=(rows,), devices=(device,), num_replicas=sum(counts[number])
        )
    return gathered


def _joined_on_host(leaf: SparseReduction) -> tuple[Array, Array]:
    """The rows of this rank, flat, and their indices."""
    values, indices = (
        np.concatenate(list(map(leaf.backend.to_host, arrays)))
        for arrays in zip(*((part.values, part.indices) for part in leaf.slices), strict=True)
    )
    return values, indices.astype(index_dtype(leaf))


def _joined_on_gpu(leaf: SparseReduction) -> tuple[Array, Array]:
    backend, device = leaf.backend, leaf.devices[0]
    values, indices = (
        backend.flat(backend.concat(arrays, 0, device))
        for arrays in zip(*((part.values, part.indices) for part in leaf.slices), strict=True)
    )
    return values, backend.cast(indices, index_dtype(leaf))
