"""Plans of one algorithm, proved before anything runs, and the reductions prepared from them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from crossdevice.execution.local.prepared import PreparedReduction
from crossdevice.execution.reading.leaf_spec import LeafSpec
from crossdevice.execution.signature_cache import SignatureCache
from crossdevice.plans.builder import PlanBuilder
from crossdevice.plans.ledger import SumPlanner, proved_plan
from crossdevice.plans.packing import Packing
from crossdevice.plans.plan import Plan
from crossdevice.values.device import Device
from crossdevice.values.options import CommunicationOptions, Precision
from crossdevice.values.reduce_op import ReduceOp

MAX_PLANS = 128

PlanKey: TypeAlias = tuple[tuple[Device, ...], tuple[Device, ...], int, int, bool]
"""Devices, destinations, number of elements, number of the pack, whether an engine is used."""


class PlanningAlgorithm(SumPlanner, Protocol):
    """An algorithm as execution sees it."""

    packing: Packing
    reduce_to_device: Device | None
    accumulation_fn: Callable[[tuple[Any, ...]], Any] | None

    @property
    def uses_engine(self) -> bool:
        """True if it leaves whole collectives to a library such as NCCL."""

    def fallback_reason(self, devices: Sequence[Device]) -> str | None:
        """Reason the algorithm cannot run on these devices; None if it can."""


class Planner:
    """Asks one algorithm for plans, and keeps what was prepared from them.

    No plan runs before the ledger has proved that every replica counts exactly once in it. A fused pass
    stands for the plans of all sizes, so one of them is proved for each placement. Plans do not depend on
    dtypes and operations, so those of one size share theirs.
    """

    def __init__(self, algorithm: PlanningAlgorithm) -> None:
        self.algorithm = algorithm
        self.name = type(algorithm).__name__
        self._log_once = LogOnce()
        self._prepared: SignatureCache[PreparedReduction] = SignatureCache()
        self._plans: SignatureCache[Plan] = SignatureCache(MAX_PLANS)

    def prepared(
        self,
        specs: tuple[LeafSpec, ...],
        op: ReduceOp,
        options: CommunicationOptions,
        is_weighted: bool = False,
    ) -> PreparedReduction:
        """The prepared reduction of a batch; kept, so that a training loop prepares once."""
        key = (specs, op, options, is_weighted)
        known = self._prepared.get(key)
        if known is None:
            for spec in dict.fromkeys(specs):
                self._log_fallback(spec, op, options)
            known = self._prepared[key] = PreparedReduction(specs, op, options, self, is_weighted=is_weighted)
        return known

    def engine_unavailable(self, spec: LeafSpec, precision: Precision, op: ReduceOp) -> str | None:
        """Reason the engine cannot be used for these arrays; None if it can."""
        reason = self.algorithm.fallback_reason(spec.devices)
        if reason is not None:
            return reason
        if precision != "fast":
            return f"an engine adds in an order of its own, and precision is {precision}"
        # A mean is a sum that is divided.
        summed = ReduceOp.SUM if op is ReduceOp.MEAN else op
        return spec.backend.engine_unavailable(spec.dtype, summed, len(spec.devices))

    def plan_pack(
        self, spec: LeafSpec, num_elements: int, pack_number: int, precision: Precision, op: ReduceOp
    ) -> Plan:
        """The proved plan for one pack; a lone replica is copied, whatever the algorithm."""
        return self._proved(self._key(spec, num_elements, pack_number, precision, op))

    def prove(self, spec: LeafSpec, pack_number: int, precision: Precision, op: ReduceOp) -> None:
        """Raises PlanError unless the plan of this pack counts every replica exactly once.

        Used for fused passes, whose bits do not depend on the plan: one size stands for all.
        """
        # Enough elements that no shard is empty, and one over, so that shards differ in length.
        num_elements = len(spec.devices) * len(spec.destinations) + 1
        self._proved(self._key(spec, num_elements, pack_number, precision, op))

    def _proved(self, key: PlanKey) -> Plan:
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(*key)
        return plan

    def _key(
        self, spec: LeafSpec, num_elements: int, pack_number: int, precision: Precision, op: ReduceOp
    ) -> PlanKey:
        is_asked = self.algorithm.uses_engine and len(spec.devices) > 1
        has_engine = is_asked and self.engine_unavailable(spec, precision, op) is None
        return spec.devices, spec.destinations, num_elements, pack_number, has_engine

    def _plan(
        self,
        devices: tuple[Device, ...],
        destinations: tuple[Device, ...],
        num_elements: int,
        pack_number: int,
        has_engine: bool,
    ) -> Plan:
        build = PlanBuilder(devices, num_elements, pack_number, has_engine=has_engine)
        if len(devices) == 1:
            return build.plan([build.copy(build.inputs[0], to=device) for device in destinations])
        return proved_plan(self.algorithm, build, destinations)

    def _log_fallback(self, spec: LeafSpec, op: ReduceOp, options: CommunicationOptions) -> None:
        """Logs once if the algorithm does not do what its name promises."""
        reason = self.algorithm.fallback_reason(spec.devices)
        if reason is not None:
            # Once for each reason, not for each set of devices, which come behind a comma.
            subject = reason.partition(",")[0]
            self._log_once.warning(f"{self.name} sums on the first destination instead: {reason}", subject)
        elif self.algorithm.uses_engine and options.precision == "fast" and len(spec.devices) > 1:
            lack = self.engine_unavailable(spec, options.precision, op)
            if lack is not None:
                self._log_once.warning(f"{self.name} does without an engine: {lack}")


logger = logging.getLogger("crossdevice")


class LogOnce:
    """Remembers which warnings it has logged."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def warning(self, text: str, subject: str | None = None) -> None:
        """Logs a warning, unless it, or another one on the same subject, has been logged."""
        if (subject or text) not in self._logged:
            self._logged.add(subject or text)
            logger.warning("%s", text)
