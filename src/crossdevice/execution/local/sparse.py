"""Reducing IndexedSlices: rows are brought together in replica order, never added up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import HOST_MEMORY, Array, Backend, dtype_named
from crossdevice.errors import (
    ConversionError,
    DtypeMismatchError,
    LibraryMismatchError,
    MismatchError,
    ReduceOpError,
    ShapeMismatchError,
)
from crossdevice.execution.local.combining import combine
from crossdevice.execution.reading.leaf_spec import Dense, bytes_of
from crossdevice.execution.reading.outputs import delivered
from crossdevice.execution.reading.values import (
    Leaf,
    at,
    backend_of,
    check_agreement,
    one_backend,
    replica_at,
)
from crossdevice.execution.tracing import Work, recorded, transfer
from crossdevice.kernels.host.fused_pass import fused_pass
from crossdevice.values.device import Device, host_device
from crossdevice.values.distributed import IndexedSlices
from crossdevice.values.dtypes import INTEGERS, check_reducible, result_dtype
from crossdevice.values.options import Precision
from crossdevice.values.quantities import kind_text
from crossdevice.values.recipe import Recipe
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights


@dataclasses.dataclass(frozen=True)
class SparseReduction:
    """A checked leaf of IndexedSlices, ready to be reduced on one device."""

    slices: tuple[IndexedSlices, ...]
    devices: tuple[Device, ...]
    destinations: tuple[Device, ...]
    backend: Backend
    op: ReduceOp
    precision: Precision
    dense_shape: tuple[int, ...] | None
    num_replicas: int

    def with_weights(self, weights: Weights | None, first: int = 0) -> SparseReduction:
        """The same with rows times their replica's weight, divided for a mean, each rounded once.

        `first` is the number of the first replica here among those that have weights.
        """
        if weights is None:
            return self
        slices = []
        for number, (part, device) in enumerate(zip(self.slices, self.devices, strict=True), first):
            recipe = Recipe(ReduceOp.SUM, self.precision, weights=weights.of_one(number))
            with recorded(Work("reduce", "multiply rows", (device,))):
                values = self._scaled(part.values, recipe, device)
            slices.append(type(part)(values, part.indices, part.dense_shape))
        return dataclasses.replace(self, slices=tuple(slices), op=ReduceOp.SUM)

    def run(self, via: Device | None = None) -> list[Any]:
        """All rows on device `via`, else the first destination, divided for a mean, then copied to each."""
        at = via or self.destinations[0]
        num_bytes = sum([self._bytes_of(part.values, part.indices) for part in self.slices])
        devices = (*self.devices, at, *self.destinations)
        with recorded(Work("reduce", f"IndexedSlices {self.op.name}", devices, num_bytes, "rows end to end")):
            memory = self.backend.memory_of(at)
            parts = [
                (part.values, part.indices)
                if self.backend.memory_of(source) == memory
                else self._copied(part.values, part.indices, source, at)
                for part, source in zip(self.slices, self.devices, strict=True)
            ]
            with recorded(Work("pack", "join rows", (at,))):
                values, indices = self._joined(parts, at)
            if self.op is ReduceOp.MEAN:
                with recorded(Work("reduce", "divide rows", (at,))):
                    values = self._scaled(values, Recipe(ReduceOp.SUM, self.precision, self.num_replicas), at)
            copies = [self._copied(values, indices, at, device) for device in self.destinations]
            with recorded(Work("unpack", "results as slices", self.destinations)):
                return [self.slices[0].with_parts(*pair, self.dense_shape) for pair in copies]

    def _copied(self, values: Array, indices: Array, source: Device, target: Device) -> tuple[Array, Array]:
        with recorded(transfer(source, target, self._bytes_of(values, indices))):
            return self.backend.copy(values, target), self.backend.copy(indices, target)

    def _joined(self, parts: Sequence[tuple[Array, Array]], at: Device) -> tuple[Array, Array]:
        backend = self.backend
        indices = [part for _, part in parts]
        if len({backend.dtype_of(part) for part in indices}) > 1:
            indices = [backend.cast(part, "int64") for part in indices]
        return backend.concat([part for part, _ in parts], 0, at), backend.concat(indices, 0, at)

    def _scaled(self, values: Array, recipe: Recipe, at: Device) -> Array:
        backend = self.backend
        dtype = result_dtype(backend.dtype_of(values), self.op, recipe.weights is not None)
        flat = combine(backend, [backend.flat(values)], recipe, dtype, at)
        return backend.reshape(flat, backend.shape_of(values))

    def _bytes_of(self, values: Array, indices: Array) -> int:
        return bytes_of(self.backend, values) + bytes_of(self.backend, indices)


def check_sparse(
    leaf: Leaf,
    devices: tuple[Device, ...],
    destinations: tuple[Device, ...],
    op: ReduceOp,
    precision: Precision,
) -> SparseReduction:
    """Refuses slices that do not fit together."""
    _check_op(op, leaf)
    slices: tuple[IndexedSlices, ...] = leaf.arrays
    backend = _check_parts(slices, devices, leaf.path, destinations)
    check_reducible(backend.dtype_of(slices[0].values), op, replica_at(0, devices[0], leaf.path))
    rows = [backend.shape_of(part.values)[1:] for part in slices]
    check_agreement(rows, devices, "rows of shape", ShapeMismatchError, leaf.path)
    shapes = [part.dense_shape for part in slices]
    check_agreement(shapes, devices, "dense_shape", ShapeMismatchError, leaf.path)
    for replica, (part, device) in enumerate(zip(slices, devices, strict=True)):
        # Elsewhere it would have to wait for what computes the indices.
        if part.dense_shape is not None and backend.memory_of(device) == HOST_MEMORY:
            where = replica_at(replica, device, leaf.path)
            _check_range(backend.host_view(part.indices), part.dense_shape, where)
    shape = next((shape for shape in shapes if shape is not None), None)
    return SparseReduction(slices, devices, destinations, backend, op, precision, shape, len(slices))


def densified(leaf: Leaf, devices: Sequence[Device], op: ReduceOp, precision: Precision) -> Leaf:
    """A leaf that some replicas hold sparse and some dense, made dense everywhere."""
    _check_op(op, leaf)
    dense = next((array for array in leaf.arrays if not isinstance(array, IndexedSlices)), None)
    arrays: list[Array] = []
    for replica, array in enumerate(leaf.arrays):
        if isinstance(array, IndexedSlices):
            where = replica_at(replica, devices[replica], leaf.path)
            shape = array.dense_shape or (None if dense is None else tuple(dense.shape))
            arrays.append(to_dense(IndexedSlices(array.values, array.indices, shape), where, precision))
        else:
            arrays.append(array)
    return Leaf(tuple(arrays), leaf.path)


@dataclasses.dataclass(frozen=True)
class RowsBesideDense:
    """A checked leaf of repeated rows and dense arrays, whose sums are not rounded before they are complete.

    `dense` has the rows of each replica added up, and rounded: right wherever no row is repeated.
    """

    leaf: Leaf
    dense: Dense
    op: ReduceOp
    weights: Weights | None = None

    @property
    def backend(self) -> Backend:
        """The library of its arrays."""
        return self.dense.backend

    def with_weights(self, weights: Weights | None) -> RowsBesideDense:
        """The same with weights of its replicas."""
        return self if weights is None else dataclasses.replace(self, weights=weights)

    def run(self, via: Device | None = None) -> list[Any]:  # noqa: ARG002 - all of it is done on the host
        """The result on each destination, or in `out`."""
        spec = self.dense.spec
        num_bytes = spec.num_bytes * len(spec.devices)
        with recorded(Work("reduce", "repeated rows", (*spec.devices, *spec.destinations), num_bytes)):
            flat = self._summed()
            results = [
                self.backend.copy(self.backend.from_host(flat, spec.shape, host_device(0)), device)
                for device in spec.destinations
            ]
            return list(delivered(results, self.dense.out, self.backend))

    def _summed(self) -> NDArray[Any]:
        spec, backend = self.dense.spec, self.backend
        into = dtype_named(spec.result_dtype(self.op, is_weighted=self.weights is not None))
        num_replicas = len(self.leaf.arrays)
        weights = self.weights or Weights(
            (1.0,) * num_replicas, (1.0,) * num_replicas if self.op is ReduceOp.MEAN else None
        )
        flats = [backend.to_host(array) for array in self.dense.arrays]
        result = np.empty(flats[0].size, into)
        fused_pass(flats, [result], Recipe(ReduceOp.SUM, "exact", weights=weights))
        rows = [self._rows_of(replica, flat) for replica, flat in enumerate(flats)]
        repeated = [numbers[1:][numbers[1:] == numbers[:-1]] for _, numbers in rows]
        places = np.unique(np.concatenate(repeated))
        firsts, counts = (
            np.stack([np.searchsorted(numbers, places, side) for _, numbers in rows])
            for side in ("left", "right")
        )
        counts -= firsts
        lines = result.reshape(spec.shape[0], -1)
        kinds, kind_of = np.unique(counts, axis=1, return_inverse=True)
        for kind, numbers in enumerate(kinds.T.tolist()):
            some = np.flatnonzero(kind_of.reshape(-1) == kind)
            terms, factors = [], []
            for (values, _), first, number, factor in zip(
                rows, firsts, numbers, weights.factors, strict=True
            ):
                terms += [values[first[some] + each].reshape(-1) for each in range(number)]
                factors += [factor] * number
            total = np.empty(terms[0].size, into)
            recipe = Recipe(ReduceOp.SUM, "exact", weights=Weights(tuple(factors), weights.all_factors))
            fused_pass(terms, [total], recipe)
            lines[places[some]] = total.reshape(some.size, -1) + into.type(0)  # zeros elsewhere are positive
        return result

    def _rows_of(self, replica: int, flat: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """A replica's rows in the order of their numbers, and these; all rows of a dense one."""
        array, spec = self.leaf.arrays[replica], self.dense.spec
        if not isinstance(array, IndexedSlices):
            return flat.reshape(spec.shape[0], -1), np.arange(spec.shape[0])
        numbers = self.backend.to_host(array.indices).reshape(-1).astype(np.int64)
        order = np.argsort(numbers, kind="stable")
        rows = self.backend.to_host(array.values).reshape(numbers.size, flat.size // spec.shape[0])
        return rows[order], numbers[order]


def has_repeated_rows(leaf: Leaf) -> bool:
    """True if a replica holds several rows of one number."""
    for array in leaf.arrays:
        if isinstance(array, IndexedSlices):
            numbers = backend_of(array.indices, 0).to_host(array.indices)
            if np.unique(numbers).size < numbers.size:
                return True
    return False


def _check_op(op: ReduceOp, leaf: Leaf) -> None:
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise ReduceOpError(
            f"{op.name} is not defined for IndexedSlices{leaf.at_path}; only SUM and MEAN are"
        )


def to_dense(slices: IndexedSlices, where: str = "IndexedSlices", precision: Precision = "accurate") -> Array:
    """The whole array: rows at their indices, repeated ones added, zeros elsewhere.

    Repeated rows add up to one of the array's dtype, with the given precision.
    """
    if not isinstance(slices, IndexedSlices):
        raise ConversionError(f"to_dense takes IndexedSlices, got {kind_text(slices)}")
    if slices.dense_shape is None:
        raise ConversionError(f"{where} has no dense_shape, so it cannot be made dense")
    device = Device.parse(slices.device)
    backend = _check_parts((slices,), (device,), where)
    rows = backend.shape_of(slices.values)[1:]
    if slices.dense_shape[1:] != rows:
        raise ShapeMismatchError(
            f"{where} has rows of shape {rows}; its dense_shape {slices.dense_shape} has others"
        )
    numbers = backend.to_host(slices.indices).reshape(-1)
    _check_range(numbers, slices.dense_shape, where)
    dtype = backend.dtype_of(slices.values)
    if precision == "fast" or dtype in INTEGERS or np.unique(numbers).size == numbers.size:
        return backend.scatter_rows(slices.values, slices.indices, slices.dense_shape)
    host = backend.to_host(slices.values).reshape(numbers.size, -1)
    dense = _added_rows(host, numbers, slices.dense_shape, precision)
    made = backend.from_host(dense.reshape(-1), slices.dense_shape, device)
    return made if device.is_host else backend.copy(made, device)


def _added_rows(
    rows: NDArray[Any], indices: NDArray[Any], shape: tuple[int, ...], precision: Precision
) -> NDArray[Any]:
    """Rows at their indices; those of one index are combined as if each were a replica's."""
    dense = np.zeros((shape[0], rows.shape[1]), rows.dtype)
    order = np.argsort(indices, kind="stable")
    places, starts, counts = np.unique(indices[order], return_index=True, return_counts=True)
    lengths = np.int64(1) << np.ceil(np.log2(counts)).astype(np.int64)
    # Indices that are repeated about equally often together: missing rows are -0, which changes no sum.
    for length in np.unique(lengths).tolist():
        some = np.flatnonzero(lengths == length)
        columns = []
        for number in range(length):
            has_more = number < counts[some]
            taken = rows[order[np.where(has_more, starts[some] + number, 0)]]
            taken[~has_more] = -0.0
            columns.append(taken.reshape(-1))
        total = np.empty_like(columns[0])
        fused_pass(columns, [total], Recipe(ReduceOp.SUM, precision))
        dense[places[some]] += total.reshape(some.size, -1)
    return dense


def _check_range(numbers: NDArray[Any], dense_shape: tuple[int, ...], where: str) -> None:
    outside = numbers[(numbers < 0) | (numbers >= dense_shape[0])]
    if outside.size:
        raise MismatchError(
            f"{where} has an index outside of its {dense_shape[0]} rows: {outside[0]}; rows count from 0"
        )


def _check_parts(
    slices: Sequence[IndexedSlices], devices: Sequence[Device], path: str, destinations: Sequence[Device] = ()
) -> Backend:
    values = [part.values for part in slices]
    backend = one_backend(values, devices, path, destinations)
    of_indices = one_backend([part.indices for part in slices], devices, path)
    if of_indices.name != backend.name:
        raise LibraryMismatchError(
            f"replica 0 ({devices[0]}) has values of {backend.name} and indices of "
            f"{of_indices.name}{at(path)}"
        )
    check_agreement([backend.dtype_of(a) for a in values], devices, "dtype", DtypeMismatchError, path)
    for replica, part in enumerate(slices):
        where = replica_at(replica, devices[replica], path)
        index_dtype = backend.dtype_of(part.indices)
        if index_dtype not in ("int32", "int64"):
            raise ConversionError(f"{where} has indices of dtype {index_dtype}; expected int32 or int64")
        rows, numbers = backend.shape_of(part.values)[:1], backend.shape_of(part.indices)
        if rows != numbers or len(numbers) != 1:
            raise ShapeMismatchError(
                f"{where} has values with leading shape {rows} and indices of shape {numbers}; expected one "
                "index for each row"
            )
    return backend
