"""Leaves whose equal shards travel from GPU to GPU by NCCL, and are combined there in the order of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from crossdevice.backends.protocol import Array
from crossdevice.execution.processes.gpu_peers import peers_unavailable
from crossdevice.execution.processes.programs import Delivery
from crossdevice.execution.processes.reduced_batch import ReducedBatch, Wanted
from crossdevice.execution.reading.leaf_spec import Columns, LeafSpec, Outs
from crossdevice.execution.reading.outputs import delivered
from crossdevice.plans.tasks import Task, TaskPlan
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.options import CommunicationImplementation
from crossdevice.values.weights import Weights, refuse_weights


def nccl_shards_unavailable(wanted: Wanted) -> str | None:
    """Reason shards cannot travel by NCCL; None if they can.

    It has to be asked for by name, because NCCL refuses processes that share a GPU.
    """
    spec, op, options, group, counts, is_weighted, parts = wanted
    if options.precision == "fast" or options.implementation is not CommunicationImplementation.NCCL:
        return "NCCL was not asked for by name, or precision is `fast`"
    if spec.backend.name != "torch" or not spec.num_elements or not group.reduces_on(spec.devices[0].type):
        return f"{group.engine_name} does not carry PyTorch's tensors on {spec.devices[0]}"
    if peers_unavailable(spec, op, options, group) is None:
        return "ranks reach each other's GPU memory, and may share GPUs"
    if counts is not None and (is_weighted or set(counts) != {1}):
        return "shards are of one replica per process, without weights"
    if spec.own_op is not None or spec.into is not None:
        return "shards have the operation of the whole batch, and the dtype that it gives"
    if parts is not None and not parts.is_even:
        return "parts are not equal, or not along the first axis"
    return None


class _Shards:
    """The tasks of leaves of one dtype on one device, as NCCL moves them: a shard per rank, as long as all.

    Shards that are shorter than the longest are padded.
    """

    def __init__(self, plan: TaskPlan, batch: ReducedBatch, leaves: Sequence[int]) -> None:
        rank, spec = batch.group.rank, batch.specs[leaves[0]]
        self.plan, self._leaves, self._spec = plan, leaves, spec
        # A complex number is two elements of a task.
        parts = batch.leaves[leaves[0]].length // spec.num_elements
        of_ranks: list[list[Task]] = [[] for _ in range(plan.size)]
        for task in plan.results:
            of_ranks[task.worker].append(task)
        length = max(sum(task.length for task in tasks) for tasks in of_ranks) // parts
        self._sent: list[_Run] = []
        self._places: dict[int, list[_Run]] = {leaf: [] for leaf in leaves}
        """Of each leaf, the ranges of all shards, end to end, that hold its result."""
        for worker, tasks in enumerate(of_ranks):
            end = worker * length
            for task in tasks:
                (own,) = [ref for ref in task.inputs if ref.buffer.rank == rank]
                _append(self._sent, _Run(own.buffer.leaf, own.start // parts, own.stop // parts))
                start, end = end, end + task.length // parts
                for ref in task.outputs:
                    if ref.buffer.rank == rank:
                        _append(self._places[ref.buffer.leaf], _Run(ref.buffer.leaf, start, end))
            if end < (worker + 1) * length:
                _append(self._sent, _Run(None, 0, (worker + 1) * length - end))
        self._num_elements = plan.size * length
        shards = LeafSpec(spec.backend, spec.dtype, (length,), spec.devices * plan.size, spec.devices)
        self._reduction = batch.prepare((shards,), batch.op, batch.options)

    def combined(self, call: GroupCall, columns: Columns) -> Array:
        """This rank's shard of what all ranks send, combined in their order."""
        backend, at, size = self._spec.backend, self._spec.devices[0], self.plan.size
        flats = {leaf: backend.flat(columns[leaf][0]) for leaf in self._leaves}
        like, sent = flats[self._leaves[0]], []
        for leaf, start, stop in self._sent:
            if leaf is None:
                zeros = backend.namespace().zeros((stop,), dtype=like.dtype, device=like.device)
                sent.append(zeros)
            elif stop - start == flats[leaf].shape[0]:
                sent.append(flats[leaf])
            else:
                sent.append(backend.part_of(flats[leaf], start, stop))
        ours = sent[0] if len(sent) == 1 else backend.concat(sent, 0, at)
        received = backend.namespace().empty_like(ours)
        call.all_to_all(received, ours, at.type)
        edges = range(0, self._num_elements + 1, self._num_elements // size)
        contributions = [backend.part_of(received, start, stop) for start, stop in itertools.pairwise(edges)]
        ((shard,),) = self._reduction.run([contributions], [None])
        return shard

    def reduced(self, call: GroupCall, columns: Columns) -> dict[int, Array]:
        """The results of all leaves, by their numbers."""
        backend, at = self._spec.backend, self._spec.devices[0]
        shard = self.combined(call, columns)
        whole = backend.namespace().empty((self._num_elements,), dtype=shard.dtype, device=shard.device)
        call.all_gather_arrays(whole, shard, at.type)
        results = {}
        for leaf, runs in self._places.items():
            parts = [backend.part_of(whole, start, stop) for _, start, stop in runs]
            results[leaf] = parts[0] if len(parts) == 1 else backend.concat(parts, 0, at)
        return results


class _Run(NamedTuple):
    """Consecutive elements, of a leaf or, if that is None, of padding."""

    leaf: int | None
    start: int
    stop: int


def _append(runs: list[_Run], run: _Run) -> None:
    """Adds a run, or lengthens the last one if it follows that."""
    if runs and runs[-1].leaf == run.leaf is not None and runs[-1].stop == run.start:
        run = runs.pop()._replace(stop=run.stop)
    runs.append(run)


class DeviceShards:
    """Dense leaves with one replica on each rank, reduced without a way through the host's memory.

    An all-to-all gives each rank its shard of every rank's arrays, one fused pass combines them in the order
    of ranks, and an all-gather distributes the results: the bytes of a ring, and the bits of one process.
    """

    def __init__(self, batch: ReducedBatch) -> None:
        self._specs = batch.specs
        alike: dict[object, list[int]] = {}
        for number, spec in enumerate(batch.specs):
            alike.setdefault((spec.dtype, spec.devices), []).append(number)
        self._packs = []
        for leaves in alike.values():
            plan = batch.plan([batch.leaves[leaf] for leaf in leaves], is_even=True, seen_by=batch.group.rank)
            self._packs.append(_Shards(plan, batch, leaves))
        self.plans = [pack.plan for pack in self._packs]

    def run(self, call: GroupCall, columns: Columns, outs: Outs, weights: Weights | None = None) -> Delivery:
        """Reduces with the other ranks; `outs` are written to by whoever calls the delivery."""
        refuse_weights(weights, "weighted values go through the host's memory")
        _meet(call)
        results: dict[int, Array] = {}
        for pack in self._packs:
            results |= pack.reduced(call, columns)
        shaped = [spec.backend.reshape(results[leaf], spec.shape) for leaf, spec in enumerate(self._specs)]
        return lambda: [
            delivered([spec.backend.copy(result, device) for device in spec.destinations], out, spec.backend)
            for spec, result, out in zip(self._specs, shaped, outs, strict=True)
        ]


class DeviceReduceScatter:
    """The first half of it, for leaves that are cut along their first axis into equal parts."""

    def __init__(self, batch: ReducedBatch) -> None:
        self._specs, self._size = batch.specs, batch.group.size
        self._shards = [
            _Shards(batch.plan([leaf], seen_by=batch.group.rank), batch, [number])
            for number, leaf in enumerate(batch.leaves)
        ]
        self.plans = [shards.plan for shards in self._shards]

    def run(self, call: GroupCall, columns: Columns, outs: Outs, weights: Weights | None = None) -> Delivery:
        """Reduces with the other ranks; `outs` are written to by whoever calls the delivery."""
        refuse_weights(weights, "weighted values go through the host's memory")
        _meet(call)
        parts = [
            spec.backend.reshape(
                shards.combined(call, columns), (spec.shape[0] // self._size, *spec.shape[1:])
            )
            for spec, shards in zip(self._specs, self._shards, strict=True)
        ]
        return lambda: [
            delivered([part], out, spec.backend)
            for spec, part, out in zip(self._specs, parts, outs, strict=True)
        ]


def _meet(call: GroupCall) -> None:
    """The engine's own collectives have no tags: ranks meet under those of the call first."""
    if call.group.checks != "off":
        call.all_gather(b"ready")
