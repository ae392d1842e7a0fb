"""Leaves whose equal shards travel from GPU to GPU by NCCL, and are combined there in the order of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from crossdevice.backends.protocol import Array
from crossdevice.execution.local.prepared import PreparedReduction
from crossdevice.execution.processes.peers import peers_unavailable
from crossdevice.execution.processes.reduced_batch import ReducedBatch, Wanted
from crossdevice.execution.processes.travelling import Delivery
from crossdevice.execution.reading.leaf_spec import Columns, LeafSpec, Outs
from crossdevice.execution.reading.outputs import delivered
from crossdevice.plans.tasks import TaskPlan
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
    if parts is not None and not parts.is_even:
        return "parts are not equal, or not along the first axis"
    return None


class _Pack(NamedTuple):
    """Leaves of one dtype on one device, end to end, and what combines this rank's shard of them."""

    leaves: Sequence[int]
    shard_length: int
    reduction: PreparedReduction


class DeviceShards:
    """Dense leaves with one replica on each rank, reduced without a way through the host's memory.

    An all-to-all gives each rank its shard of every rank's arrays, one fused pass combines them in the order
    of ranks, and an all-gather distributes the results: the bytes of a ring, and the bits of one process.
    """

    plans: Sequence[TaskPlan] = ()
    """None: its shards are laid out here."""

    def __init__(self, batch: ReducedBatch) -> None:
        specs, op, options, prepare = batch.specs, batch.op, batch.options, batch.prepare
        size = batch.group.size
        self._specs, self._size = specs, size
        alike: dict[object, list[int]] = {}
        for number, spec in enumerate(specs):
            alike.setdefault((spec.dtype, spec.devices), []).append(number)
        self._packs = []
        for leaves in alike.values():
            first = specs[leaves[0]]
            length = -(-sum(specs[leaf].num_elements for leaf in leaves) // size)
            self._packs.append(
                _Pack(leaves, length, prepare((_shards_of(first, length, size),), op, options))
            )

    def run(self, call: GroupCall, columns: Columns, outs: Outs, weights: Weights | None = None) -> Delivery:
        """Reduces with the other ranks; `outs` are written to by whoever calls the delivery."""
        refuse_weights(weights, "weighted values go through the host's memory")
        _meet(call)
        results: dict[int, Array] = {}
        for pack in self._packs:
            whole = self._reduced(call, pack, [columns[leaf][0] for leaf in pack.leaves])
            lengths = [self._specs[leaf].num_elements for leaf in pack.leaves]
            edges = itertools.pairwise(itertools.accumulate(lengths, initial=0))
            for leaf, (start, stop) in zip(pack.leaves, edges, strict=True):
                spec = self._specs[leaf]
                results[leaf] = spec.backend.reshape(spec.backend.part_of(whole, start, stop), spec.shape)
        return lambda: [
            delivered(
                [spec.backend.copy(results[leaf], device) for device in spec.destinations], out, spec.backend
            )
            for leaf, (spec, out) in enumerate(zip(self._specs, outs, strict=True))
        ]

    def _reduced(self, call: GroupCall, pack: _Pack, arrays: Sequence[Array]) -> Array:
        """The pack's result, flat, with some elements more if it has no equal shards."""
        spec, length = self._specs[pack.leaves[0]], pack.shard_length
        backend, at = spec.backend, spec.devices[0]
        xp = backend.namespace()
        flats = [backend.flat(array) for array in arrays]
        missing = self._size * length - sum(flat.shape[0] for flat in flats)
        if missing:
            flats.append(xp.zeros((missing,), dtype=flats[0].dtype, device=flats[0].device))
        sent = flats[0] if len(flats) == 1 else backend.concat(flats, 0, at)
        shard = _combined(call, sent, spec, pack.reduction)
        whole = xp.empty((self._size * length,), dtype=shard.dtype, device=shard.device)
        call.all_gather_arrays(whole, shard, at.type)
        return whole


class DeviceReduceScatter:
    """The first half of it, for leaves that are cut along their first axis into equal parts."""

    plans: Sequence[TaskPlan] = ()
    """None, as above."""

    def __init__(self, batch: ReducedBatch) -> None:
        specs, op, options, prepare = batch.specs, batch.op, batch.options, batch.prepare
        size = batch.group.size
        self._specs, self._size = specs, size
        self._reductions = [
            prepare((_shards_of(spec, spec.num_elements // size, size),), op, options) for spec in specs
        ]

    def run(self, call: GroupCall, columns: Columns, outs: Outs, weights: Weights | None = None) -> Delivery:
        """Reduces with the other ranks; `outs` are written to by whoever calls the delivery."""
        refuse_weights(weights, "weighted values go through the host's memory")
        _meet(call)
        parts = [
            spec.backend.reshape(
                _combined(call, spec.backend.flat(arrays[0]), spec, reduction),
                (spec.shape[0] // self._size, *spec.shape[1:]),
            )
            for spec, arrays, reduction in zip(self._specs, columns, self._reductions, strict=True)
        ]
        return lambda: [
            delivered([part], out, spec.backend)
            for spec, part, out in zip(self._specs, parts, outs, strict=True)
        ]


def _shards_of(spec: LeafSpec, length: int, size: int) -> LeafSpec:
    """One rank's shard of the arrays of all ranks, which is on the leaf's device."""
    return LeafSpec(spec.backend, spec.dtype, (length,), spec.devices * size, spec.devices)


def _meet(call: GroupCall) -> None:
    """The engine's own collectives have no tags: ranks meet under those of the call first."""
    if call.group.checks != "off":
        call.all_gather(b"ready")


def _combined(call: GroupCall, sent: Array, spec: LeafSpec, reduction: PreparedReduction) -> Array:
    """This rank's shard of what all ranks send, combined in their order."""
    backend, size = spec.backend, call.group.size
    received = backend.namespace().empty_like(sent)
    call.all_to_all(received, sent, spec.devices[0].type)
    length = sent.shape[0] // size
    contributions = [backend.part_of(received, rank * length, (rank + 1) * length) for rank in range(size)]
    ((shard,),) = reduction.run([contributions], [None])
    return shard
