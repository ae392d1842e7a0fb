"""Gathers and all-to-alls with the other ranks, of which all but the arrays is known."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from crossdevice.backends.protocol import HOST_MEMORY, Array, Backend
from crossdevice.execution.processes.agreement import (
    Description,
    OfRanks,
    RepeatedCall,
    refused_by_all,
    seconds_of,
)
from crossdevice.execution.processes.copied_rows import Copies, LeafRows
from crossdevice.execution.processes.gpu_peers import offered_gpu
from crossdevice.execution.processes.verifying import verified_copies
from crossdevice.execution.reading.leaf_spec import Columns, Outs
from crossdevice.execution.reading.outputs import Expected, check_outs_of_shapes, delivered
from crossdevice.execution.reading.shards import Rows, Sizes, array_of_rows, joined_rows, rows_of
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.device import Device
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.weights import Weights


class CopiedLeaf(NamedTuple):
    """A checked leaf of a call that copies, without its arrays."""

    backend: Backend
    axis: int
    """Arrays, or their parts, are put end to end along it."""
    destinations: tuple[Device, ...]
    devices: tuple[Device, ...]
    """Those of this rank's arrays."""
    sizes: Sizes | None = None
    """For an all-to-all the lengths of each replica's parts; None for a gather."""


class GroupCopies:
    """All of a gather or an all-to-all but its arrays; `description` is what ranks compare of it."""

    def __init__(
        self,
        group: ProcessGroup,
        copies: Copies,
        description: Description,
        leaves: Sequence[CopiedLeaf],
        options: CommunicationOptions,
    ) -> None:
        self._copies, self._leaves, self._options = copies, leaves, options
        self._paths = [leaf.path for leaf in description.leaves]
        self.backends = [leaf.backend for leaf in leaves]
        # Replicas that are gathered are one, end to end, so ranks may bring as many as they like.
        replicas = tuple([1 if leaf.sizes is None else len(leaf.devices) for leaf in leaves])
        memories = {leaf.backend.memory_of(device) for leaf in leaves for device in leaf.devices}
        self._are_on_host = memories <= {HOST_MEMORY}
        self._call = RepeatedCall(group, description, replicas, seconds_of(options))
        self._works: dict[OfRanks, Callable[..., list[list[Rows]]]] = {}

    def run(self, columns: Columns, outs: Outs, weights: Weights | None = None) -> list[tuple[Array, ...]]:
        """For each leaf its result on each destination, written to `outs` where given."""
        del weights  # copies have none
        gpu = None
        if not self._are_on_host:
            gpu = offered_gpu([array for arrays in columns for array in arrays], self._call.group)
        rows = [
            [joined_rows(tuple(arrays), axis, backend, gpu)]
            if sizes is None
            else [rows_of(array, axis, backend, gpu) for array in arrays]
            for arrays, (backend, axis, _, _, sizes) in zip(columns, self._leaves, strict=True)
        ]
        made = self._call.make(self._works, self._work, rows, gpu)
        results = [_arrays(leaf, found) for leaf, found in zip(self._leaves, made, strict=True)]
        if not any(outs):
            return results
        check_outs_of_shapes(
            outs,
            [
                Expected(
                    leaf.backend,
                    leaf.backend.dtype_of(arrays[0]),
                    list(map(leaf.backend.shape_of, arrays)),
                    leaf.destinations,
                    path,
                )
                for leaf, arrays, path in zip(self._leaves, results, self._paths, strict=True)
            ],
        )
        return [
            delivered(arrays, out, leaf.backend)
            for leaf, arrays, out in zip(self._leaves, results, outs, strict=True)
        ]

    def flat_passes(self) -> None:
        """None: other processes take part."""

    def bind(self, columns: Columns, outs: Outs, weights: Weights | None = None) -> Callable[[], Any]:
        """A function that copies these arrays again: how long results are is known only in the call."""
        return functools.partial(self.run, columns, outs, weights)

    def _work(self, call: GroupCall, of_ranks: OfRanks) -> Callable[..., list[list[Rows]]]:
        """Returns the work of this rank in a call, given the replicas of all ranks."""
        del call
        if any(leaf.sizes is not None for leaf in self._leaves):
            counts = list(zip(*of_ranks, strict=True))
            return functools.partial(self._exchanged, counts, [])
        return self._gathered

    def _gathered(
        self, call: GroupCall, rows: Sequence[Sequence[Rows]], gpu: Device | None
    ) -> list[list[Rows]]:
        del gpu
        own = [array for (array,) in rows]
        if not self._options.verify:
            return [[whole] for whole in self._copies.gathered(call, own)]
        with verified_copies(call) as verification:
            wholes = self._copies.gathered(call, own)
            verification.note_copies(dict(zip(self._paths, wholes, strict=True)))
        return [[whole] for whole in wholes]

    def _exchanged(
        self,
        counts: Sequence[Sequence[int]],
        lengths: list[Any],
        call: GroupCall,
        rows: Sequence[Sequence[Rows]],
        gpu: Device | None,
    ) -> list[list[Rows]]:
        """The same for an all-to-all; the `lengths` of parts, which are the same in all calls, are kept."""
        leaves = [
            LeafRows(own, leaf.sizes, count)
            for own, leaf, count in zip(rows, self._leaves, counts, strict=True)
            if leaf.sizes is not None
        ]
        if len(lengths) < len(leaves):
            with refused_by_all():
                lengths[:] = [leaf.lengths() for leaf in leaves]
        if not self._options.verify:
            return self._copies.exchanged(call, leaves, lengths, gpu)
        with verified_copies(call):
            return self._copies.exchanged(call, leaves, lengths, gpu)


def _arrays(leaf: CopiedLeaf, rows: Sequence[Rows]) -> tuple[Array, ...]:
    """Rows that have come as arrays on their destinations: those of a gather are the same on all."""
    backend, axis, destinations, _, sizes = leaf
    if sizes is not None:
        return tuple(
            [
                array_of_rows(own, own.shape, axis, backend, device)
                for own, device in zip(rows, destinations, strict=True)
            ]
        )
    (whole,) = rows
    first = array_of_rows(whole, whole.shape, axis, backend, destinations[0])
    return (first, *[backend.copy(first, device) for device in destinations[1:]])
