"""Dense batches, prepared once per signature: packs, plans and passes are kept, arrays come and go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from crossdevice.backends.protocol import Array, Backend, Look
from crossdevice.execution.local.gpu_passes import GpuPasses, why_stepped
from crossdevice.execution.local.host_passes import FusedPasses
from crossdevice.execution.local.passes import Passes
from crossdevice.execution.local.stepped_packs import SteppedPacks
from crossdevice.execution.reading.leaf_spec import LeafSpec, items_of
from crossdevice.execution.tracing import Work, flight_recorder, now
from crossdevice.kernels.recipe import Recipe
from crossdevice.plans.packing import Packing
from crossdevice.plans.plan import Plan
from crossdevice.values.device import Device
from crossdevice.values.dtypes import ITEM_BYTES, result_dtype
from crossdevice.values.options import CommunicationOptions, Precision
from crossdevice.values.reduce_op import ReduceOp

PlanPack: TypeAlias = Callable[[LeafSpec, int, int, Precision], Plan]
"""The plan for (a leaf's devices and destinations, elements in the pack, number of the pack, precision)."""


class PreparedReduction:
    """Everything about a batch of dense leaves that does not depend on their elements."""

    def __init__(
        self,
        specs: Sequence[LeafSpec],
        op: ReduceOp,
        options: CommunicationOptions,
        packing: Packing,
        plan_pack: PlanPack,
        via: Device | None = None,
        name: str = "reduction",
    ) -> None:
        """`via` is a device that all sums pass through, if there is one; `name` is for the record."""
        dtypes = {number: result_dtype(spec.dtype, op) for number, spec in enumerate(specs)}
        recipes = [recipe_for(op, options, len(spec.devices)) for spec in specs]
        shared: dict[int, LeafSpec] = {}
        on_gpus: dict[tuple[Backend, Device], dict[int, LeafSpec]] = {}
        for number, spec in enumerate(specs):
            if options.lowering == "auto" and spec.shares_host_memory and (via is None or via.is_host):
                shared[number] = spec
            gpu = spec.shared_gpu if options.lowering == "auto" and via in (None, spec.shared_gpu) else None
            if gpu is not None and why_stepped(spec, recipes[number], dtypes[number]) is None:
                on_gpus.setdefault((spec.backend, gpu), {})[number] = spec
        fused = [*shared, *(number for leaves in on_gpus.values() for number in leaves)]
        apart = {number: spec for number, spec in enumerate(specs) if number not in fused}
        self._num_leaves = len(specs)
        self._passes = FusedPasses(shared, dtypes, shares_results=options.share_results)
        self._gpu_passes = [
            GpuPasses(leaves, dtypes, gpu, shares_results=options.share_results)
            for (_, gpu), leaves in on_gpus.items()
        ]
        self._packs = SteppedPacks(apart, dtypes)
        self._uses_host, self._crosses_memories = bool(shared), bool(apart)
        self._work = _work(name, specs, op, options, num_fused=len(fused))
        passes: dict[int, Passes] = dict.fromkeys(shared, self._passes)
        for leaves, work in zip(on_gpus.values(), self._gpu_passes, strict=True):
            passes.update(dict.fromkeys(leaves, work))
        if options.precision == "fast" or apart:
            for number, pack in enumerate(packing.packs(items_of(specs), options.bytes_per_pack)):
                leaf = pack[0].item
                plan = plan_pack(
                    specs[leaf], sum(stop - start for _, start, stop in pack), number, options.precision
                )
                if leaf in apart:
                    self._packs.add_pack(pack, plan, recipes[leaf])
                elif options.precision == "fast":
                    passes[leaf].add_pack(pack, plan, recipes[leaf])
        if options.precision != "fast":
            # Replicas in order, whatever the plan: the bits of a plan that is run step by step.
            for leaf in fused:
                passes[leaf].add_leaf(leaf, recipes[leaf])

    def run(
        self,
        columns: Sequence[Sequence[Array]],
        outs: Sequence[Sequence[Array] | None],
        look: Look | None = None,
    ) -> list[tuple[Array, ...]]:
        """For each leaf its result on each destination, written to `outs` where given.

        `look`, if given, is how the arrays look that are about to be reduced, and those of `outs`.
        """
        # Not `with recorded(...)`: small calls spend their time here.
        started = now()
        try:
            results = self._passes.run(columns, outs) if self._uses_host else {}
            for passes in self._gpu_passes:
                results.update(passes.run(columns, outs, look))
            if self._crosses_memories:
                results.update(self._packs.run(columns, outs))
        except Exception as error:
            flight_recorder.events.append((self._work, started, now(), 1))
            flight_recorder.dump_after(error)
            raise
        flight_recorder.events.append((self._work, started, now(), 1))
        return [results[number] for number in range(self._num_leaves)]


def recipe_for(op: ReduceOp, options: CommunicationOptions, num_replicas: int) -> Recipe:
    """What is computed of so many replicas, but for the order of a plan."""
    if op is ReduceOp.MEAN:
        return Recipe(ReduceOp.SUM, options.precision, num_replicas)
    return Recipe(op, options.precision)


def _work(
    name: str, specs: Sequence[LeafSpec], op: ReduceOp, options: CommunicationOptions, *, num_fused: int
) -> Work:
    """What the flight recorder says of each run."""
    devices = tuple(dict.fromkeys(device for spec in specs for device in (*spec.devices, *spec.destinations)))
    num_bytes = sum(spec.num_elements * ITEM_BYTES[spec.dtype] for spec in specs)
    how = f"{num_fused} fused, {len(specs) - num_fused} step by step"
    return Work("reduce", f"{name} {op.name}", devices, num_bytes, f"{options.precision}, {how}")
