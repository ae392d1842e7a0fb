"""Reduce-scatter: a reduction of which each replica gets one part, planned as a reduction of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from crossdevice.backends.protocol import Array
from crossdevice.errors import ConversionError
from crossdevice.execution.local.batch import CheckedBatch, read_requests
from crossdevice.execution.local.host_passes import FlatPasses
from crossdevice.execution.local.planning import Planner
from crossdevice.execution.local.prepared import PreparedReduction
from crossdevice.execution.reading.leaf_spec import Columns, Dense, LeafSpec, Outs
from crossdevice.execution.reading.outputs import out_components, read_out, wrapped
from crossdevice.execution.reading.shards import check_sum, checked_axis, cuts_of, part_lengths, read_sizes
from crossdevice.execution.reading.values import Leaf, Value, checked_spec
from crossdevice.values.device import Device
from crossdevice.values.distributed import DistributedValues, PerReplica
from crossdevice.values.nesting import unflatten
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights, check_number


class ScatteredLeaf(NamedTuple):
    """A checked leaf, and the axis along which its reduction is cut."""

    leaf: Leaf
    spec: LeafSpec
    axis: int


class _Cut(NamedTuple):
    """The parts of one leaf, as indices."""

    spec: LeafSpec
    indices: list[tuple[Any, ...]]

    def parts(self, arrays: Sequence[Array]) -> list[tuple[Array, ...]]:
        """For each part those of all replicas: views, where the library has them."""
        backend = self.spec.backend
        if self.spec.shares_host_memory and not backend.is_immutable:
            return [tuple([array[index] for array in arrays]) for index in self.indices]
        of_replicas = []
        for array, device in zip(arrays, self.spec.devices, strict=True):
            with backend.working_on(device):
                of_replicas.append([array[index] for index in self.indices])
        return list(zip(*of_replicas, strict=True))


class Scatter(NamedTuple):
    """A checked value whose reduction is cut into a part for each replica, into `out` unless that is None."""

    value: Value
    leaves: list[ScatteredLeaf]
    sizes: tuple[int, ...] | None
    out: Any

    @property
    def outs(self) -> Sequence[Any]:
        """Memory in `out` for each replica."""
        devices = self.value.devices
        return [None] * len(devices) if self.out is None else out_components(self.out, devices)

    @property
    def cuts(self) -> list[_Cut]:
        """The parts of each leaf."""
        count = len(self.value.devices)
        return [
            _Cut(spec, cuts_of(axis, part_lengths(spec.shape[axis], count, self.sizes, leaf.at_path)))
            for leaf, spec, axis in self.leaves
        ]

    def pairs(self) -> list[tuple[PerReplica, Device]]:
        """For each replica, what is reduced to its device: its own part of all replicas' arrays."""
        devices, structure = self.value.devices, self.value.structure
        of_leaves = [
            cut.parts(scattered.leaf.arrays) for scattered, cut in zip(self.leaves, self.cuts, strict=True)
        ]

        def component(number: int, replica: int) -> Any:
            leaves = [parts[number][replica] for parts in of_leaves]
            return leaves[0] if structure is None else unflatten(structure, leaves)

        return [
            (
                PerReplica.of(tuple(component(number, replica) for replica in range(len(devices))), devices),
                device,
            )
            for number, device in enumerate(devices)
        ]


def read_scatter(
    read: Value, op: ReduceOp, axis: int, sizes: Any, out: Any, factors: tuple[float, ...] | None = None
) -> Scatter:
    """Checks a value whose reduction is to be scattered; `factors` are its weights."""
    given = read_sizes(sizes)
    if factors is not None:
        check_number(factors, len(read.devices))
    leaves = []
    for leaf in read.leaves:
        if leaf.is_sparse:
            raise ConversionError(
                f"reduce_scatter takes arrays, and there are IndexedSlices{leaf.at_path}; "
                "reduce them, or convert them with to_dense"
            )
        spec = checked_spec(leaf, read.devices, read.devices, op)
        own_axis = checked_axis(axis, len(spec.shape), "reduce_scatter", leaf.at_path)
        check_sum(given, spec.shape[own_axis], leaf.at_path)
        leaves.append(ScatteredLeaf(leaf, spec, own_axis))
    return Scatter(read, leaves, given, out)


class _Parts:
    """The parts of all leaves, in the order in which they are reduced: replica by replica."""

    def __init__(self, scatters: Sequence[Scatter]) -> None:
        self._cuts: list[_Cut] = []
        self._order: list[tuple[int, int]] = []
        for scatter in scatters:
            first = len(self._cuts)
            self._cuts += scatter.cuts
            numbers = range(len(scatter.value.devices))
            self._order += [(leaf, number) for number in numbers for leaf in range(first, len(self._cuts))]

    def of_inputs(self, columns: Columns) -> list[tuple[Array, ...]]:
        """For each part those of all replicas."""
        parts = [cut.parts(arrays) for arrays, cut in zip(columns, self._cuts, strict=True)]
        return [parts[leaf][number] for leaf, number in self._order]

    def of_outs(self, outs: Outs) -> list[tuple[Array] | None]:
        """For each part its own memory."""
        return [None if (out := outs[leaf]) is None else (out[number],) for leaf, number in self._order]

    def by_leaf(self, parts: Iterable[Array]) -> list[tuple[Array, ...]]:
        """For each leaf its reduced parts."""
        results: list[list[Array]] = [[] for _ in self._cuts]
        for (leaf, _), part in zip(self._order, parts, strict=True):
            results[leaf].append(part)
        return list(map(tuple, results))


class PreparedScatter:
    """A reduce-scatter without its arrays: a reduction of one part to one device for each replica."""

    def __init__(self, parts: _Parts, prepared: PreparedReduction, flat: FlatPasses | None) -> None:
        self._parts, self._prepared, self._flat = parts, prepared, flat

    def run(self, columns: Columns, outs: Outs, weights: Weights | None = None) -> list[tuple[Array, ...]]:
        """For each leaf its result on each destination, written to `outs` where given."""
        inputs, into = self._parts.of_inputs(columns), self._parts.of_outs(outs)
        made: Sequence[Array] | None = None
        if self._flat is not None and (None not in into or not any(into)):
            written = tuple([out[0] for out in into if out is not None])
            made = self._flat.run(tuple(itertools.chain.from_iterable(inputs)), written or None, weights)
        if made is None:
            made = [part for (part,) in self._prepared.run(inputs, into, weights)]
        return self._parts.by_leaf(made)

    def flat_passes(self) -> None:
        """None: kernels read parts of arrays."""

    def bind(self, columns: Columns, outs: Columns, weights: Weights | None = None) -> Callable[[], None]:
        """A function that reduces these arrays into those of `outs` whenever it is called."""
        into = [out for out in self._parts.of_outs(outs) if out is not None]
        return self._prepared.bind(self._parts.of_inputs(columns), into, weights)


class CheckedScatter:
    """Reduce-scatters that have passed every check, as a batch of reductions: so each part is proved."""

    bytes_of_results: list[int] | None = None

    def __init__(
        self,
        scatters: Sequence[Scatter],
        op: ReduceOp,
        options: CommunicationOptions,
        *,
        in_any_order: bool,
        factors: tuple[float, ...] | None,
    ) -> None:
        pairs = [pair for scatter in scatters for pair in scatter.pairs()]
        requests, _ = read_requests(pairs, [out for scatter in scatters for out in scatter.outs])
        self.batch = CheckedBatch(requests, op, options, in_any_order=in_any_order, factors=factors)
        self.targets = [target for _, target in pairs]
        self.container: type[DistributedValues] = PerReplica
        self.weights, self._scatters = self.batch.weights, scatters
        self._parts = _Parts(scatters)
        self.places = [(len(scatter.leaves), scatter.value.devices) for scatter in scatters]
        self.dense = [
            Dense(scattered.leaf.arrays, scattered.spec, out, path=scattered.leaf.path)
            for scatter in scatters
            for scattered, out in zip(
                scatter.leaves,
                [None] * len(scatter.leaves)
                if scatter.out is None
                else read_out(scatter.out, scatter.value, scatter.value.devices),
                strict=True,
            )
        ]

    @property
    def is_dense(self) -> bool:
        """True unless parts are read in another order of axes."""
        return all(leaf.order is None for leaf in self.batch.dense)

    @property
    def check_outs(self) -> Callable[[Columns, Outs], None]:
        """The check of memory for the results of another call like this."""
        check, parts = self.batch.check_outs, self._parts
        return lambda columns, outs: check(parts.of_inputs(columns), parts.of_outs(outs))

    def prepared(self, planner: Planner) -> PreparedScatter:
        """The call without its arrays."""
        prepared, dense = self.batch.reduction(planner), self.batch.dense
        arrays = [array for leaf in dense for array in (*leaf.arrays, *(leaf.out or ()))]
        is_flat = all(
            leaf.backend is dense[0].backend and leaf.spec.shares_host_memory for leaf in dense
        ) and dense[0].backend.are_flat(arrays)
        return PreparedScatter(self._parts, prepared, prepared.flat_passes() if is_flat else None)

    def run(self, planner: Planner) -> list[Any]:
        """The wrapped parts of each value."""
        return self.wrapped_parts(self.batch.run(planner))

    def wrapped_parts(self, results: Iterable[Any]) -> list[Any]:
        """The parts of all replicas, as one value for each that was read."""
        parts = iter(results)
        return [
            per_replica([next(parts) for _ in scatter.value.devices], scatter.value.devices)
            for scatter in self._scatters
        ]

    def wrapped(self, results: Iterable[Sequence[Any]]) -> list[Any]:
        """The results of all leaves, as one value for each that was read."""
        left = iter(results)
        return [
            wrapped([next(left) for _ in range(number)], scatter.value.structure, devices, PerReplica)
            for scatter, (number, devices) in zip(self._scatters, self.places, strict=True)
        ]


def per_replica(components: Sequence[Any], devices: tuple[Device, ...]) -> Any:
    """Wraps the parts as a PerReplica, or returns the bare component of a lone replica."""
    return components[0] if len(devices) == 1 else PerReplica.of(tuple(components), devices)
