"""Reductions of arrays on GPUs of which each replica of each rank gets its own part, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from crossdevice.backends.protocol import Array
from crossdevice.execution.processes.peer_reduction import PeerReduction, Piece
from crossdevice.execution.processes.scattered_reduction import LeafParts
from crossdevice.execution.processes.staged_reduction import StagedReduction, Target
from crossdevice.execution.processes.travelling import Delivery
from crossdevice.execution.reading.leaf_spec import Columns, Dense, Outs
from crossdevice.execution.reading.outputs import delivered
from crossdevice.execution.reading.overlaps import are_apart
from crossdevice.kernels.cuda.task import AddressOffset
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights


class PeerReduceScatter(PeerReduction):
    """Parts summed straight from the memory of all ranks, each written to the rank whose it is.

    A rank that works for several on its GPU sums the parts of all of them, in one launch.
    """

    def __init__(
        self,
        leaves: Sequence[LeafParts],
        op: ReduceOp,
        options: CommunicationOptions,
        group: ProcessGroup,
    ) -> None:
        self._leaves = leaves
        counts = [leaf.counts for leaf in leaves]
        super().__init__([leaf.spec for leaf in leaves], op, options, counts, group)

    def run(self, call: GroupCall, columns: Columns, outs: Outs, weights: Weights | None = None) -> Delivery:
        """Reduces with the other ranks; `outs` that overlap an input are written to by the delivery."""
        assert weights is None, "weights go through the host"
        with self._tensors.on_device(self._place):
            inputs = self._tensors.tensors_of(
                [
                    row
                    for leaf, column in zip(self._leaves, columns, strict=True)
                    for row in _rows(leaf, column)
                ]
            )
            buffers = outs if are_apart(list(map(Dense, columns, self._specs, outs))) else [None] * len(outs)
            parts = list(map(self._own_parts, range(len(buffers)), buffers))
            arrays = [*inputs, *(part for of_leaf in parts for part in of_leaf)]
            addresses = self._tensors.addresses_of(arrays)
            # Parts without elements are nowhere; nothing is written there.
            self._reduce(call, arrays, [address or addresses[0] for address in addresses])
        return lambda: list(map(_delivered, self._leaves, parts, outs))

    def _num_results(self, rank: int) -> int:
        return sum(leaf.counts[rank] for leaf in self._leaves)

    def _pieces(self, number: int) -> Iterator[Piece]:
        leaf = self._leaves[number]
        for rank, worker in enumerate(self._workers):
            if worker != self._rank:
                continue
            first = sum(leaf.counts[:rank])
            place = self._first_result(rank) + sum(each.counts[rank] for each in self._leaves[:number])
            for replica in range(leaf.counts[rank]):
                start, stop = leaf.edges[first + replica : first + replica + 2]
                yield Piece(start, stop, (AddressOffset(place + replica),))

    def _own_parts(self, number: int, out: Sequence[Array] | None) -> Sequence[Any]:
        """Memory for the parts of this rank's replicas: `out`, if kernels can write to it as it is."""
        leaf = self._leaves[number]
        if out is not None and leaf.axis == 0:
            tensors: list[Any] | None = self._tensors.writable_tensors(out)
            if tensors is not None:
                return tensors
        return [self._tensors.empty(shape, self._dtypes[number], self._place) for shape in leaf.own_rows]


class StagedReduceScatter(StagedReduction):
    """Parts by way of the host's shared memory: ranks combine chunks, and each copies its own parts back."""

    def __init__(
        self,
        leaves: Sequence[LeafParts],
        op: ReduceOp,
        options: CommunicationOptions,
        group: ProcessGroup,
        *,
        is_weighted: bool,
    ) -> None:
        self._leaves = leaves
        counts = [leaf.counts for leaf in leaves]
        super().__init__([leaf.spec for leaf in leaves], op, options, counts, group, is_weighted=is_weighted)

    def run(self, call: GroupCall, columns: Columns, outs: Outs, weights: Weights | None = None) -> Delivery:
        """Reduces with the other ranks; `outs` are written to by whoever calls the delivery."""
        tensors = self._tensors
        with tensors.on_device(self._place):
            parts = [
                [tensors.empty(shape, dtype, self._place) for shape in leaf.own_rows]
                for leaf, dtype in zip(self._leaves, self._dtypes, strict=True)
            ]
            targets = [
                [
                    Target(*ends, address)
                    for ends, address in zip(leaf.own_ranges, tensors.addresses_of(of_leaf), strict=True)
                ]
                for leaf, of_leaf in zip(self._leaves, parts, strict=True)
            ]
            inputs = [
                tensors.tensors_of(_rows(leaf, column))
                for leaf, column in zip(self._leaves, columns, strict=True)
            ]
            self._reduce(call, inputs, targets, weights)
        return lambda: list(map(_delivered, self._leaves, parts, outs))


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
