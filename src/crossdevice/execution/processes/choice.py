"""Choice of the transport of a leaf between the processes of a group: the first that all ranks can use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from crossdevice.backends.protocol import Array
from crossdevice.execution.processes.agreement import Course
from crossdevice.execution.processes.host_reduction import HostReduceScatter, HostReduction
from crossdevice.execution.processes.programs import Delivery, Emit, Program
from crossdevice.execution.processes.reduced_batch import ReducedBatch, Wanted, WantedCopies
from crossdevice.execution.processes.transports.messages import messages_unavailable, prepare_messages
from crossdevice.execution.processes.transports.nccl_all_reduce import (
    DeviceReduction,
    nccl_all_reduce_unavailable,
)
from crossdevice.execution.processes.transports.nccl_shards import (
    DeviceReduceScatter,
    DeviceShards,
    nccl_shards_unavailable,
)
from crossdevice.execution.processes.transports.peer_memory import (
    PeerCopies,
    PeerReduceScatter,
    PeerReduction,
    peer_copies_unavailable,
    peer_memory_unavailable,
)
from crossdevice.execution.processes.transports.staged import StagedReduction, staged_unavailable
from crossdevice.execution.processes.transports.windows import (
    prepare_windows,
    window_copies_unavailable,
    windows_unavailable,
)
from crossdevice.execution.reading.leaf_spec import Columns, LeafSpec, Outs
from crossdevice.plans.tasks import TaskPlan
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.device import Device
from crossdevice.values.weights import Weights


class Prepared(Protocol):
    """A batch on one transport: everything but its arrays."""

    @property
    def plans(self) -> Sequence[TaskPlan]:
        """Its tasks, as this rank knows them; none of the all-reduce of an engine."""

    def run(self, call: GroupCall, columns: Columns, outs: Outs, weights: Weights | None = None) -> Delivery:
        """Reduces with the other ranks; the delivery writes to `outs`."""


PrepareBatch: TypeAlias = Callable[[ReducedBatch], Prepared]

PrepareCopies: TypeAlias = Callable[[Emit, Sequence[Sequence[int]], ProcessGroup], Program]
"""How a transport prepares copies; for each leaf there is the number of arrays of each rank."""


class Transport(NamedTuple):
    """A row of the table: when it can be used, and what prepares each kind of call for it.

    A kind of call that it does not carry has the reason in the place of that.
    """

    unavailable: Callable[[Wanted], str | None]
    """Reason a leaf cannot go this way; None if it can. Of what all ranks know alike, so that all agree."""
    reduction: PrepareBatch
    reduce_scatter: PrepareBatch | str
    copies: PrepareCopies | str
    """Gathers, broadcasts, all-to-all, and sparse rows."""
    copies_unavailable: Callable[[WantedCopies], str | None] = lambda _: None
    is_on_host: bool = False


TRANSPORTS: Mapping[str, Transport] = {
    "peer memory": Transport(
        peer_memory_unavailable,
        PeerReduction,
        PeerReduceScatter,
        lambda emit, counts, group: PeerCopies(emit(is_small=False, seen_by=group.rank), counts, group),
        peer_copies_unavailable,
    ),
    "NCCL all-reduce": Transport(
        nccl_all_reduce_unavailable,
        DeviceReduction,
        "the engine only has all-reduces",
        "the engine only has all-reduces",
    ),
    "NCCL shards": Transport(
        nccl_shards_unavailable,
        DeviceShards,
        DeviceReduceScatter,
        "NCCL carries equal shards, and ranks copy as many bytes as each of them has",
    ),
    "staged": Transport(
        staged_unavailable,
        StagedReduction,
        StagedReduction,
        "staging overlaps copies of the GPU with sums of the host, and here nothing is summed",
    ),
    "windows": Transport(
        windows_unavailable,
        functools.partial(HostReduction, prepare=prepare_windows),
        functools.partial(HostReduceScatter, prepare=prepare_windows),
        lambda emit, _, group: prepare_windows(emit, (), group, ()),
        window_copies_unavailable,
        is_on_host=True,
    ),
    "messages": Transport(
        messages_unavailable,
        functools.partial(HostReduction, prepare=prepare_messages),
        functools.partial(HostReduceScatter, prepare=prepare_messages),
        lambda emit, _, group: prepare_messages(emit, (), group, ()),
        is_on_host=True,
    ),
}
"""From the best to the one that is always available."""


UNVERIFIED = "verified calls go through windows and messages"


class Choice(NamedTuple):
    """The transport of a leaf, and why it is none of those before."""

    name: str
    reasons: Mapping[str, str]

    @property
    def is_on_host(self) -> bool:
        """True if arrays are on the host, or go through it."""
        return TRANSPORTS[self.name].is_on_host


def transport_of(wanted: Wanted) -> Choice:
    """The transport of a leaf that is reduced."""

    def unavailable(transport: Transport) -> str | None:
        if wanted.parts is not None and isinstance(transport.reduce_scatter, str):
            return transport.reduce_scatter
        return transport.unavailable(wanted)

    return _first_available(unavailable, is_verified=wanted.options.verify)


def transport_of_copies(wanted: WantedCopies) -> Choice:
    """The transport of a call that copies."""

    def unavailable(transport: Transport) -> str | None:
        return transport.copies if isinstance(transport.copies, str) else transport.copies_unavailable(wanted)

    return _first_available(unavailable, is_verified=wanted.is_verified)


def _first_available(unavailable: Callable[[Transport], str | None], *, is_verified: bool) -> Choice:
    """The first transport that is available: all ranks come to the same."""
    reasons: dict[str, str] = {}
    for name, transport in TRANSPORTS.items():
        is_unverified = is_verified and not transport.is_on_host
        reason = UNVERIFIED if is_unverified else unavailable(transport)
        if reason is None:
            return Choice(name, reasons)
        reasons[name] = reason
    raise AssertionError("messages are always available")


class Part(NamedTuple):
    """Leaves of a batch, by their numbers, that take one transport together."""

    leaves: Sequence[int]
    prepared: Prepared
    transport: str

    def run(self, call: GroupCall, columns: Columns, outs: Outs, weights: Weights | None = None) -> Delivery:
        """Reduces these leaves of a batch with the other ranks."""
        own_columns = [columns[leaf] for leaf in self.leaves]
        return self.prepared.run(call, own_columns, [outs[leaf] for leaf in self.leaves], weights)


def parts_of(batch: ReducedBatch) -> list[Part]:
    """A batch, prepared: all ranks come to the same parts, in the same order."""
    found: dict[str, list[int]] = {}
    for leaf in range(len(batch.specs)):
        found.setdefault(transport_of(batch.wanted(leaf)).name, []).append(leaf)
    if batch.options.verify:  # one by one, so that errors name the leaf
        return [
            Part((leaf,), _prepared(name, batch.of_leaves((leaf,))), name)
            for name, leaves in found.items()
            for leaf in leaves
        ]
    return [
        Part(leaves, _prepared(name, batch.of_leaves(leaves)), name) for name, leaves in sorted(found.items())
    ]


def courses_of(parts: Sequence[Part]) -> list[Course]:
    """Describes what this rank would do, as ranks compare it."""
    return [Course(part.transport, part.leaves, part.prepared.plans) for part in parts]


def _prepared(name: str, batch: ReducedBatch) -> Prepared:
    transport = TRANSPORTS[name]
    prepare = transport.reduction if batch.parts is None else transport.reduce_scatter
    assert not isinstance(prepare, str), prepare
    return prepare(batch)


def prepare_copies(name: str, emit: Emit, counts: Sequence[Sequence[int]], group: ProcessGroup) -> Program:
    """A copying call on the transport of that name; `counts` as for `PrepareCopies`."""
    prepare = TRANSPORTS[name].copies
    assert not isinstance(prepare, str), prepare
    return prepare(emit, counts, group)


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
