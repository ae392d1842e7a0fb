"""Leaves that an engine all-reduces on their own devices, without a way through the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from crossdevice.execution.local.combining import combine
from crossdevice.execution.local.prepared import PreparedReduction
from crossdevice.execution.processes.travelling import Delivery
from crossdevice.execution.reading.leaf_spec import Columns, LeafSpec, Outs
from crossdevice.execution.reading.outputs import delivered
from crossdevice.kernels.recipe import Recipe
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.dtypes import result_dtype
from crossdevice.values.options import CommunicationImplementation, CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights

DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")
"""What both NCCL and PyTorch have."""

Prepare: TypeAlias = Callable[[tuple[LeafSpec, ...], ReduceOp, CommunicationOptions], PreparedReduction]
"""How the devices of this process are reduced."""


def is_reduced_on_device(spec: LeafSpec, options: CommunicationOptions, group: ProcessGroup) -> bool:
    """Whether the engine's own all-reduce is used: if it has one, and bits may depend on it.

    That is under `fast` only: an engine adds up in an order, and a dtype, of its own.
    """
    return (
        options.precision == "fast"
        and options.implementation is not CommunicationImplementation.RING
        and spec.backend.name == "torch"
        and spec.dtype in DTYPES
        and spec.num_elements > 0
        and spec.own_op is None
        and group.reduces_on(spec.devices[0].type)
    )


class DeviceReduction:
    """Dense leaves of a batch: summed on each process's first device, all-reduced there, and copied."""

    def __init__(
        self,
        specs: Sequence[LeafSpec],
        op: ReduceOp,
        options: CommunicationOptions,
        counts: Sequence[tuple[int, ...]],
        prepare: Prepare,
    ) -> None:
        self._op = ReduceOp.SUM if op is ReduceOp.MEAN else op
        self._divisors = [sum(count) if op is ReduceOp.MEAN else None for count in counts]
        self._dtypes = [result_dtype(spec.dtype, op) for spec in specs]
        self._specs = specs
        to_first = tuple(
            LeafSpec(spec.backend, spec.dtype, spec.shape, spec.devices, spec.devices[:1]) for spec in specs
        )
        self._local = prepare(to_first, self._op, options)

    def run(self, call: GroupCall, columns: Columns, outs: Outs, weights: Weights | None = None) -> Delivery:
        """Reduces with the other ranks; `outs` are written to by whoever calls the delivery."""
        assert weights is None, "weights are never `fast`"
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
