"""Descriptions of reductions."""

from __future__ import annotations

from crossdevice.execution.local.batch import CheckedBatch, Request
from crossdevice.execution.local.gpu_passes import fused_pass_unavailable
from crossdevice.execution.local.planning import Planner
from crossdevice.execution.local.prepared import recipe_for
from crossdevice.execution.reading.leaf_spec import Dense, LeafSpec, items_of
from crossdevice.plans.plan import render_plan
from crossdevice.values.dtypes import ITEM_BYTES
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.quantities import counted
from crossdevice.values.reduce_op import ReduceOp


def explained(request: Request, op: ReduceOp, options: CommunicationOptions, planner: Planner) -> str:
    """Describes how each pack would be reduced, and why; the plans are checked, as those that run."""
    devices, algorithm = request.value.devices, planner.algorithm
    lines = [
        f"{planner.name}: {op.name} of {counted(len(devices), 'replica')}, precision {options.precision}"
    ]
    reason = algorithm.fallback_reason(devices)
    if reason is not None:
        lines.append(f"sums on the first destination instead: {reason}")
    (checked,) = CheckedBatch([request], op, options).leaves
    specs = [leaf.spec for leaf in checked if isinstance(leaf, Dense)]
    if len(specs) < len(checked):
        lines.append(f"{len(checked) - len(specs)} sparse: rows are gathered on one device, then copied")
    if specs and options.lowering == "auto" and all(spec.shares_host_memory for spec in specs):
        lines.append(f"all devices share the host's memory: {_in_one_pass(options)}")
    lines += dict.fromkeys(_on_one_gpu(spec, op, options) for spec in specs if spec.shared_gpu is not None)
    if reason is None and algorithm.uses_engine and len(devices) > 1:
        lines += dict.fromkeys(_engine_line(planner, spec, options, op) for spec in specs)
    for number, pack in enumerate(algorithm.packing.packs(items_of(specs), options.bytes_per_pack)):
        spec = specs[pack[0].item]
        plan = planner.plan_pack(
            spec, sum(stop - start for _, start, stop in pack), number, options.precision, op
        )
        steps = render_plan(plan, ITEM_BYTES[spec.dtype], unsummed=options.precision != "fast")
        lines.append(f"pack {number} ({counted(len(pack), 'value')} of {spec.dtype}): {steps}")
    return "\n".join(lines)


def _on_one_gpu(spec: LeafSpec, op: ReduceOp, options: CommunicationOptions) -> str:
    """Describes the reduction of a leaf that is on one GPU only."""
    where = f"all {spec.dtype} values are in the memory of {spec.shared_gpu}"
    reason = "lowering is off"
    if options.lowering == "auto":
        recipe = recipe_for(spec.own_op or op, options, len(spec.devices))
        unfit = fused_pass_unavailable(spec, recipe, spec.result_dtype(op))
        if unfit is None:
            return f"{where}: {_in_one_pass(options)}"
        reason = unfit
    return f"{where}; the plan below is run step by step: {reason}"


def _in_one_pass(options: CommunicationOptions) -> str:
    """Describes how a fused pass relates to the plan shown."""
    if options.precision == "fast":
        return "one fused pass adds in the order of the plan below"
    return "one fused pass adds in replica order what the plan below was proved to add"


def _engine_line(planner: Planner, spec: LeafSpec, options: CommunicationOptions, op: ReduceOp) -> str:
    lack = planner.engine_unavailable(spec, options.precision, op)
    return f"engine: {spec.backend.engine_name()}" if lack is None else f"does without an engine: {lack}"
