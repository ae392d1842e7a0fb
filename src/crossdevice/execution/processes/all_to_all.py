"""All-to-all between processes: every rank sends each other one the parts of its replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crossdevice.errors import ProcessGroupError
from crossdevice.execution.local.all_to_all import AllToAll
from crossdevice.execution.processes.agreement import (
    Description,
    LeafDescription,
    agreed_call,
    refused_by_all,
    seconds_of,
    structure_text,
)
from crossdevice.execution.processes.rows import array_of_rows, rows_of
from crossdevice.execution.reading.outputs import wrapped_into
from crossdevice.execution.reading.shards import part_lengths
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.process_groups.protocol import Message
from crossdevice.process_groups.rooms import room_for
from crossdevice.values.distributed import PerReplica
from crossdevice.values.options import CommunicationOptions

Rows = NDArray[Any]


def exchanged_parts(
    group: ProcessGroup, moves: Sequence[AllToAll], options: CommunicationOptions
) -> list[Any]:
    """For each value what this rank's replicas get, wrapped."""
    leaves = [(move, gathering) for move in moves for gathering in move.gatherings]
    rows = [
        [rows_of(array, gathering.axis, gathering.backend) for array in gathering.arrays]
        for _, gathering in leaves
    ]
    replicas = tuple(map(len, rows))
    with agreed_call(group, _description(moves), replicas, seconds_of(options)) as (call, of_ranks):
        ready = [
            LeafRows(own, move.sizes, tuple(counts[number] for counts in of_ranks))
            for number, ((move, _), own) in enumerate(zip(leaves, rows, strict=True))
        ]
        with refused_by_all():
            lengths = [leaf.lengths() for leaf in ready]
        parts = parts_of_all(call, ready, lengths)
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


def _description(moves: Sequence[AllToAll]) -> Description:
    """What ranks compare: lengths along the axis are each rank's own affair, but not their number."""
    gatherings = [gathering for move in moves for gathering in move.gatherings]
    paths = [leaf.path for move in moves for leaf in move.value.leaves]
    axes = " and ".join(map(str, sorted({gathering.axis for gathering in gatherings})))
    numbers = sorted({len(sizes) for move in moves for sizes in move.sizes if sizes is not None})
    return Description(
        f"all_to_all along axis {axes}" + "".join(f", {number} sizes" for number in numbers),
        tuple(structure_text(move.value.structure) for move in moves),
        tuple(
            LeafDescription(path, "array", gathering.dtype, gathering.shape_with(None))
            for path, gathering in zip(paths, gatherings, strict=True)
        ),
    )


class LeafRows(NamedTuple):
    """One leaf of this rank: its replicas as rows along the axis, and the replicas that each rank has."""

    replicas: Sequence[Rows]
    sizes: Sequence[Sequence[int] | None]
    counts: Sequence[int]

    def replicas_of(self, rank: int) -> slice:
        """Which replicas, among those of all ranks, are a rank's."""
        return slice(sum(self.counts[:rank]), sum(self.counts[: rank + 1]))

    def lengths(self) -> NDArray[np.int64]:
        """The lengths of the parts of each replica here, one for each replica there is."""
        number = sum(self.counts)
        pairs = zip(self.replicas, self.sizes, strict=True)
        return np.array([part_lengths(len(rows), number, own) for rows, own in pairs], np.int64)


def parts_of_all(
    call: GroupCall, leaves: Sequence[LeafRows], lengths: Sequence[NDArray[np.int64]]
) -> list[list[Rows]]:
    """For each leaf, what each replica of this rank gets: its parts of all replicas, end to end."""
    rank = call.group.rank
    parts = [
        [np.split(rows, np.cumsum(own)[:-1]) for rows, own in zip(leaf.replicas, of_leaf, strict=True)]
        for leaf, of_leaf in zip(leaves, lengths, strict=True)
    ]
    records = call.all_gather_uneven(b"".join(of_leaf.tobytes() for of_leaf in lengths))
    members = call.group.members
    coming = [_lengths_for(rank, leaves, record, peer, members) for peer, record in enumerate(records)]
    rooms = {
        peer: [
            room_for(members[peer], (of_leaf.sum(), *leaf.replicas[0].shape[1:]), leaf.replicas[0].dtype)
            for leaf, of_leaf in zip(leaves, coming[peer], strict=True)
        ]
        for peer in call.others()
    }
    call.exchange(
        [
            Message(peer, np.concatenate([part for own in of_leaf for part in own[leaf.replicas_of(peer)]]))
            for peer in rooms
            for leaf, of_leaf in zip(leaves, parts, strict=True)
        ],
        [Message(peer, room) for peer, of_peer in rooms.items() for room in of_peer],
    )
    results = []
    for number, leaf in enumerate(leaves):
        received: list[Sequence[Rows]] = []  # of each replica there is, its part for each of this rank's
        for peer, of_peer in enumerate(coming):
            if peer == rank:
                received += [own[leaf.replicas_of(rank)] for own in parts[number]]
            else:
                received += _cut(rooms[peer][number], of_peer[number])
        results.append([np.concatenate(column) for column in zip(*received, strict=True)])
    return results


def _lengths_for(
    rank: int, leaves: Sequence[LeafRows], record: bytes, peer: int, members: Sequence[str]
) -> list[NDArray[np.int64]]:
    """For each leaf the lengths of the parts that each of a peer's replicas has for each of this rank's."""
    expected = 8 * sum(leaf.counts[peer] * sum(leaf.counts) for leaf in leaves)
    if len(record) != expected:
        raise ProcessGroupError(
            f"{members[peer]} sends the lengths of its parts in {len(record)} bytes; expected {expected}. "
            "Its message was corrupted"
        )
    left, found = np.frombuffer(record, np.int64), []
    for leaf in leaves:
        number = leaf.counts[peer] * sum(leaf.counts)
        found.append(left[:number].reshape(leaf.counts[peer], -1)[:, leaf.replicas_of(rank)])
        left = left[number:]
    return found


def _cut(rows: Rows, lengths: NDArray[np.int64]) -> list[list[Rows]]:
    """Rows that were put end to end, as the parts they are made of."""
    parts = iter(np.split(rows, np.cumsum(lengths.reshape(-1))[:-1]))
    return [[next(parts) for _ in of_replica] for of_replica in lengths]
