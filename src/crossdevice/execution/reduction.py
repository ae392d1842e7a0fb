"""Dense batches, prepared once per signature: packs, plans and passes are kept, arrays come and go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from crossdevice.backends.protocol import Array
from crossdevice.execution.fused_passes import FusedPasses
from crossdevice.execution.leaf_spec import LeafSpec, items_of
from crossdevice.execution.stepped_packs import SteppedPacks
from crossdevice.execution.tracing import Work, flight_recorder, now
from crossdevice.kernels.host.recipe import Recipe
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
        lowers = options.lowering == "auto" and (via is None or via.is_host)
        shared = {number: spec for number, spec in enumerate(specs) if lowers and spec.shares_host_memory}
        apart = {number: spec for number, spec in enumerate(specs) if number not in shared}
        dtypes = {number: result_dtype(spec.dtype, op) for number, spec in enumerate(specs)}
        self._num_leaves = len(specs)
        self._passes = FusedPasses(shared, dtypes, shares_results=options.share_results)
        self._packs = SteppedPacks(apart, dtypes)
        self._crosses_memories = bool(apart)
        self._work = _work(name, specs, op, options, num_fused=len(shared))
        recipes = [_recipe(op, options, len(spec.devices)) for spec in specs]
        if options.precision == "fast" or apart:
            for number, pack in enumerate(packing.packs(items_of(specs), options.bytes_per_pack)):
                leaf = pack[0].item
                plan = plan_pack(
                    specs[leaf], sum(stop - start for _, start, stop in pack), number, options.precision
                )
                if leaf in apart:
                    self._packs.add_pack(pack, plan, recipes[leaf])
                elif options.precision == "fast":
                    self._passes.add_pack(pack, plan, recipes[leaf])
        if options.precision != "fast":
            # Replicas in order, whatever the plan: the bits of a plan that is run step by step.
            for leaf in shared:
                self._passes.add_leaf(leaf, recipes[leaf])

    def run(
        self, columns: Sequence[Sequence[Array]], outs: Sequence[Sequence[Array] | None]
    ) -> list[tuple[Array, ...]]:
        """For each leaf its result on each destination, written to `outs` where given."""
        # Not `with recorded(...)`: small calls spend their time here.
        started = now()
        try:
            results = self._passes.run(columns, outs)
            if self._crosses_memories:
                results.update(self._packs.run(columns, outs))
        except Exception as error:
            flight_recorder.events.append((self._work, started, now(), 1))
            flight_recorder.dump_after(error)
            raise
        flight_recorder.events.append((self._work, started, now(), 1))
        return [results[number] for number in range(self._num_leaves)]


def _recipe(op: ReduceOp, options: CommunicationOptions, num_replicas: int) -> Recipe:
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
