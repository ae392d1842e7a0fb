"""Reduce-scatter between processes: the first half of an all-reduce, in shards that the caller wants."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

from crossdevice.backends.protocol import Array
from crossdevice.errors import OutError
from crossdevice.execution.local.scattering import Scatter, ScatteredLeaf
from crossdevice.execution.processes.agreement import (
    Description,
    LeafDescription,
    agreed_call,
    refused_by_all,
    seconds_of,
    structure_text,
    weights_of_all_ranks,
)
from crossdevice.execution.processes.choice import Part, courses_of, in_order, own_gpu, parts_of, transport_of
from crossdevice.execution.processes.gpu_peers import find_peers
from crossdevice.execution.processes.host_reduction import HostReduceScatter
from crossdevice.execution.processes.programs import Delivery
from crossdevice.execution.processes.reduced_batch import LeafParts, Prepare, ReducedBatch, Wanted
from crossdevice.execution.processes.task_agreement import Course
from crossdevice.execution.processes.verifying import Verification, check_written
from crossdevice.execution.reading.leaf_spec import Columns, Outs
from crossdevice.execution.reading.outputs import Expected, delivered, read_out_of_shapes, wrapped
from crossdevice.execution.reading.shards import part_lengths
from crossdevice.execution.signature_cache import SignatureCache
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.distributed import PerReplica
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights

PreparedParts: TypeAlias = tuple[list[LeafParts], list[Part]]
"""What is known of a call before there are arrays."""


def reduced_parts(
    group: ProcessGroup,
    scatters: Sequence[Scatter],
    op: ReduceOp,
    options: CommunicationOptions,
    factors: tuple[float, ...] | None,
    known: SignatureCache[PreparedParts],
    prepare: Prepare,
) -> list[Any]:
    """For each value the parts of this rank's replicas, wrapped; what was prepared for them is `known`."""
    if options.precision == "fast" and (factors is not None or op.is_order_statistic):
        options = dataclasses.replace(options, precision="accurate")
    leaves = [leaf for scatter in scatters for leaf in scatter.leaves]
    replicas = tuple(len(leaf.spec.devices) for leaf in leaves)
    sizes, is_weighted = scatters[0].sizes, factors is not None
    description = _description(scatters, leaves, op, options, is_weighted, group)
    deliveries: list[tuple[Sequence[int], Delivery]] = []
    refusal: OutError | None = None

    def prepared(call: GroupCall, of_ranks: Sequence[Sequence[int]]) -> PreparedParts:
        find_peers(call, own_gpu(leaf.spec for leaf in leaves))
        counts = tuple(map(tuple, zip(*of_ranks, strict=True)))
        key = (tuple((leaf.spec, leaf.axis) for leaf in leaves), op, options, counts, sizes, is_weighted)
        found = known.get(key)
        if found is None:
            with refused_by_all():
                cut = [
                    LeafParts(
                        leaf, part_lengths(leaf.spec.shape[leaf.axis], sum(count), sizes), count, group.rank
                    )
                    for leaf, count in zip(leaves, counts, strict=True)
                ]
            specs = tuple([leaf.spec for leaf in leaves])
            batch = ReducedBatch(specs, op, options, counts, group, prepare, is_weighted, cut)
            found = known[key] = cut, parts_of(batch)
        return found

    def courses(call: GroupCall, of_ranks: Sequence[Sequence[int]]) -> list[Course]:
        return courses_of(prepared(call, of_ranks)[1]) if leaves else []

    with agreed_call(group, description, replicas, seconds_of(options), courses) as (call, of_ranks):
        if leaves:
            cut, parts = prepared(call, of_ranks)
            weights = weights_of_all_ranks(call, op, factors, list(zip(*of_ranks, strict=True)))
            try:
                outs = _read_outs(scatters, cut, op, is_weighted)
            except OutError as error:  # raised when the other ranks have what they asked for
                outs, refusal = [None] * len(leaves), error
            columns = [leaf.leaf.arrays for leaf in leaves]
            if options.verify:
                deliveries = _verified(call, leaves, parts, columns, outs, weights)
            else:
                deliveries = [(part.leaves, part.run(call, columns, outs, weights)) for part in parts]
    if refusal is not None:
        raise refusal
    left = iter(in_order(deliveries))
    return [
        wrapped(
            [next(left) for _ in scatter.leaves], scatter.value.structure, scatter.value.devices, PerReplica
        )
        for scatter in scatters
    ]


def _verified(
    call: GroupCall,
    leaves: Sequence[ScatteredLeaf],
    parts: Sequence[Part],
    columns: Columns,
    outs: Outs,
    weights: Weights | None,
) -> list[tuple[Sequence[int], Delivery]]:
    """The same for a call that is verified: `out` is written to when all ranks have found all well."""
    verification = Verification(call)
    made: dict[int, tuple[Array, ...]] = {}
    for part in parts:
        (number,) = part.leaves
        leaf, prepared = leaves[number].leaf, part.prepared
        assert isinstance(prepared, HostReduceScatter)
        own = [columns[number]]
        made[number] = prepared.run_verified(call, verification, leaf.path, own, [None], weights)
    verification.conclude()

    def deliver(number: int) -> list[tuple[Array, ...]]:
        leaf, out = leaves[number], outs[number]
        found = delivered(made[number], out, leaf.spec.backend)
        if out is not None:
            check_written(leaf.leaf.path, found, made[number])
        return [found]

    return [((number,), functools.partial(deliver, number)) for number in made]


def _read_outs(
    scatters: Sequence[Scatter], leaves: Sequence[LeafParts], op: ReduceOp, is_weighted: bool
) -> Outs:
    """The arrays of `out` for each leaf, checked."""
    left = iter(
        [
            Expected(leaf.spec.backend, leaf.spec.result_dtype(op, is_weighted), leaf.own_shapes)
            for leaf in leaves
        ]
    )
    return [
        out
        for scatter in scatters
        for out in read_out_of_shapes(
            scatter.out, scatter.value, [next(left) for _ in scatter.leaves], scatter.value.devices
        )
    ]


def _description(
    scatters: Sequence[Scatter],
    leaves: Sequence[ScatteredLeaf],
    op: ReduceOp,
    options: CommunicationOptions,
    is_weighted: bool,
    group: ProcessGroup,
) -> Description:
    verified = ", verified" if options.verify else ""
    axes = " and ".join(map(str, sorted({leaf.axis for leaf in leaves})))
    weighted = ", with weights" if is_weighted else ""
    packs = f", packs of {options.bytes_per_pack} bytes" if options.bytes_per_pack else ""
    sizes = "" if scatters[0].sizes is None else f", sizes {list(scatters[0].sizes)}"
    return Description(
        f"reduce_scatter {op.name} ({options.precision}{packs}{weighted}{verified}) along axis {axes}{sizes}",
        tuple(structure_text(scatter.value.structure) for scatter in scatters),
        tuple(
            LeafDescription(
                leaf.path,
                "array"
                if transport_of(Wanted(spec, op, options, group)).is_on_host
                else f"array on {spec.devices[0].type}",
                spec.dtype,
                spec.shape,
            )
            for leaf, spec, _ in leaves
        ),
    )
