"""What a reduction would do, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from crossdevice.execution.local.batch import Request, checked_leaves
from crossdevice.execution.local.gpu_passes import why_stepped
from crossdevice.execution.local.prepared import recipe_for
from crossdevice.execution.reading.leaf_spec import Dense, LeafSpec, items_of
from crossdevice.plans.packing import Packing
from crossdevice.plans.plan import Plan
from crossdevice.plans.rendering import render_plan
from crossdevice.values.device import Device
from crossdevice.values.dtypes import ITEM_BYTES, result_dtype
from crossdevice.values.options import CommunicationOptions, Precision
from crossdevice.values.reduce_op import ReduceOp


class PlanningAlgorithm(Protocol):
    """What an explanation asks of an algorithm."""

    packing: Packing

    def fallback_reason(self, devices: Sequence[Device]) -> str | None:
        """Why the algorithm's own means cannot be used; None if they can."""

    @property
    def uses_engine(self) -> bool:
        """Whether it leaves whole collectives to a library such as NCCL."""

    def engine_lack(self, spec: LeafSpec, precision: Precision, op: ReduceOp) -> str | None:
        """Why an algorithm that uses an engine does without; None if it does not."""

    def plan_pack(
        self, spec: LeafSpec, num_elements: int, pack_number: int, precision: Precision, op: ReduceOp
    ) -> Plan:
        """The plan for one pack."""


def explained(
    request: Request, op: ReduceOp, options: CommunicationOptions, algorithm: PlanningAlgorithm
) -> str:
    """How each pack of the request would be reduced, and why."""
    devices = request.value.devices
    lines = [
        f"{type(algorithm).__name__}: {op.name} of {len(devices)} replicas, precision {options.precision}"
    ]
    reason = algorithm.fallback_reason(devices)
    if reason is not None:
        lines.append(f"sums on the first destination instead: {reason}")
    checked = checked_leaves(request, op, options)
    specs = [leaf.spec for leaf in checked if isinstance(leaf, Dense)]
    if len(specs) < len(checked):
        lines.append(f"{len(checked) - len(specs)} sparse: rows are gathered on one device, then copied")
    if specs and options.lowering == "auto" and all(spec.shares_host_memory for spec in specs):
        lines.append("all devices share the host's memory: the plan below is lowered to one fused pass")
    lines += dict.fromkeys(_on_one_gpu(spec, op, options) for spec in specs if spec.shared_gpu is not None)
    if reason is None and algorithm.uses_engine and len(devices) > 1:
        lines += dict.fromkeys(_engine_line(algorithm, spec, options, op) for spec in specs)
    for number, pack in enumerate(algorithm.packing.packs(items_of(specs), options.bytes_per_pack)):
        spec = specs[pack[0].item]
        plan = algorithm.plan_pack(
            spec, sum(stop - start for _, start, stop in pack), number, options.precision, op
        )
        lines.append(
            f"pack {number} ({len(pack)} values of {spec.dtype}): {render_plan(plan, ITEM_BYTES[spec.dtype])}"
        )
    return "\n".join(lines)


def _on_one_gpu(spec: LeafSpec, op: ReduceOp, options: CommunicationOptions) -> str:
    """What becomes of a leaf that is on one GPU only."""
    where = f"all {spec.dtype} values are in the memory of {spec.shared_gpu}"
    reason = "lowering is off"
    if options.lowering == "auto":
        recipe = recipe_for(op, options, len(spec.devices))
        unfit = why_stepped(spec, recipe, result_dtype(spec.dtype, op))
        if unfit is None:
            return f"{where}: the plan below is lowered to one fused pass on the GPU"
        reason = unfit
    return f"{where}; the plan below is run step by step: {reason}"


def _engine_line(
    algorithm: PlanningAlgorithm, spec: LeafSpec, options: CommunicationOptions, op: ReduceOp
) -> str:
    lack = algorithm.engine_lack(spec, options.precision, op)
    return f"engine: {spec.backend.engine_name()}" if lack is None else f"does without an engine: {lack}"
