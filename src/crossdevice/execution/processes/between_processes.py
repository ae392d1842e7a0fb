"""Reductions, gathers and broadcasts in which all ranks of a group take part, each with its own replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from crossdevice.backends.protocol import Array, Backend, dtype_named
from crossdevice.errors import ConversionError, OptionError
from crossdevice.execution.local.all_to_all import AllToAll
from crossdevice.execution.local.batch import CheckedBatch, CheckedLeaf, Request
from crossdevice.execution.local.copying import component_of
from crossdevice.execution.local.gathering import Gathering, Placed, check_gather
from crossdevice.execution.local.scattering import Scatter
from crossdevice.execution.log_once import LogOnce
from crossdevice.execution.processes.agreement import (
    Description,
    LeafDescription,
    agreed_call,
    seconds_of,
    structure_text,
)
from crossdevice.execution.processes.all_to_all import exchanged_parts
from crossdevice.execution.processes.dense_call import DenseCall
from crossdevice.execution.processes.device_reduction import Prepare
from crossdevice.execution.processes.gathering import arrays_of_all_ranks, arrays_of_rank, joined
from crossdevice.execution.processes.peer_copies import offered_gpu
from crossdevice.execution.processes.peers import explained_peers, find_peers, why_no_peers
from crossdevice.execution.processes.reduction import ProcessReduction
from crossdevice.execution.processes.scattering import Prepared, reduced_parts
from crossdevice.execution.processes.sparse_rows import gathered_rows, index_dtype
from crossdevice.execution.processes.travelling import Delivery
from crossdevice.execution.processes.ways import Part, agreed_way, own_gpu, parts_of, way_of
from crossdevice.execution.processes.weighing import weights_of_all_ranks
from crossdevice.execution.reading.leaf_spec import Dense, LeafSpec
from crossdevice.execution.reading.outputs import wrapped_into
from crossdevice.execution.reading.values import Leaf, one_backend, read_value
from crossdevice.execution.signature_cache import SignatureCache
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.device import Device
from crossdevice.values.indexed_slices import IndexedSlices
from crossdevice.values.nesting import unflatten
from crossdevice.values.options import CommunicationImplementation, CommunicationOptions, whole_number
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights

SMALLEST_SHARED_BYTES = 1 << 20
"""Results that are smaller are copied: a file for each of hundreds would cost more than it saves."""


class BetweenProcesses:
    """The calls of one algorithm on one group; what was prepared for a signature is kept."""

    def __init__(self, group: ProcessGroup, prepare: Prepare) -> None:
        """`prepare` says how the devices of this process are reduced where that is done on them."""
        self.group = group
        self._prepare = prepare
        self._log_once = LogOnce()
        self._descriptions: SignatureCache[Description] = SignatureCache()
        self._parts: SignatureCache[list[Part]] = SignatureCache()
        self._scatterings: SignatureCache[Prepared] = SignatureCache()

    def reduce(self, batch: CheckedBatch) -> list[Any]:
        """The wrapped result of each request, over the replicas of all ranks."""
        self._say_if_not_nccl(batch)
        replicas = tuple(
            len(request.value.devices) for request in batch.requests for _ in request.value.leaves
        )
        description = self._description(batch)
        with agreed_call(self.group, description, replicas, seconds_of(batch.options)) as (call, of_ranks):
            counts = list(zip(*of_ranks, strict=True))
            find_peers(call, own_gpu(leaf.spec for leaf in batch.dense))
            weights = weights_of_all_ranks(call, batch.op, batch.factors, counts)
            # Rows first, which are copied: `out` of a dense leaf may be written to while that travels.
            gathered = gathered_rows(call, batch.all_leaves, counts, weights)
            deliveries = self._exchange_dense(call, batch, counts, weights)
        results: dict[int, Any] = {number: leaf.run() for number, leaf in gathered.items()}
        for numbers, delivery in deliveries:  # inputs in `out` are written to when nothing can fail any more
            results.update(zip(numbers, delivery(), strict=True))
        return batch.wrapped(results[number] for number in range(len(results)))

    def prepared(self, batch: CheckedBatch) -> DenseCall | None:
        """The known call of dense arrays, all on the host or all on a GPU; None for any other."""
        specs = tuple(leaf.spec for leaf in batch.dense)
        ways = [way_of(spec, batch.op, batch.options, self.group) for spec in specs]
        are_on_host = all(
            spec.shares_host_memory and way == "host" for spec, way in zip(specs, ways, strict=True)
        )
        are_simple = are_on_host or set(ways) in ({"peer memory"}, {"staged"})
        if batch.is_weighted or not are_simple or len(specs) < len(batch.all_leaves):
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
        """What `reduce` would send for one request, if every process has as many replicas as this one."""
        group, here = self.group, len(request.value.devices)
        (checked,) = CheckedBatch([request], op, options).leaves
        specs = [leaf.spec for leaf in checked if isinstance(leaf, Dense)]
        all_alike = (here,) * group.size
        ways = [agreed_way(spec, op, options, group, all_alike, is_weighted=False) for spec in specs]
        by_host = [spec for spec, way in zip(specs, ways, strict=True) if way == "host"]
        counts = [all_alike] * len(by_host)
        lines = [
            f"{op.name} of {here} replicas in each of {group.size} processes on {group.engine_name}, "
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
        if "engine" in ways:
            number = ways.count("engine")
            lines.append(f"{number} values: the engine's own all-reduce, on the devices they are on")
        if "shards" in ways:
            number = ways.count("shards")
            lines.append(
                f"{number} values: the engine's all-to-all of shards, one fused pass on the devices they are "
                "on, and the engine's all-gather"
            )
        if "peer memory" in ways:
            number = ways.count("peer memory")
            lines.append(f"{number} values: {explained_peers(group)}")
        elif "staged" in ways or any(spec.shared_gpu is not None for spec in by_host):
            lines.append(f"no GPU memory of other processes is used: {why_no_peers(group)}")
        if "staged" in ways:
            number = ways.count("staged")
            lines.append(
                f"{number} values: through memory of the host that processes share, in chunks: one is "
                "combined while others are copied from and to the GPU"
            )
        if by_host:
            lines += ProcessReduction(by_host, op, options, counts, group.rank).explained(group)
        return "\n".join(lines)

    def gather(
        self,
        placed: Sequence[Placed],
        axis: int,
        options: CommunicationOptions,
    ) -> list[Any]:
        """The replicas of all ranks of each value, end to end along `axis`, on its destinations here."""
        # All are checked before the first travels: a value refused later would leave other ranks waiting.
        ready = [self._checked_gather(*each, axis, options) for each in placed]
        return [gather() for gather in ready]

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
        return exchanged_parts(self.group, moves, options)

    def _checked_gather(
        self,
        value: Any,
        destinations: tuple[Device, ...],
        out: Any,
        axis: int,
        options: CommunicationOptions,
    ) -> Callable[[], Any]:
        read = read_value(value)
        gatherings = [check_gather(leaf, read.devices, destinations, axis) for leaf in read.leaves]
        arrays = [array for gathering in gatherings for array in gathering.arrays]
        gpu = offered_gpu(arrays, self.group)
        pieces = [_joined(gathering, gpu) for gathering in gatherings]
        described = tuple(
            LeafDescription(
                leaf.path,
                "array",
                gathering.backend.dtype_of(gathering.arrays[0]),
                _with_length(piece.shape, gathering.axis, None),
            )
            for leaf, gathering, piece in zip(read.leaves, gatherings, pieces, strict=True)
        )
        # As counted from the front, which is not the same for arrays of different ranks.
        axes = sorted({gathering.axis for gathering in gatherings}) or [axis]
        operation = f"gather along axis {' and '.join(map(str, axes))}"
        description = Description(operation, (structure_text(read.structure),), described)
        return lambda: wrapped_into(
            out,
            self._gather(gatherings, pieces, destinations, description, options),
            [gathering.backend for gathering in gatherings],
            read,
            destinations,
        )

    def _gather(
        self,
        gatherings: Sequence[Gathering],
        pieces: Sequence[Array],
        destinations: tuple[Device, ...],
        description: Description,
        options: CommunicationOptions,
    ) -> list[list[Array]]:
        # End to end they are one, so ranks may bring as many as they like.
        ones = (1,) * len(gatherings)
        with agreed_call(self.group, description, ones, seconds_of(options)) as (call, _):
            of_ranks = arrays_of_all_ranks(call, [piece.reshape(-1) for piece in pieces])
            lengths = _lengths_along_axes(
                call, of_ranks, pieces, [gathering.axis for gathering in gatherings]
            )
        results = []
        for number, (gathering, piece) in enumerate(zip(gatherings, pieces, strict=True)):
            parts = [
                arrays[number].reshape(_with_length(piece.shape, gathering.axis, found[number]))
                for arrays, found in zip(of_ranks, lengths, strict=True)
            ]
            whole = joined(parts, gathering.axis, gathering.backend, destinations[0])
            results.append([whole, *(gathering.backend.copy(whole, device) for device in destinations[1:])])
        return results

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
        description = Description(f"broadcast from rank {rank}", (structure_text(read.structure),), described)
        is_offered = offered_gpu(arrays, self.group) is not None
        flats = [
            backend.flat(array) if is_offered else backend.to_host(array)
            for backend, array in zip(backends, arrays, strict=True)
        ]
        with agreed_call(self.group, description, (1,) * len(flats), seconds_of(options)) as (call, _):
            received = arrays_of_rank(call, flats, rank)
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
            and way_of(leaf.spec, batch.op, batch.options, self.group) not in ("host", "staged")
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
        more += f", integers by {options.integers}" if options.integers != "mean" else ""
        key = (op, options.precision, packs, more, structures, described)
        known = self._descriptions.get(key)
        if known is None:
            operation = f"reduce {op.name} ({options.precision}{packs}{more})"
            known = Description(operation, structures, described)
            self._descriptions[key] = known
        return known

    def _exchange_dense(
        self,
        call: GroupCall,
        batch: CheckedBatch,
        counts: Sequence[tuple[int, ...]],
        weights: Weights | None,
    ) -> list[tuple[Sequence[int], Delivery]]:
        """Exchanges dense leaves; returns their numbers with functions that deliver the results."""
        dense = {number: leaf for number, leaf in enumerate(batch.all_leaves) if isinstance(leaf, Dense)}
        numbers, leaves = list(dense), list(dense.values())
        work = (tuple(leaf.spec for leaf in leaves), batch.op, batch.options)
        own_counts = tuple(counts[number] for number in numbers)
        key = (*work, own_counts, batch.is_weighted)
        parts = self._parts.get(key)
        if parts is None:
            parts = parts_of(*work, own_counts, self.group, self._prepare, is_weighted=batch.is_weighted)
            self._parts[key] = parts
        arrays, outs = [leaf.arrays for leaf in leaves], [leaf.out for leaf in leaves]
        return [
            ([numbers[leaf] for leaf in part.leaves], part.run(call, arrays, outs, weights)) for part in parts
        ]


def _place(leaf: Leaf, entry: int, requests: Sequence[Request]) -> str:
    """How an error names a leaf: by its path, and by its entry if there are several."""
    if len(requests) == 1:
        return leaf.path
    return f"{leaf.path} of entry {entry}" if leaf.path else f"entry {entry}"


def _described(
    path: str, leaf: CheckedLeaf, op: ReduceOp, options: CommunicationOptions, group: ProcessGroup
) -> LeafDescription:
    if isinstance(leaf, Dense):
        through_host = way_of(leaf.spec, op, options, group) == "host"
        kind = "array" if through_host else f"array on {leaf.spec.devices[0].type}"
        kind += f" into {leaf.spec.into}" if leaf.spec.into else ""
        return LeafDescription(path, kind, leaf.spec.dtype, leaf.spec.shape)
    backend, first = leaf.backend, leaf.slices[0]
    indices = index_dtype(leaf)
    rows = (None, *backend.shape_of(first.values)[1:])
    dtype = f"{backend.dtype_of(first.values)}, {indices} indices"
    return LeafDescription(path, "rows", dtype, rows, leaf.dense_shape)


def _joined(gathering: Gathering, gpu: Device | None) -> Array:
    """This rank's replicas end to end, contiguous, on the GPU that all are on, or else on the host."""
    backend = gathering.backend
    if gpu is not None:
        whole = gathering.arrays[0]
        if len(gathering.arrays) > 1:
            whole = backend.concat(gathering.arrays, gathering.axis, gpu)
        return backend.reshape(backend.flat(whole), backend.shape_of(whole))
    arrays = [backend.to_host(array).reshape(backend.shape_of(array)) for array in gathering.arrays]
    return np.ascontiguousarray(np.concatenate(arrays, axis=gathering.axis))


def _with_length(shape: Sequence[int], axis: int, length: Any) -> tuple[Any, ...]:
    return (*shape[:axis], length, *shape[axis + 1 :])


def _lengths_along_axes(
    call: GroupCall,
    of_ranks: Sequence[Sequence[Array]],
    pieces: Sequence[Array],
    axes: Sequence[int],
) -> list[list[int]]:
    """For each rank the lengths of its arrays along their axes; those without elements have to be told."""
    units = [math.prod(_with_length(piece.shape, axis, 1)) for piece, axis in zip(pieces, axes, strict=True)]
    if 0 not in units:
        return [[len(flat) // unit for flat, unit in zip(flats, units, strict=True)] for flats in of_ranks]
    own = np.array([piece.shape[axis] for piece, axis in zip(pieces, axes, strict=True)], np.int64)
    return [np.frombuffer(record, np.int64).tolist() for record in call.all_gather(own.tobytes())]


def _dense_backend(leaf: Leaf, devices: tuple[Device, ...]) -> Backend:
    if isinstance(leaf.arrays[0], IndexedSlices):
        raise ConversionError(
            f"broadcast between processes takes arrays, and there are IndexedSlices{leaf.at_path}; "
            "broadcast their values and indices"
        )
    return one_backend(leaf.arrays, devices, leaf.path)
