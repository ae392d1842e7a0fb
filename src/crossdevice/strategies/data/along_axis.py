"""Reducing over replicas and over axes of their arrays at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.algorithms.collective_all_reduce import group_of
from crossdevice.backends.protocol import Array, Backend, dtype_named
from crossdevice.errors import ReduceOpError
from crossdevice.execution.local.sparse import to_dense
from crossdevice.execution.reading.shards import checked_axis
from crossdevice.execution.reading.values import Leaf, backend_of, one_backend, read_value, replica_at
from crossdevice.values.device import Device, device_of, host_device
from crossdevice.values.distributed import IndexedSlices, PerReplica
from crossdevice.values.dtypes import COMPLEXES, FLOATS, check_reducible, result_dtype
from crossdevice.values.nesting import unflatten
from crossdevice.values.reduce_op import ReduceOp

_ARRAY_FUNCTIONS = {"SUM": "sum", "MEAN": "sum", "MIN": "min", "MAX": "max", "PROD": "prod"}


def reduce_along_axis(
    op: ReduceOp, value: PerReplica, axis: int | Sequence[int], to: Device, ops: CrossDeviceOps
) -> Any:
    """Reduces all elements along the axes of all replicas to one array; each element counts once.

    Replicas may differ in length along the axes, and be empty there: a mean divides by the number of
    elements there really are. Floats are added up in float64 and rounded once.
    """
    if op.name not in _ARRAY_FUNCTIONS:
        raise ReduceOpError(
            f"{op.name} along an axis; gather the values and sort them, or reduce with axis=None"
        )
    read = read_value(value)
    leaves = [_reduced(op, leaf, read.devices, axis, to, ops) for leaf in read.leaves]
    return leaves[0] if read.structure is None else unflatten(read.structure, leaves)


def _reduced(
    op: ReduceOp,
    leaf: Leaf,
    devices: Sequence[Device],
    axis: int | Sequence[int],
    to: Device,
    ops: CrossDeviceOps,
) -> Array:
    if leaf.is_sparse:
        leaf = leaf._replace(arrays=tuple(map(_dense, leaf.arrays)))
    leaf, backend = _checked(op, leaf, devices, ops)
    dtype = backend.dtype_of(leaf.arrays[0])
    check_reducible(dtype, op, replica_at(0, devices[0], leaf.path))
    shapes = [backend.shape_of(array) for array in leaf.arrays]
    axes = _checked_axes(axis, len(shapes[0]), leaf)
    counts = [math.prod(shape[number] for number in axes) for shape in shapes]
    count = sum(counts) if group_of(ops) is None else int(ops.gather(np.array([sum(counts)]), to).sum())
    if op in (ReduceOp.MIN, ReduceOp.MAX) and not count:
        raise ReduceOpError(f"{op.name} of nothing{leaf.at_path}: no replica has elements along axis {axis}")
    # Where there is nothing at all, the first replica says what that comes to, on every process.
    counted = [replica for replica, own in enumerate(counts) if own or not (count or replica)]
    partials = [_local(op, leaf.arrays[replica], axes, backend, dtype) for replica in counted]
    places = [devices[replica] for replica in counted]
    if group_of(ops) is not None:
        if count:
            shape = [length for number, length in enumerate(shapes[0]) if number not in axes]
            partial = dtype
            if op not in (ReduceOp.MIN, ReduceOp.MAX):  # which are never wider, and not of nothing
                partial = backend.dtype_of(_local(op, leaf.arrays[0][:0], axes, backend, dtype))
            partials = _of_all_processes(partials, shape, partial, backend, to, ops)
            places = [to] * len(partials)
        ops = ops._within_process()
    over_replicas = ReduceOp.SUM if op is ReduceOp.MEAN else op
    total = ops.reduce(over_replicas, PerReplica.of(tuple(partials), tuple(places)), to)
    with backend.working_on(to):
        if op is ReduceOp.MEAN:
            total = _divided(total, count, backend)
        return _rounded(total, backend, result_dtype(dtype, op))


def _dense(array: Any) -> Any:
    return to_dense(array) if isinstance(array, IndexedSlices) else array


def _checked(
    op: ReduceOp, leaf: Leaf, devices: Sequence[Device], ops: CrossDeviceOps
) -> tuple[Leaf, Backend]:
    """Returns the leaf and its library, which differentiates the steps below; it records a sum as one step.

    Rounding to 16 bits and the way to other processes are not; then checks warn about recorded arrays.
    """
    backend = backend_of(leaf.arrays[0], 0, leaf.path)
    if backend.autograd is None:
        return leaf, one_backend(leaf.arrays, devices, leaf.path)
    cut = leaf._replace(arrays=tuple(map(backend.autograd.unrecorded, leaf.arrays)))
    is_recorded = op in (ReduceOp.SUM, ReduceOp.MEAN) and group_of(ops) is None
    if is_recorded and backend.dtype_of(leaf.arrays[0]) not in ("float16", "bfloat16"):
        return leaf, one_backend(cut.arrays, devices, leaf.path)
    return cut, one_backend(leaf.arrays, devices, leaf.path)


def _of_all_processes(
    partials: Sequence[Array],
    shape: Sequence[int],
    dtype: str,
    backend: Backend,
    to: Device,
    ops: CrossDeviceOps,
) -> list[Array]:
    """Returns the partial results of all replicas with elements, in the order of processes.

    They travel unsummed, and every process combines them as one alone would: so the bits do not
    depend on which replicas are in which process.
    """
    flats = [np.empty(0, dtype_named(dtype)), *map(backend.to_host, partials)]
    rows = ops.gather(np.concatenate(flats).reshape(len(partials), *shape), host_device(0))
    return [backend.from_host(np.array(row).reshape(-1), tuple(shape), to) for row in rows]


def _local(op: ReduceOp, array: Array, axes: tuple[int, ...], backend: Backend, dtype: str) -> Array:
    """Reduces inside one replica, on its device; operations that round keep wide results."""
    function = getattr(backend.namespace(), _ARRAY_FUNCTIONS[op.name])
    with backend.working_on(device_of(array) or host_device(0)):
        if op in (ReduceOp.MIN, ReduceOp.MAX):
            return function(backend.reshape(backend.flat(array), backend.shape_of(array)), axis=axes)
        wide = backend.cast(array, _wide(dtype))
        if op is not ReduceOp.PROD:
            return function(wide, axis=axes)
        for axis in sorted(axes, reverse=True):  # PyTorch multiplies along one axis at a time
            wide = function(wide, axis=axis)
        return wide


def _wide(dtype: str) -> str:
    return "complex128" if dtype in COMPLEXES else "float64" if dtype in FLOATS else dtype


def _divided(total: Array, count: int, backend: Backend) -> Array:
    if backend.dtype_of(total) not in (*FLOATS, *COMPLEXES):
        total = backend.cast(total, "float64")
    return total / count if count else total * math.nan


def _rounded(total: Array, backend: Backend, dtype: str) -> Array:
    found = backend.dtype_of(total)
    if found == dtype:
        return total
    return backend.round_once(total, dtype) if found in (*FLOATS, *COMPLEXES) else backend.cast(total, dtype)


def _checked_axes(axis: int | Sequence[int], rank: int, leaf: Leaf) -> tuple[int, ...]:
    asked = axis if isinstance(axis, (list, tuple)) else (axis,)
    return tuple(sorted({checked_axis(one, rank, "reduce along an axis", leaf.at_path) for one in asked}))
