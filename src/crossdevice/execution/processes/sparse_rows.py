"""Sparse rows between processes: everybody gets the rows of all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.execution.local.batch import CheckedLeaf
from crossdevice.execution.local.sparse import SparseReduction
from crossdevice.execution.processes.gathering import arrays_of_all_ranks
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.device import Device
from crossdevice.values.weights import Weights


def index_dtype(leaf: SparseReduction) -> str:
    """The dtype of the indices of all replicas; the wider one if they differ."""
    dtypes = {leaf.backend.dtype_of(part.indices) for part in leaf.slices}
    return dtypes.pop() if len(dtypes) == 1 else "int64"


def gathered_rows(
    call: GroupCall,
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
    flats: list[NDArray[Any]] = []
    for leaf in sparse.values():
        to_host = leaf.backend.to_host
        flats.append(np.concatenate([to_host(part.values) for part in leaf.slices]))
        flats.append(
            np.concatenate([to_host(part.indices) for part in leaf.slices]).astype(index_dtype(leaf))
        )
    of_ranks = arrays_of_all_ranks(call, flats)
    gathered = {}
    for order, (number, leaf) in enumerate(sparse.items()):
        backend, first = leaf.backend, leaf.slices[0]
        values = np.concatenate([arrays[2 * order] for arrays in of_ranks])
        indices = np.concatenate([arrays[2 * order + 1] for arrays in of_ranks])
        device = Device.parse(first.device)
        shape = (indices.size, *backend.shape_of(first.values)[1:])
        rows = type(first)(
            backend.from_host(values, shape, device),
            backend.from_host(indices, indices.shape, device),
            leaf.dense_shape,
        )
        gathered[number] = dataclasses.replace(
            leaf, slices=(rows,), devices=(device,), num_replicas=sum(counts[number])
        )
    return gathered
