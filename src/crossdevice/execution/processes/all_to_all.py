"""All-to-all between processes: every rank sends each other one the parts of its replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.registry import backend_named
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
from crossdevice.execution.processes.peer_copies import PeerCopy, are_reached, copy_from_all, offered_gpu
from crossdevice.execution.processes.rows import array_of_rows, rows_of, rows_on_gpu
from crossdevice.execution.reading.outputs import wrapped_into
from crossdevice.execution.reading.shards import part_lengths
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.process_groups.protocol import Message
from crossdevice.process_groups.receive_buffers import receive_buffer
from crossdevice.values.device import Device
from crossdevice.values.distributed import PerReplica
from crossdevice.values.options import CommunicationOptions

Rows: TypeAlias = Any
"""An array with the axis first, of NumPy or, on a GPU that others may reach, of PyTorch."""


def exchanged_parts(
    group: ProcessGroup, moves: Sequence[AllToAll], options: CommunicationOptions
) -> list[Any]:
    """For each value what this rank's replicas get, wrapped."""
    leaves = [(move, gathering) for move in moves for gathering in move.gatherings]
    gpu = offered_gpu([array for _, gathering in leaves for array in gathering.arrays], group)
    as_rows = rows_of if gpu is None else rows_on_gpu
    rows = [
        [as_rows(array, gathering.axis, gathering.backend) for array in gathering.arrays]
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
        parts = parts_of_all(call, ready, lengths, gpu)
    left = iter(
        [
            [
                array_of_rows(part, part.shape, gathering.axis, gathering.backend, device)
                if isinstance(part, np.ndarray)
                else part.movedim(0, gathering.axis).contiguous()
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
    call: GroupCall,
    leaves: Sequence[LeafRows],
    lengths: Sequence[NDArray[np.int64]],
    gpu: Device | None = None,
) -> list[list[Rows]]:
    """For each leaf, what each replica of this rank gets: its parts of all replicas, end to end.

    Rows may be PyTorch's on this GPU, and results are there too if ranks reach each other's.
    """
    rank, members = call.group.rank, call.group.members
    own = np.concatenate([[gpu is not None], *(of_leaf.reshape(-1) for of_leaf in lengths)])
    records = call.all_gather_uneven(own.astype(np.int64).tobytes())
    of_peers = [_lengths_of(peer, leaves, record, members) for peer, record in enumerate(records)]
    if are_reached(call, gpu, [is_offered for is_offered, _ in of_peers]):
        return _fetched_parts(call, leaves, [found for _, found in of_peers])
    if gpu is not None:
        to_host = backend_named("torch").to_host
        leaves = [
            leaf._replace(replicas=[to_host(rows).reshape(tuple(rows.shape)) for rows in leaf.replicas])
            for leaf in leaves
        ]
    coming = [
        [found[:, leaf.replicas_of(rank)] for leaf, found in zip(leaves, of_leaves, strict=True)]
        for _, of_leaves in of_peers
    ]
    parts = [
        [np.split(rows, np.cumsum(own)[:-1]) for rows, own in zip(leaf.replicas, of_leaf, strict=True)]
        for leaf, of_leaf in zip(leaves, lengths, strict=True)
    ]
    buffers = {
        peer: [
            receive_buffer(
                members[peer], (of_leaf.sum(), *leaf.replicas[0].shape[1:]), leaf.replicas[0].dtype
            )
            for leaf, of_leaf in zip(leaves, coming[peer], strict=True)
        ]
        for peer in call.others()
    }
    call.exchange(
        [
            Message(peer, np.concatenate([part for own in of_leaf for part in own[leaf.replicas_of(peer)]]))
            for peer in buffers
            for leaf, of_leaf in zip(leaves, parts, strict=True)
        ],
        [Message(peer, buffer) for peer, of_peer in buffers.items() for buffer in of_peer],
    )
    results = []
    for number, leaf in enumerate(leaves):
        received: list[Sequence[Rows]] = []  # of each replica there is, its part for each of this rank's
        for peer, of_peer in enumerate(coming):
            if peer == rank:
                received += [own[leaf.replicas_of(rank)] for own in parts[number]]
            else:
                received += _cut(buffers[peer][number], of_peer[number])
        results.append([np.concatenate(column) for column in zip(*received, strict=True)])
    return results


def _fetched_parts(
    call: GroupCall, leaves: Sequence[LeafRows], of_peers: Sequence[Sequence[NDArray[np.int64]]]
) -> list[list[Any]]:
    """The same, of rows on GPUs: each rank copies its parts from where they are."""
    shown = (
        (peer, number, replica)
        for peer in range(call.group.size)
        for number, leaf in enumerate(leaves)
        for replica in range(leaf.counts[peer])
    )
    positions = {key: position for position, key in enumerate(shown)}
    copies: list[PeerCopy] = []
    results = []
    for number, leaf in enumerate(leaves):
        first = leaf.replicas[0]
        shape = tuple(first.shape[1:])
        row_bytes = math.prod(shape) * first.itemsize
        lengths = np.concatenate([found[number] for found in of_peers])
        starts = np.cumsum(lengths, axis=1) - lengths
        sources = [
            positions[peer, number, replica]
            for peer, count in enumerate(leaf.counts)
            for replica in range(count)
        ]
        buffers = []
        for own in range(*leaf.replicas_of(call.group.rank).indices(len(lengths))):
            sizes = lengths[:, own].tolist()
            buffers.append(first.new_empty((sum(sizes), *shape)))
            offsets = (starts[:, own] * row_bytes).tolist()
            copies += map(PeerCopy, buffers[-1].split(sizes), sources, offsets)
        results.append(buffers)
    copy_from_all(call, [rows for leaf in leaves for rows in leaf.replicas], copies)
    return results


def _lengths_of(
    peer: int, leaves: Sequence[LeafRows], record: bytes, members: Sequence[str]
) -> tuple[bool, list[NDArray[np.int64]]]:
    """Whether a peer's rows are on a GPU, and for each leaf the lengths of the parts of its replicas."""
    expected = 8 * (1 + sum(leaf.counts[peer] * sum(leaf.counts) for leaf in leaves))
    if len(record) != expected:
        raise ProcessGroupError(
            f"{members[peer]} sends the lengths of its parts in {len(record)} bytes; expected {expected}. "
            "Its message was corrupted"
        )
    numbers, found = np.frombuffer(record, np.int64), []
    left = numbers[1:]
    for leaf in leaves:
        number = leaf.counts[peer] * sum(leaf.counts)
        found.append(left[:number].reshape(leaf.counts[peer], -1))
        left = left[number:]
    return bool(numbers[0]), found


def _cut(rows: Rows, lengths: NDArray[np.int64]) -> list[list[Rows]]:
    """Rows that were put end to end, as the parts they are made of."""
    parts = iter(np.split(rows, np.cumsum(lengths.reshape(-1))[:-1]))
    return [[next(parts) for _ in of_replica] for of_replica in lengths]
