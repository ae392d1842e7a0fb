"""Leaves that NCCL all-reduces itself, on their own devices: what it does there is not proved."""

from __future__ import annotations

from collections.abc import Sequence

from crossdevice.execution.local.combining import combine
from crossdevice.execution.processes.gpu_peers import peers_unavailable
from crossdevice.execution.processes.programs import Delivery
from crossdevice.execution.processes.reduced_batch import ReducedBatch, Wanted
from crossdevice.execution.reading.leaf_spec import Columns, LeafSpec, Outs
from crossdevice.execution.reading.outputs import delivered
from crossdevice.plans.tasks import TaskPlan
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.dtypes import result_dtype
from crossdevice.values.options import CommunicationImplementation
from crossdevice.values.recipe import Recipe
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights, refuse_weights

DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")
"""What both NCCL and PyTorch have."""


def nccl_all_reduce_unavailable(wanted: Wanted) -> str | None:
    """Reason the engine's own all-reduce cannot be used; None if it has one, and bits may depend on it.

    That is under `fast` only: an engine adds up in an order, and a dtype, of its own.
    """
    spec, op, options, group, *_ = wanted
    if options.precision != "fast" or options.implementation is CommunicationImplementation.RING:
        return "bits may not depend on an engine: precision is not `fast`, or `ring` was asked for"
    if spec.backend.name != "torch" or spec.dtype not in DTYPES or not spec.num_elements:
        return f"the engine reduces PyTorch's tensors of {', '.join(DTYPES)}"
    if spec.own_op is not None:
        return "the engine only has the operation of the whole batch"
    if not group.reduces_on(spec.devices[0].type):
        return f"{group.engine_name} does not reduce on {spec.devices[0]}"
    if peers_unavailable(spec, op, options, group) is None:
        return "ranks reach each other's GPU memory, and may share GPUs"
    return None


class DeviceReduction:
    """Dense leaves of a batch: summed on each process's first device, all-reduced there, and copied."""

    plans: Sequence[TaskPlan] = ()
    """None: the engine lays out what it does."""

    def __init__(self, batch: ReducedBatch) -> None:
        specs, op, options, counts = batch.specs, batch.op, batch.options, batch.counts
        self._op = ReduceOp.SUM if op is ReduceOp.MEAN else op
        self._divisors = [sum(count) if op is ReduceOp.MEAN else None for count in counts]
        self._dtypes = [result_dtype(spec.dtype, op) for spec in specs]
        self._specs = specs
        to_first = tuple(
            LeafSpec(spec.backend, spec.dtype, spec.shape, spec.devices, spec.devices[:1]) for spec in specs
        )
        self._local = batch.prepare(to_first, self._op, options)

    def run(self, call: GroupCall, columns: Columns, outs: Outs, weights: Weights | None = None) -> Delivery:
        """Reduces with the other ranks; `outs` are written to by whoever calls the delivery."""
        refuse_weights(weights, "weights are never `fast`")
        partials = self._local.run(columns, [None] * len(columns))
        if call.group.checks != "off":
            # The engine's own collectives have no tags: ranks meet under those of the call first.
            call.all_gather(b"ready")
        totals = []
        for number, (spec, (partial,)) in enumerate(zip(self._specs, partials, strict=True)):
            backend, at = spec.backend, spec.devices[0]
            call.all_reduce(partial, at.type, self._op.name)
            if self._divisors[number] is not None:
                recipe = Recipe(self._op, "fast", self._divisors[number])
                mean = combine(backend, [backend.flat(partial)], recipe, self._dtypes[number], at)
                partial = backend.reshape(mean, spec.shape)
            totals.append(partial)
        return lambda: [
            delivered([spec.backend.copy(total, device) for device in spec.destinations], out, spec.backend)
            for spec, total, out in zip(self._specs, totals, outs, strict=True)
        ]
