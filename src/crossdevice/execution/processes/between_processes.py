"""Reductions, gathers and broadcasts in which all ranks of a group take part, each with its own replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from crossdevice.backends.protocol import Array, Backend, dtype_named
from crossdevice.errors import ConversionError, OptionError
from crossdevice.execution.local.batch import CheckedBatch, CheckedLeaf, Request
from crossdevice.execution.local.scattering import Scatter
from crossdevice.execution.local.sparse import RowsBesideDense
from crossdevice.execution.log_once import LogOnce
from crossdevice.execution.processes.agreement import (
    Description,
    LeafDescription,
    agreed_call,
    seconds_of,
    structure_text,
    weights_of_all_ranks,
)
from crossdevice.execution.processes.choice import Part, courses_of, own_gpu, parts_of, transport_of
from crossdevice.execution.processes.copied_rows import Copies
from crossdevice.execution.processes.dense_call import DenseCall
from crossdevice.execution.processes.exchanged_parts import exchanged_parts
from crossdevice.execution.processes.gpu_peers import explained_peers, find_peers, offered_gpu
from crossdevice.execution.processes.host_reduction import HostReduction
from crossdevice.execution.processes.programs import Delivery
from crossdevice.execution.processes.reduced_batch import Prepare, ReducedBatch, Wanted
from crossdevice.execution.processes.reduced_parts import PreparedParts, reduced_parts
from crossdevice.execution.processes.rows import Rows, array_of_rows, joined_rows
from crossdevice.execution.processes.sparse_rows import gathered_rows, index_dtype
from crossdevice.execution.processes.task_agreement import Course
from crossdevice.execution.processes.verifying import (
    Verification,
    check_written,
    verified_copies,
)
from crossdevice.execution.reading.gathers import AllToAll, Placed, check_gather
from crossdevice.execution.reading.leaf_spec import Columns, Dense, LeafSpec
from crossdevice.execution.reading.outputs import wrapped_into
from crossdevice.execution.reading.values import Leaf, Value, at, one_backend, read_value
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
        self._descriptions: SignatureCache[Description] = SignatureCache()
        self._parts: SignatureCache[list[Part]] = SignatureCache()
        self._copies = Copies(group)
        self._scatterings: SignatureCache[PreparedParts] = SignatureCache()

    def reduce(self, batch: CheckedBatch) -> list[Any]:
        """The wrapped result of each request, over the replicas of all ranks."""
        self._say_if_not_nccl(batch)
        replicas = tuple(
            len(request.value.devices) for request in batch.requests for _ in request.value.leaves
        )
        description = self._description(batch)

        def courses(call: GroupCall, of_ranks: Sequence[Sequence[int]]) -> list[Course]:
            find_peers(call, own_gpu(leaf.spec for leaf in batch.dense))
            *_, parts = self._dense_parts(batch, list(zip(*of_ranks, strict=True)))
            return courses_of(parts)

        seconds = seconds_of(batch.options)
        with agreed_call(self.group, description, replicas, seconds, courses) as (call, of_ranks):
            counts = list(zip(*of_ranks, strict=True))
            verification = Verification(call) if batch.options.verify else None
            find_peers(call, own_gpu(leaf.spec for leaf in batch.dense))
            weights = weights_of_all_ranks(call, batch.op, batch.factors, counts)
            # Rows first, which are copied: `out` of a dense leaf may be written to while that travels.
            gathered = gathered_rows(call, self._copies, batch.all_leaves, counts, weights)
            if verification is not None:
                deliveries = [self._verified(call, verification, batch, counts, weights)]
            else:
                deliveries = self._exchange_dense(call, batch, counts, weights)
        results: dict[int, Any] = {number: leaf.run() for number, leaf in gathered.items()}
        for numbers, delivery in deliveries:  # inputs in `out` are written to when nothing can fail any more
            results.update(zip(numbers, delivery(), strict=True))
        return batch.wrapped(results[number] for number in range(len(results)))

    def prepared(self, batch: CheckedBatch) -> DenseCall | None:
        """The known call of dense arrays, all on the host or all on a GPU; None for any other."""
        specs = tuple(leaf.spec for leaf in batch.dense)
        choices = [transport_of(Wanted(spec, batch.op, batch.options, self.group)) for spec in specs]
        are_on_host = all(
            spec.shares_host_memory and choice.is_on_host for spec, choice in zip(specs, choices, strict=True)
        )
        are_simple = are_on_host or {choice.name for choice in choices} in ({"peer memory"}, {"staged"})
        if batch.options.verify or batch.is_weighted or not are_simple or len(specs) < len(batch.all_leaves):
            return None
        description, seconds = self._description(batch), seconds_of(batch.options)
        return DenseCall(self.group, description, seconds, specs, batch.op, batch.options, self._prepare)

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

    def gather(self, gathers: Sequence[PreparedGather], placed: Sequence[Placed]) -> list[Any]:
        """The replicas of all ranks of each value, end to end on its destinations here."""
        rows = [
            gather.rows([leaf.arrays for leaf in value.leaves])
            for gather, (value, *_) in zip(gathers, placed, strict=True)
        ]
        return [
            wrapped_into(out, gather.run(own), [backend for backend, _ in gather.leaves], value, destinations)
            for gather, own, (value, destinations, out) in zip(gathers, rows, placed, strict=True)
        ]

    def reduce_scatter(
        self,
        scatters: Sequence[Scatter],
        op: ReduceOp,
        options: CommunicationOptions,
        factors: tuple[float, ...] | None,
    ) -> list[Any]:
        """The parts of this rank's replicas, of values reduced over the replicas of all ranks."""
        return reduced_parts(self.group, scatters, op, options, factors, self._scatterings, self._prepare)

    def all_to_all(self, moves: Sequence[AllToAll], options: CommunicationOptions) -> list[Any]:
        """The parts that all ranks have for this rank's replicas."""
        return exchanged_parts(self.group, self._copies, moves, options)

    def prepared_gather(
        self, read: Value, destinations: tuple[Device, ...], axis: int, options: CommunicationOptions
    ) -> PreparedGather:
        """Checks a value that is to be put end to end with those of all other ranks."""
        gatherings = [check_gather(leaf, read.devices, destinations, axis) for leaf in read.leaves]
        described = tuple(
            LeafDescription(leaf.path, "array", gathering.dtype, gathering.shape_with(None))
            for leaf, gathering in zip(read.leaves, gatherings, strict=True)
        )
        # As counted from the front, which is not the same for arrays of different ranks.
        axes = sorted({gathering.axis for gathering in gatherings}) or [axis]
        verified = ", verified" if options.verify else ""
        operation = f"gather along axis {' and '.join(map(str, axes))}{verified}"
        description = Description(operation, (structure_text(read.structure),), described)
        leaves = [(gathering.backend, gathering.axis) for gathering in gatherings]
        return PreparedGather(self.group, self._copies, description, leaves, destinations, options)

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
            verified_copies(call, options) as verification,
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

    def _description(self, batch: CheckedBatch) -> Description:
        requests, op, options = batch.requests, batch.op, batch.options
        described = tuple(
            _described(_place(leaf, entry, requests), reduction, op, options, self.group)
            for entry, (request, of_request) in enumerate(zip(requests, batch.leaves, strict=True))
            for leaf, reduction in zip(request.value.leaves, of_request, strict=True)
        )
        packs = f", packs of {options.bytes_per_pack} bytes" if options.bytes_per_pack else ""
        structures = tuple(structure_text(request.value.structure) for request in requests)
        more = ", with weights" if batch.is_weighted else ""
        more += ", verified" if options.verify else ""
        more += f", integers by {options.integers}" if options.integers != "mean" else ""
        key = (op, options.precision, packs, more, structures, described)
        known = self._descriptions.get(key)
        if known is None:
            operation = f"reduce {op.name} ({options.precision}{packs}{more})"
            known = Description(operation, structures, described)
            self._descriptions[key] = known
        return known

    def _verified(
        self,
        call: GroupCall,
        verification: Verification,
        batch: CheckedBatch,
        counts: Sequence[tuple[int, ...]],
        weights: Weights | None,
    ) -> tuple[Sequence[int], Delivery]:
        """The same for a verified call: inputs are as they were until all ranks have found all well."""
        numbers, leaves, parts = self._dense_parts(batch, counts)
        results: dict[int, tuple[Array, ...]] = {}
        is_written: dict[int, bool] = {}
        for part in parts:
            (number,) = part.leaves
            leaf, prepared = leaves[number], part.prepared
            assert isinstance(prepared, HostReduction)
            # Large ones are written where they are to be: to copy them would take as long as to check them.
            is_direct = prepared.writes_directly([leaf.arrays], leaf.out)
            outs = [leaf.out if is_direct else None]
            columns = [leaf.arrays]
            results[number] = prepared.run_verified(call, verification, leaf.path, columns, outs, weights)
            is_written[number] = is_direct
        verification.conclude()

        def deliver() -> list[tuple[Array, ...]]:
            delivered = []
            for number, leaf in enumerate(leaves):
                if leaf.out is None or is_written[number]:
                    delivered.append(results[number])
                    continue
                for target, result in zip(leaf.out, results[number], strict=True):
                    leaf.backend.write(target, result)
                check_written(leaf.path, leaf.out, results[number])
                delivered.append(tuple(leaf.out))
            return delivered

        return numbers, deliver

    def _exchange_dense(
        self,
        call: GroupCall,
        batch: CheckedBatch,
        counts: Sequence[tuple[int, ...]],
        weights: Weights | None,
    ) -> list[tuple[Sequence[int], Delivery]]:
        """Exchanges dense leaves; returns their numbers with functions that deliver the results."""
        numbers, leaves, parts = self._dense_parts(batch, counts)
        arrays, outs = [leaf.arrays for leaf in leaves], [leaf.out for leaf in leaves]
        return [
            ([numbers[leaf] for leaf in part.leaves], part.run(call, arrays, outs, weights)) for part in parts
        ]

    def _dense_parts(
        self, batch: CheckedBatch, counts: Sequence[tuple[int, ...]]
    ) -> tuple[list[int], list[Dense], list[Part]]:
        """The numbers of dense leaves, the leaves, and how they go."""
        dense = {number: leaf for number, leaf in enumerate(batch.all_leaves) if isinstance(leaf, Dense)}
        numbers, leaves = list(dense), list(dense.values())
        work = (tuple(leaf.spec for leaf in leaves), batch.op, batch.options)
        own_counts = tuple(counts[number] for number in numbers)
        key = (*work, own_counts, batch.is_weighted)
        parts = self._parts.get(key)
        if parts is None:
            reduced = ReducedBatch(*work, own_counts, self.group, self._prepare, batch.is_weighted)
            parts = self._parts[key] = parts_of(reduced)
        return numbers, leaves, parts


class PreparedGather(NamedTuple):
    """A gather of one value over the replicas of all ranks, without its arrays."""

    group: ProcessGroup
    copies: Copies
    description: Description
    leaves: Sequence[tuple[Backend, int]]
    """The library of each leaf, and the axis along which its arrays are put end to end."""
    destinations: tuple[Device, ...]
    options: CommunicationOptions

    def rows(self, columns: Columns) -> list[Rows]:
        """The arrays of each leaf, as rows that travel."""
        gpu = offered_gpu([array for arrays in columns for array in arrays], self.group)
        return [
            joined_rows(tuple(arrays), axis, backend, gpu)
            for arrays, (backend, axis) in zip(columns, self.leaves, strict=True)
        ]

    def run(self, rows: Sequence[Rows]) -> list[tuple[Array, ...]]:
        """For each leaf the rows of all ranks, on each destination."""
        # End to end they are one, so ranks may bring as many as they like.
        ones, seconds = (1,) * len(rows), seconds_of(self.options)
        with (
            agreed_call(self.group, self.description, ones, seconds) as (call, _),
            verified_copies(call, self.options) as verification,
        ):
            wholes = self.copies.gathered(call, rows)
            if verification is not None:
                verification.note_copies(
                    dict(zip([leaf.path for leaf in self.description.leaves], wholes, strict=True))
                )
        results: list[tuple[Array, ...]] = []
        for (backend, axis), whole in zip(self.leaves, wholes, strict=True):
            first = array_of_rows(whole, whole.shape, axis, backend, self.destinations[0])
            results.append((first, *(backend.copy(first, device) for device in self.destinations[1:])))
        return results


def _place(leaf: Leaf, entry: int, requests: Sequence[Request]) -> str:
    """Names a leaf in an error: by its path, and by its entry if there are several."""
    if len(requests) == 1:
        return leaf.path
    return f"{leaf.path} of entry {entry}" if leaf.path else f"entry {entry}"


def _described(
    path: str, leaf: CheckedLeaf, op: ReduceOp, options: CommunicationOptions, group: ProcessGroup
) -> LeafDescription:
    if isinstance(leaf, Dense):
        choice = transport_of(Wanted(leaf.spec, op, options, group))
        kind = "array" if choice.is_on_host else f"array on {leaf.spec.devices[0].type}"
        kind += f" into {leaf.spec.into}" if leaf.spec.into else ""
        return LeafDescription(path, kind, leaf.spec.dtype, leaf.spec.shape)
    if isinstance(leaf, RowsBesideDense):
        raise ConversionError(
            f"a replica holds repeated rows{at(path)} beside dense arrays of others; between processes their "
            "exact sum would be rounded twice: add repeated rows up first, or use precision accurate"
        )
    backend, first = leaf.backend, leaf.slices[0]
    indices = index_dtype(leaf)
    rows = (None, *backend.shape_of(first.values)[1:])
    dtype = f"{backend.dtype_of(first.values)}, {indices} indices"
    return LeafDescription(path, "rows", dtype, rows, leaf.dense_shape)


def _dense_backend(leaf: Leaf, devices: tuple[Device, ...]) -> Backend:
    if isinstance(leaf.arrays[0], IndexedSlices):
        raise ConversionError(
            f"broadcast between processes takes arrays, and there are IndexedSlices{leaf.at_path}; "
            "broadcast their values and indices"
        )
    return one_backend(leaf.arrays, devices, leaf.path)
