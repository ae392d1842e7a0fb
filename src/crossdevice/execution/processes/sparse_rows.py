"""Sparse rows between processes: everybody gets the rows of all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from crossdevice.backends.protocol import Array
from crossdevice.execution.local.batch import CheckedLeaf
from crossdevice.execution.local.sparse import SparseReduction
from crossdevice.execution.processes.copied_rows import Copies
from crossdevice.execution.processes.gpu_peers import offered_gpu
from crossdevice.execution.processes.rows import array_of_rows
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.device import Device
from crossdevice.values.weights import Weights


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
