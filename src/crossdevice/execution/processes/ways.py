"""How a dense leaf is reduced between the processes of a group: through the host, or on its GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from crossdevice.execution.local.batch import CheckedBatch
from crossdevice.execution.processes.device_reduction import is_reduced_on_device
from crossdevice.execution.processes.device_shards import may_stay_on_device
from crossdevice.execution.processes.peer_reduction import has_bits_of_the_host, is_on_peers
from crossdevice.execution.reading.leaf_spec import LeafSpec
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.values.device import Device
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp

Way: TypeAlias = Literal["engine", "host", "peer memory", "shards"]


def way_of(spec: LeafSpec, op: ReduceOp, options: CommunicationOptions, group: ProcessGroup) -> Way:
    """How a dense leaf is reduced between the processes of a group."""
    if is_on_peers(spec, op, options, group):
        return "peer memory"
    if is_reduced_on_device(spec, options, group):
        return "engine"
    return "shards" if may_stay_on_device(spec, options, group) else "host"


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
    if way == "peer memory" and (is_weighted or not has_bits_of_the_host(spec, op, options, counts)):
        return "host"
    if way == "shards" and (is_weighted or set(counts) != {1}):
        return "host"
    return way


def own_gpu(batch: CheckedBatch) -> Device | None:
    """The GPU of a batch, if all of its arrays there are on one."""
    gpus = {leaf.spec.shared_gpu for leaf in batch.dense} - {None}
    return gpus.pop() if len(gpus) == 1 else None
