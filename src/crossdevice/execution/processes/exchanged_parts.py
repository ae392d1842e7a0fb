"""All-to-all between processes: every rank sends each other one the parts of its replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from crossdevice.execution.processes.agreement import (
    Description,
    LeafDescription,
    agreed_call,
    refused_by_all,
    seconds_of,
    structure_text,
)
from crossdevice.execution.processes.copied_rows import Copies, LeafRows
from crossdevice.execution.processes.gpu_peers import offered_gpu
from crossdevice.execution.processes.rows import array_of_rows, rows_of
from crossdevice.execution.processes.verifying import verified_copies
from crossdevice.execution.reading.gathers import AllToAll
from crossdevice.execution.reading.outputs import wrapped_into
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.values.distributed import PerReplica
from crossdevice.values.options import CommunicationOptions


def exchanged_parts(
    group: ProcessGroup, copies: Copies, moves: Sequence[AllToAll], options: CommunicationOptions
) -> list[Any]:
    """For each value what this rank's replicas get, wrapped."""
    leaves = [(move, gathering) for move in moves for gathering in move.gatherings]
    gpu = offered_gpu([array for _, gathering in leaves for array in gathering.arrays], group)
    rows = [
        [rows_of(array, gathering.axis, gathering.backend, gpu) for array in gathering.arrays]
        for _, gathering in leaves
    ]
    replicas = tuple(map(len, rows))
    description = _description(moves, ", verified" if options.verify else "")
    with (
        agreed_call(group, description, replicas, seconds_of(options)) as (call, of_ranks),
        verified_copies(call, options),
    ):
        ready = [
            LeafRows(own, move.sizes, tuple(counts[number] for counts in of_ranks))
            for number, ((move, _), own) in enumerate(zip(leaves, rows, strict=True))
        ]
        with refused_by_all():
            lengths = [leaf.lengths() for leaf in ready]
        parts = copies.exchanged(call, ready, lengths, gpu)
    left = iter(
        [
            [
                array_of_rows(part, part.shape, gathering.axis, gathering.backend, device)
                for part, device in zip(of_leaf, move.value.devices, strict=True)
            ]
            for (move, gathering), of_leaf in zip(leaves, parts, strict=True)
        ]
    )
    return [
        wrapped_into(
            move.out,
            [next(left) for _ in move.gatherings],
            [gathering.backend for gathering in move.gatherings],
            move.value,
            move.value.devices,
            PerReplica,
        )
        for move in moves
    ]


def _description(moves: Sequence[AllToAll], verified: str) -> Description:
    """Describes what ranks compare: the number of lengths, but not the lengths, which may differ."""
    gatherings = [gathering for move in moves for gathering in move.gatherings]
    paths = [leaf.path for move in moves for leaf in move.value.leaves]
    axes = " and ".join(map(str, sorted({gathering.axis for gathering in gatherings})))
    numbers = sorted({len(sizes) for move in moves for sizes in move.sizes if sizes is not None})
    return Description(
        f"all_to_all along axis {axes}" + "".join(f", {number} sizes" for number in numbers) + verified,
        tuple(structure_text(move.value.structure) for move in moves),
        tuple(
            LeafDescription(path, "array", gathering.dtype, gathering.shape_with(None))
            for path, gathering in zip(paths, gatherings, strict=True)
        ),
    )
