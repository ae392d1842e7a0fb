"""How a dense leaf is reduced between the processes of a group: through the host, or on its GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias, assert_never

from crossdevice.backends.protocol import Array
from crossdevice.execution.processes.device_reduction import DeviceReduction, Prepare, is_reduced_on_device
from crossdevice.execution.processes.device_shards import (
    DeviceReduceScatter,
    DeviceShards,
    may_stay_on_device,
)
from crossdevice.execution.processes.peer_reduction import PeerReduction, has_bits_of_the_host, is_on_peers
from crossdevice.execution.processes.reduction import ProcessReduction
from crossdevice.execution.processes.staged_reduction import (
    StagedReduction,
    may_be_staged,
    travels_as_it_is,
)
from crossdevice.execution.processes.travelling import Delivery
from crossdevice.execution.reading.leaf_spec import Columns, LeafSpec, Outs
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.device import Device
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights

Way: TypeAlias = Literal["engine", "host", "peer memory", "shards", "staged"]
"""Host: as arrays of the host are, once they are there. Staged: chunk by chunk, while others are copied."""


Reduction: TypeAlias = (
    ProcessReduction | DeviceReduction | DeviceShards | DeviceReduceScatter | PeerReduction | StagedReduction
)
"""Including those of which each replica gets a part."""


def way_of(spec: LeafSpec, op: ReduceOp, options: CommunicationOptions, group: ProcessGroup) -> Way:
    """How a dense leaf is reduced between the processes of a group."""
    if is_on_peers(spec, op, options, group):
        return "peer memory"
    if is_reduced_on_device(spec, options, group):
        return "engine"
    if may_stay_on_device(spec, options, group):
        return "shards"
    return "staged" if may_be_staged(spec, group) else "host"


def agreed_way(
    spec: LeafSpec,
    op: ReduceOp,
    options: CommunicationOptions,
    group: ProcessGroup,
    counts: Sequence[int],
    is_weighted: bool,
) -> Way:
    """The way of a leaf once ranks know how many replicas each of them has: the same on all."""
    way = way_of(spec, op, options, group)
    by_host = way_by_host(spec, op, options, group, counts, is_weighted)
    if way == "peer memory":
        return by_host if is_weighted or not has_bits_of_the_host(spec, op, options, counts) else way
    if way == "shards":
        return by_host if is_weighted or set(counts) != {1} else way
    return by_host if way == "staged" else way


def way_by_host(
    spec: LeafSpec,
    op: ReduceOp,
    options: CommunicationOptions,
    group: ProcessGroup,
    counts: Sequence[int],
    is_weighted: bool,
) -> Way:
    """How the host's memory is used for a leaf for which there is no better way."""
    if may_be_staged(spec, group) and travels_as_it_is(spec, op, options, counts, is_weighted):
        return "staged"
    return "host"


class Part(NamedTuple):
    """Leaves of a batch, by their numbers, that go one way together."""

    leaves: Sequence[int]
    reduction: Reduction

    def run(self, call: GroupCall, columns: Columns, outs: Outs, weights: Weights | None = None) -> Delivery:
        """Reduces these leaves of a batch with the other ranks."""
        own_columns = [columns[leaf] for leaf in self.leaves]
        return self.reduction.run(call, own_columns, [outs[leaf] for leaf in self.leaves], weights)


def parts_of(
    specs: Sequence[LeafSpec],
    op: ReduceOp,
    options: CommunicationOptions,
    counts: Sequence[tuple[int, ...]],
    group: ProcessGroup,
    prepare: Prepare,
    *,
    is_weighted: bool = False,
) -> list[Part]:
    """A batch, prepared: all ranks come to the same parts, in the same order.

    `prepare` says how the devices of this process are reduced where that is done on them.
    """
    ways: dict[Way, list[int]] = {}
    for leaf, (spec, count) in enumerate(zip(specs, counts, strict=True)):
        ways.setdefault(agreed_way(spec, op, options, group, count, is_weighted), []).append(leaf)
    parts = []
    for way, leaves in sorted(ways.items()):
        own, their_counts = tuple(specs[leaf] for leaf in leaves), tuple(counts[leaf] for leaf in leaves)
        reduction: Reduction
        match way:
            case "engine":
                reduction = DeviceReduction(own, op, options, their_counts, prepare)
            case "peer memory":
                reduction = PeerReduction(own, op, options, their_counts, group)
            case "shards":
                reduction = DeviceShards(own, op, options, group.size, prepare)
            case "staged":
                reduction = StagedReduction(own, op, options, their_counts, group, is_weighted=is_weighted)
            case "host":
                rank = group.rank
                reduction = ProcessReduction(own, op, options, their_counts, rank, is_weighted=is_weighted)
            case _:
                assert_never(way)
        parts.append(Part(leaves, reduction))
    return parts


def in_order(deliveries: Sequence[tuple[Sequence[int], Delivery]]) -> list[tuple[Array, ...]]:
    """The results of all leaves of parts, which are given by their numbers."""
    results = {
        leaf: result
        for leaves, delivery in deliveries
        for leaf, result in zip(leaves, delivery(), strict=True)
    }
    return [results[leaf] for leaf in range(len(results))]


def own_gpu(specs: Iterable[LeafSpec]) -> Device | None:
    """The GPU of a batch, if all of its arrays there are on one."""
    gpus = {spec.shared_gpu for spec in specs} - {None}
    return gpus.pop() if len(gpus) == 1 else None
