"""Reduce-scatter between processes: the first half of an all-reduce, in shards that the caller wants."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from crossdevice.backends.protocol import Array
from crossdevice.execution.local.scattering import Scatter, ScatteredLeaf
from crossdevice.execution.processes.agreement import (
    Description,
    LeafDescription,
    agreed_call,
    refused_by_all,
    seconds_of,
    structure_text,
)
from crossdevice.execution.processes.device_reduction import Prepare
from crossdevice.execution.processes.device_shards import DeviceReduceScatter, may_stay_on_device
from crossdevice.execution.processes.packs import PackedPiece
from crossdevice.execution.processes.reduction import Flat, ProcessReduction
from crossdevice.execution.processes.rows import array_of_rows
from crossdevice.execution.processes.weighing import weights_of_all_ranks
from crossdevice.execution.reading.leaf_spec import Columns
from crossdevice.execution.reading.outputs import wrapped_into
from crossdevice.execution.reading.shards import part_lengths
from crossdevice.execution.signature_cache import SignatureCache
from crossdevice.kernels.host.resources.pool import result_pool
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.distributed import PerReplica
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights


class ProcessReduceScatter(ProcessReduction):
    """A reduction of dense leaves of which every replica of every rank gets its own part.

    Elements are in the order of rows along the axis, so that each part is a range of them.
    """

    def __init__(
        self,
        leaves: Sequence[ScatteredLeaf],
        op: ReduceOp,
        options: CommunicationOptions,
        counts: Sequence[tuple[int, ...]],
        rank: int,
        lengths: Sequence[Sequence[int]],
        *,
        is_weighted: bool = False,
    ) -> None:
        """`lengths` has, for each leaf, the length of the part of each replica there is."""
        self._axes = [leaf.axis for leaf in leaves]
        units = [_row_elements(leaf.spec.shape, leaf.axis) for leaf in leaves]
        edges = [
            [unit * row for row in itertools.accumulate(of_leaf, initial=0)]
            for of_leaf, unit in zip(lengths, units, strict=True)
        ]
        super().__init__(
            [leaf.spec for leaf in leaves], op, options, counts, rank, is_weighted=is_weighted, edges=edges
        )
        own = [slice(sum(count[:rank]), sum(count[: rank + 1])) for count in counts]
        self._own_lengths = [of_leaf[place] for of_leaf, place in zip(lengths, own, strict=True)]
        self._own_starts = [of_leaf[place] for of_leaf, place in zip(edges, own, strict=True)]
        self._units = units

    def exchange(self, call: GroupCall, columns: Columns, weights: Weights | None = None) -> list[list[Flat]]:
        """For each leaf the parts of this rank's replicas, as rows along its axis."""
        parts = [
            [result_pool.empty(length * unit, dtype) for length in lengths]
            for lengths, unit, dtype in zip(self._own_lengths, self._units, self._dtypes, strict=True)
        ]
        for pack in self._packs:
            # By their first elements, which tell parts apart: those without elements are in no piece.
            targets = {
                (leaf, start * pack.per_element): part.view(pack.result)
                for leaf, _, _ in pack.leaves
                for start, part in zip(self._own_starts[leaf], parts[leaf], strict=True)
                if part.size
            }

            def target_of(piece: PackedPiece, targets: dict[tuple[int, int], Flat] = targets) -> list[Flat]:
                return [targets[piece.leaf, piece.start]]

            self._reduce_shard(call, pack, columns, target_of, weights)
        return parts

    def placed(self, parts: Sequence[Sequence[Flat]]) -> list[list[Array]]:
        """The parts as arrays on the devices of their replicas."""
        return [
            [
                array_of_rows(part, (length, *_rest(spec.shape, axis)), axis, spec.backend, device)
                for part, length, device in zip(of_leaf, lengths, spec.destinations, strict=True)
            ]
            for of_leaf, lengths, spec, axis in zip(
                parts, self._own_lengths, self._specs, self._axes, strict=True
            )
        ]

    def _views(self, leaf: int, arrays: Sequence[Array], dtype: np.dtype[Any]) -> list[Flat]:
        views, axis = super()._views(leaf, arrays, dtype), self._axes[leaf]
        if axis == 0:
            return views
        shape = self._specs[leaf].shape
        # One or, of a complex number, two of the pack's elements stand for one of the array's.
        shape = (*shape, views[0].size // max(math.prod(shape), 1))
        return [np.moveaxis(view.reshape(shape), axis, 0).reshape(-1) for view in views]


def reduced_parts(
    group: ProcessGroup,
    scatters: Sequence[Scatter],
    op: ReduceOp,
    options: CommunicationOptions,
    factors: tuple[float, ...] | None,
    known: SignatureCache[ProcessReduceScatter | DeviceReduceScatter],
    prepare: Prepare,
) -> list[Any]:
    """For each value the parts of this rank's replicas, wrapped; what was prepared for them is `known`."""
    if options.precision == "fast" and (factors is not None or op.is_of_ranks):
        options = dataclasses.replace(options, precision="accurate")
    leaves = [leaf for scatter in scatters for leaf in scatter.leaves]
    replicas = tuple(len(leaf.spec.devices) for leaf in leaves)
    description = _description(scatters, leaves, op, options, factors is not None, group)
    sizes = scatters[0].sizes
    place: Callable[[], list[list[Array]]] = list  # of no leaves
    with agreed_call(group, description, replicas, seconds_of(options)) as (call, of_ranks):
        if leaves:
            counts = tuple(zip(*of_ranks, strict=True))
            weights = weights_of_all_ranks(call, op, factors, counts)
            shapes = tuple((leaf.spec, leaf.axis) for leaf in leaves)
            key = (shapes, op, options, counts, sizes, weights is not None)
            prepared = known.get(key)
            if prepared is None:
                specs = [leaf.spec for leaf in leaves]
                with refused_by_all():
                    lengths = [
                        part_lengths(leaf.spec.shape[leaf.axis], sum(count), sizes)
                        for leaf, count in zip(leaves, counts, strict=True)
                    ]
                if weights is None and all(
                    set(count) == {1}
                    and may_stay_on_device(leaf.spec, options, group)
                    and _is_even(leaf, group, sizes)
                    for leaf, count in zip(leaves, counts, strict=True)
                ):
                    prepared = DeviceReduceScatter(specs, op, options, group.size, prepare)
                else:
                    prepared = ProcessReduceScatter(
                        leaves, op, options, counts, group.rank, lengths, is_weighted=weights is not None
                    )
                known[key] = prepared
            parts = prepared.exchange(call, [leaf.leaf.arrays for leaf in leaves], weights)
            place = functools.partial(prepared.placed, parts)
    left = iter(place())
    return [
        wrapped_into(
            scatter.out,
            [next(left) for _ in scatter.leaves],
            [leaf.spec.backend for leaf in scatter.leaves],
            scatter.value,
            scatter.value.devices,
            PerReplica,
        )
        for scatter in scatters
    ]


def _description(
    scatters: Sequence[Scatter],
    leaves: Sequence[ScatteredLeaf],
    op: ReduceOp,
    options: CommunicationOptions,
    is_weighted: bool,
    group: ProcessGroup,
) -> Description:
    axes = " and ".join(map(str, sorted({leaf.axis for leaf in leaves})))
    weighted = ", with weights" if is_weighted else ""
    packs = f", packs of {options.bytes_per_pack} bytes" if options.bytes_per_pack else ""
    sizes = "" if scatters[0].sizes is None else f", sizes {list(scatters[0].sizes)}"
    return Description(
        f"reduce_scatter {op.name} ({options.precision}{packs}{weighted}) along axis {axes}{sizes}",
        tuple(structure_text(scatter.value.structure) for scatter in scatters),
        tuple(
            LeafDescription(
                leaf.path,
                f"array on {spec.devices[0].type}" if may_stay_on_device(spec, options, group) else "array",
                spec.dtype,
                spec.shape,
            )
            for leaf, spec, _ in leaves
        ),
    )


def _is_even(leaf: ScatteredLeaf, group: ProcessGroup, sizes: Sequence[int] | None) -> bool:
    """Whether it is cut along its first axis into equal parts."""
    return leaf.axis == 0 and leaf.spec.shape[0] % group.size == 0 and len(set(sizes or ())) <= 1


def _rest(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


def _row_elements(shape: Sequence[int], axis: int) -> int:
    return math.prod(_rest(shape, axis))
