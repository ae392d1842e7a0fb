"""Reductions of which each replica of each rank gets its own part, exchanged through the host's memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from crossdevice.backends.protocol import Array
from crossdevice.execution.local.scattering import ScatteredLeaf
from crossdevice.execution.processes.packs import PackedPiece
from crossdevice.execution.processes.reduction import Flat, ProcessReduction
from crossdevice.execution.processes.rows import array_of_rows
from crossdevice.execution.processes.travelling import Delivery
from crossdevice.execution.reading.leaf_spec import Columns, Outs
from crossdevice.execution.reading.outputs import delivered
from crossdevice.kernels.host.resources.pool import result_pool
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights


class LeafParts:
    """A leaf, its elements in the order of rows along an axis, so that each part is a range of them.

    `lengths` has the length of the part of each replica there is, `counts` the replicas of each rank.
    """

    def __init__(
        self, leaf: ScatteredLeaf, lengths: Sequence[int], counts: tuple[int, ...], rank: int
    ) -> None:
        self.spec, self.axis, self.counts = leaf.spec, leaf.axis, counts
        shape = leaf.spec.shape
        rest = (*shape[: leaf.axis], *shape[leaf.axis + 1 :])
        self.edges = [math.prod(rest) * row for row in itertools.accumulate(lengths, initial=0)]
        """The elements at which the parts of all replicas begin and end."""
        own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        self.own_ranges = list(itertools.pairwise(self.edges))[own]
        self.own_rows = [(length, *rest) for length in lengths[own]]
        """The shape of each of this rank's parts, as rows along the axis."""
        self.is_even = leaf.axis == 0 and len(set(lengths)) == 1

    @property
    def own_shapes(self) -> list[tuple[int, ...]]:
        """The shape of each of this rank's parts."""
        return [(*rest[: self.axis], length, *rest[self.axis :]) for length, *rest in self.own_rows]


class ProcessReduceScatter(ProcessReduction):
    """A reduction of dense leaves of which every replica of every rank gets its own part."""

    def __init__(
        self,
        leaves: Sequence[LeafParts],
        op: ReduceOp,
        options: CommunicationOptions,
        rank: int,
        *,
        is_weighted: bool = False,
    ) -> None:
        self._leaves = leaves
        super().__init__(
            [leaf.spec for leaf in leaves],
            op,
            options,
            [leaf.counts for leaf in leaves],
            rank,
            is_weighted=is_weighted,
            edges=[leaf.edges for leaf in leaves],
        )

    def run(self, call: GroupCall, columns: Columns, outs: Outs, weights: Weights | None = None) -> Delivery:
        """Exchanges everything with the other ranks; `outs` are written to by whoever calls the delivery."""
        parts = [
            [result_pool.empty(stop - start, dtype) for start, stop in leaf.own_ranges]
            for leaf, dtype in zip(self._leaves, self._dtypes, strict=True)
        ]
        for pack in self._packs:
            # By their first elements, which tell parts apart: those without elements are in no piece.
            targets = {
                (leaf, start * pack.per_element): part.view(pack.result)
                for leaf, _, _ in pack.leaves
                for (start, _), part in zip(self._leaves[leaf].own_ranges, parts[leaf], strict=True)
                if part.size
            }

            def target_of(piece: PackedPiece, targets: dict[tuple[int, int], Flat] = targets) -> list[Flat]:
                return [targets[piece.leaf, piece.start]]

            self._reduce_shard(call, pack, columns, target_of, weights)
        return lambda: [
            delivered(_placed(leaf, flats), out, leaf.spec.backend)
            for leaf, flats, out in zip(self._leaves, parts, outs, strict=True)
        ]

    def _views(self, leaf: int, arrays: Sequence[Array], dtype: np.dtype[Any]) -> list[Flat]:
        views, axis = super()._views(leaf, arrays, dtype), self._leaves[leaf].axis
        if axis == 0:
            return views
        shape = self._specs[leaf].shape
        # One or, of a complex number, two of the pack's elements stand for one of the array's.
        shape = (*shape, views[0].size // max(math.prod(shape), 1))
        return [np.moveaxis(view.reshape(shape), axis, 0).reshape(-1) for view in views]


def _placed(leaf: LeafParts, flats: Sequence[Flat]) -> list[Array]:
    """Parts as arrays on the devices of their replicas."""
    backend, devices = leaf.spec.backend, leaf.spec.destinations
    return [
        array_of_rows(flat, shape, leaf.axis, backend, device)
        for flat, shape, device in zip(flats, leaf.own_rows, devices, strict=True)
    ]
