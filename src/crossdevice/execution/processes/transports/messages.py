"""Tasks of ranks that send each other messages, over whatever engine the group has.

Each rank sends what the tasks of others read of its arrays, combines what it has got, and sends the results
to whoever has none of them. Between two ranks that is one message for each of the two, and each large range.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from crossdevice.backends.protocol import dtype_named
from crossdevice.errors import PlanError
from crossdevice.execution.processes.programs import (
    Emit,
    Flat,
    Inputs,
    Results,
    SmallArrays,
    TaskPasses,
    targets_of,
)
from crossdevice.execution.processes.reduced_batch import Wanted
from crossdevice.execution.tracing import Work, recorded
from crossdevice.kernels.host.fused_pass import fused_batch
from crossdevice.kernels.host.resources.pool import result_pool
from crossdevice.plans.tasks import ReducedLeaf, Ref, TaskPlan, aligned, packed_bytes
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.process_groups.protocol import Message
from crossdevice.values.device import Device
from crossdevice.values.quantities import counted
from crossdevice.values.recipe import COPYING
from crossdevice.values.weights import Weights

GATHERED_BYTES = 32 << 10
"""Up to here every rank gets everything and combines it itself: one exchange instead of two."""

PACKED_BYTES = 64 << 10
"""Ranges that are shorter are copied into one message; longer ones are sent from where they are."""


def are_small(leaves: Sequence[ReducedLeaf]) -> bool:
    """Returns True if every rank is to combine everything; the rank with most replicas decides."""
    most = max(leaves[0].num_arrays(rank) for rank in range(len(leaves[0].counts)))
    return packed_bytes(leaves) * most <= GATHERED_BYTES


def messages_unavailable(_: Wanted) -> str | None:
    """Always None: every engine carries bytes."""
    return None


def prepare_messages(
    emit: Emit, leaves: Sequence[ReducedLeaf], group: ProcessGroup, devices: tuple[Device, ...]
) -> Messages:
    """The program of this rank; for any tasks, on any engine."""
    is_small = bool(leaves) and are_small(leaves)
    return Messages(emit(is_small=is_small, seen_by=group.rank), group, devices)


class Parcel(NamedTuple):
    """One message: a long range, or several short ones with the places in bytes at which they begin."""

    refs: tuple[Ref, ...]
    starts: tuple[int, ...]
    num_bytes: int

    def empty(self) -> Flat:
        """Memory for it."""
        if len(self.refs) > 1:
            return result_pool.empty(self.num_bytes, np.dtype(np.uint8))
        (ref,) = self.refs
        return result_pool.empty(ref.stop - ref.start, dtype_named(ref.buffer.dtype))

    def views(self, memory: Flat) -> list[Flat]:
        """Its ranges in this memory."""
        if len(self.refs) == 1:
            return [memory]
        return [
            memory[start : start + ref.num_bytes].view(dtype_named(ref.buffer.dtype))
            for ref, start in zip(self.refs, self.starts, strict=True)
        ]


def parcels_of(refs: Sequence[Ref]) -> list[Parcel]:
    """The messages in which these ranges travel from one rank to another: the same on both."""
    parcels = []
    for is_short, group in itertools.groupby(refs, key=lambda ref: ref.num_bytes < PACKED_BYTES):
        for together in [tuple(group)] if is_short else [(ref,) for ref in group]:
            *starts, end = itertools.accumulate([aligned(ref.num_bytes) for ref in together], initial=0)
            parcels.append(Parcel(together, tuple(starts), end))
    return parcels


class Messages:
    """The tasks of one rank, run over an engine.

    Arrays are numbered: the own ranges that own tasks read, then own partials, then what comes.
    """

    def __init__(self, plan: TaskPlan, group: ProcessGroup, devices: tuple[Device, ...] = ()) -> None:
        """`devices` are those of this process, for the record of what ran."""
        rank = group.rank
        self.plan, self._group = plan, group
        self._peers = [(rank + step) % plan.size for step in range(1, plan.size)]
        tasks = [task for task in plan.results if task.worker == rank]
        brought = plan.brought()
        going = {peer: parcels_of(brought.get((rank, peer), ())) for peer in self._peers}
        self._made = list(dict.fromkeys(parcel for parcels in going.values() for parcel in parcels))
        self._going = {peer: list(map(self._made.index, parcels)) for peer, parcels in going.items()}
        coming = {peer: parcels_of(brought.get((peer, rank), ())) for peer in self._peers}
        read = dict.fromkeys(ref for task in tasks for ref in task.inputs if ref.buffer.rank == rank)
        self._own = [ref for ref in read if ref.buffer.role == "input"]
        self._partials = [ref for ref in read if ref.buffer.role == "partial"]
        come = [ref for parcels in coming.values() for parcel in parcels for ref in parcel.refs]
        numbers = {ref: number for number, ref in enumerate([*self._own, *self._partials, *come])}
        copies = {task.inputs[0]: task.outputs[0] for task in tasks if task.is_copy and task.outputs}
        # What is only copied is received where it is to be.
        self._coming = {
            peer: [
                (parcel, copies.get(parcel.refs[0]) if len(parcel.refs) == 1 else None) for parcel in parcels
            ]
            for peer, parcels in coming.items()
        }
        direct = {
            parcel.refs[0]
            for parcels in self._coming.values()
            for parcel, output in parcels
            if output is not None
        }
        self._combined = [
            ([numbers[ref] for ref in task.inputs], ref)
            for task in tasks
            if task.inputs[0] not in direct
            for ref in task.outputs
            if ref.buffer.rank == rank
        ]
        self._are_copies = all(task.is_copy for task in tasks)
        self._passes = TaskPasses(tasks)
        self._is_delivered = not plan.are_combined_by_all
        delivered = plan.delivered()
        to_all = [[ref for _, ref in delivered.get((rank, peer), ())] for peer in self._peers]
        if any(len(refs) != len(tasks) for refs in to_all) and self._is_delivered:
            raise PlanError(f"rank {rank} makes results for some ranks and not for others; expected all")
        self._delivered = {
            peer: parcels_of([ref for _, ref in delivered.get((peer, rank), ())]) for peer in self._peers
        }
        self._delivered[rank] = parcels_of([ref for _, ref in self._combined] if self._is_delivered else [])
        num_bytes = plan.bytes_sent(rank)
        self._packing = Work("pack", "share of this process", devices, num_bytes)
        self._moving = Work("copy", "exchange between processes", devices, num_bytes)
        self._reducing = Work("reduce", "shard of this process", devices, num_bytes)
        self._unpacking = Work("unpack", "results on each device", devices, num_bytes)

    def explained(self) -> str:
        """Human-readable description of what this rank sends."""
        hosts, rank = self._group.hosts, self._group.rank
        num_bytes = self.plan.bytes_sent(rank, None if hosts is None else hosts.ranks)
        what = self.plan.travelling
        if self.plan.is_brought_to_all:
            how = f"sends {what} to every other process"
        elif self._is_delivered:
            how = f"sends shards of {what} to their owners, and its own shard of the result to every other "
            how += "process"
        else:
            how = f"sends each other process its part of {what}"
        passed = "" if hosts is None else " to other hosts, once to each what is for all of it"
        return f"{how}, {counted(num_bytes, 'byte')}{passed}"

    def run(self, call: GroupCall, inputs: Inputs, results: Results, weights: Weights | None = None) -> None:
        """Exchanges what tasks read, combines it, and exchanges what they made.

        What others combine is made ready first, and is on its way while the rest is.
        """
        with recorded(self._packing):
            made = self._filled(inputs)
        come = {
            peer: [
                parcel.empty() if output is None else _slice(results, output) for parcel, output in parcels
            ]
            for peer, parcels in self._coming.items()
        }
        sent = {peer: [made[number] for number in numbers] for peer, numbers in self._going.items()}
        if self.plan.is_brought_to_all:
            with recorded(self._moving):
                call.all_gather_into(self._parts(made, come))
        else:
            call.start_exchange(_messages(sent, come), _messages(come, sent))
        arrays = [_slice(inputs, ref) for ref in self._own]
        if self._partials:
            with recorded(self._packing):
                arrays += self._partials_of(inputs)
        if not self.plan.is_brought_to_all:
            with recorded(self._moving):
                call.wait()
        for peer, memories in come.items():
            for (parcel, _), memory in zip(self._coming[peer], memories, strict=True):
                arrays += parcel.views(memory)
        with recorded(self._reducing):
            packed = self._combine(arrays, results, weights)
        if self._is_delivered:
            self._deliver(call, packed, results)

    def small_arrays(self) -> SmallArrays | None:
        """Memory for arrays that all ranks bring to all, as they are; None if the plan is any other."""
        if not self.plan.is_brought_to_all or len(self._combined) != 1 or self._are_copies:
            return None
        (task,) = (task for task in self.plan.results if task.worker == self._group.rank)
        of_ranks: list[list[Flat]] = [[] for _ in range(self.plan.size)]
        for buffer, start, stop in task.inputs:
            of_ranks[buffer.rank].append(np.empty(stop - start, dtype_named(buffer.dtype)))
        inputs = list(itertools.chain.from_iterable(of_ranks))
        return SmallArrays([of_ranks[self._group.rank]], [inputs], of_ranks, None)

    def _parts(self, made: list[Flat], come: Mapping[int, list[Flat]]) -> list[list[Flat]]:
        """Lists what each rank sends to all; a single byte if that is nothing, so that each is heard of."""
        parts = [made if peer == self._group.rank else come[peer] for peer in range(self.plan.size)]
        return [part or [np.zeros(1, np.uint8)] for part in parts] if any(parts) else parts

    def _filled(self, inputs: Inputs) -> list[Flat]:
        """Fills what others read: ranges as they are, copied together, or partials made of them."""
        made, tasks = [], []
        for parcel in self._made:
            first = parcel.refs[0]
            if len(parcel.refs) == 1 and first.buffer.role == "input":
                made.append(_slice(inputs, first))
                continue
            memory = parcel.empty()
            for ref, view in zip(parcel.refs, parcel.views(memory), strict=True):
                if ref.buffer.role == "input":
                    view[:] = _slice(inputs, ref)
                else:
                    tasks.append(self._making(ref, view, inputs))
            made.append(memory)
        self._run_partials(tasks)
        return made

    def _partials_of(self, inputs: Inputs) -> list[Flat]:
        """The own partials that own tasks read."""
        partials = [
            result_pool.empty(ref.stop - ref.start, dtype_named(ref.buffer.dtype)) for ref in self._partials
        ]
        self._run_partials(
            [self._making(ref, view, inputs) for ref, view in zip(self._partials, partials, strict=True)]
        )
        return partials

    def _making(self, ref: Ref, target: Flat, inputs: Inputs) -> tuple[list[Flat], list[Flat]]:
        return [_slice(inputs, each) for each in self.plan.making(ref).inputs], [target]

    def _run_partials(self, tasks: Sequence[tuple[list[Flat], list[Flat]]]) -> None:
        if tasks:
            fused_batch(tasks, next(iter(self.plan.partials.values())).recipe)

    def _combine(self, arrays: Sequence[Flat], results: Results, weights: Weights | None) -> list[Flat]:
        """Runs the own tasks; returns the messages in which their results go to all others."""
        packed: list[Flat] = []
        views: list[Flat | None] = []
        for parcel in self._delivered[self._group.rank]:
            memory = parcel.empty() if len(parcel.refs) > 1 else _slice(results, parcel.refs[0])
            packed.append(memory)
            views += parcel.views(memory) if len(parcel.refs) > 1 else [None]
        tasks = []
        for (numbers, ref), view in itertools.zip_longest(self._combined, views):
            targets = targets_of(results, ref)
            tasks.append(
                ([arrays[number] for number in numbers], targets if view is None else [*targets, view])
            )
        self._passes.run(None, tasks, weights)
        return packed

    def _deliver(self, call: GroupCall, packed: Sequence[Flat], results: Results) -> None:
        """Sends the own results to all others, and puts theirs where they are to be."""
        parts: list[list[Flat]] = [[] for _ in range(self.plan.size)]
        parts[self._group.rank] = list(packed)
        for peer in self._peers:
            parts[peer] = [
                parcel.empty() if len(parcel.refs) > 1 else _slice(results, parcel.refs[0])
                for parcel in self._delivered[peer]
            ]
        with recorded(self._moving):
            call.all_gather_into(parts)
        with recorded(self._unpacking):
            tasks = []
            for peer in self._peers:
                for parcel, memory in zip(self._delivered[peer], parts[peer], strict=True):
                    for ref, view in zip(parcel.refs, parcel.views(memory), strict=True):
                        targets = targets_of(results, ref)[len(parcel.refs) == 1 :]
                        if targets:
                            tasks.append(([view], targets))
            fused_batch(tasks, COPYING)


def _slice(arrays: Mapping[Any, Sequence[Flat]], ref: Ref) -> Flat:
    """A range of this rank's: of an input, or of the memory in which a result arrives."""
    buffer, start, stop = ref
    if buffer.role == "input":
        return arrays[buffer.leaf][buffer.replica][start:stop]
    return arrays[buffer.leaf, buffer.replica][0][start:stop]


def _messages(ours: Mapping[int, Sequence[Flat]], theirs: Mapping[int, Sequence[Flat]]) -> list[Message]:
    """Messages with each peer; to one who only sends a byte goes back, so that it hears of this rank too."""
    return [
        Message(peer, memory)
        for peer, memories in ours.items()
        for memory in memories or ([np.zeros(1, np.uint8)] if theirs[peer] else [])
    ]
