"""The base of all algorithms: reads values, has them planned, executed and wrapped."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from crossdevice.costs.rounds import Round
from crossdevice.costs.topology import Topology
from crossdevice.errors import ConversionError
from crossdevice.execution.call_memory import CallMemory
from crossdevice.execution.explaining import explained
from crossdevice.execution.local.batch import Request, check_batch, reduce_batch
from crossdevice.execution.local.copying import copied_into, copied_to, shared_with
from crossdevice.execution.local.gathering import gathered
from crossdevice.execution.local.prepared import PreparedReduction
from crossdevice.execution.processes.between_processes import BetweenProcesses
from crossdevice.execution.reading.destinations import read_destinations
from crossdevice.execution.reading.leaf_spec import LeafSpec
from crossdevice.execution.reading.outputs import wrapped
from crossdevice.execution.reading.structures import checked_outs, checked_pairs, spread_outs, spread_pairs
from crossdevice.execution.reading.values import read_value
from crossdevice.execution.remarks import Remarks
from crossdevice.execution.signature_cache import SignatureCache
from crossdevice.plans.builder import PlanBuilder
from crossdevice.plans.packing import Packing
from crossdevice.plans.plan import Plan
from crossdevice.plans.steps import Buffer
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.values.device import Device
from crossdevice.values.distributed import DistributedValues, PerReplica
from crossdevice.values.options import CommunicationOptions, Precision, as_options
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.replica_scope import check_cross_replica

_KEPT = ("_kept", "_memory", "_between")
"""The attributes in which an object keeps what it prepared."""


class CrossDeviceOps:
    """Combines values of several devices (reduce, batch_reduce, gather) and copies them (broadcast).

    An algorithm of ours overrides `plan_sum`. To bring your own arithmetic instead, override
    `reduce_implementation`; the two other `*_implementation` hooks are there for batches and broadcasts.

    Nested structures are accepted wherever a value is, and stay where they are: a PerReplica of
    dicts becomes a Mirrored of dicts, a dict of PerReplicas a dict of Mirrored.
    """

    packing: Packing = Packing()
    reduce_to_device: Device | None = None
    uses_engine: bool = False
    """Whether its plans have engine steps where `build.has_engine` says so."""
    accumulation_fn: Callable[[tuple[Any, ...]], Any] | None = None
    group: ProcessGroup | None = None
    """Other processes whose replicas take part in every reduction and gather."""

    def __setattr__(self, name: str, value: Any) -> None:
        """What was prepared for other settings is forgotten."""
        object.__setattr__(self, name, value)
        self._forget(name)

    def __delattr__(self, name: str) -> None:
        """The class's own setting counts again."""
        object.__delattr__(self, name)
        self._forget(name)

    def __getstate__(self) -> dict[str, Any]:
        """Its settings; what was prepared is prepared again."""
        return {name: value for name, value in self.__dict__.items() if name not in _KEPT}

    def plan_sum(self, build: PlanBuilder, destinations: Sequence[Device]) -> Sequence[Buffer]:
        """Plans one pack: a buffer on each destination that holds the sum of all `build.inputs`."""
        raise NotImplementedError(
            f"{type(self).__name__} overrides neither plan_sum nor reduce_implementation"
        )

    def plan_rounds(self, topology: Topology, num_bytes: float) -> Sequence[Round] | None:  # noqa: ARG002
        """An all-reduce on all of a topology as rounds, to time thousands of devices; None if unknown."""
        return None

    def chosen_options(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """The options that count when a call is given these; None stands for none."""
        return as_options(options)

    def value_of_rank(self, value: Any, rank: int, options: CommunicationOptions | None = None) -> Any:
        """One process's value, on every process of the group; all bring one of the same shapes and dtypes."""
        check_cross_replica("value_of_rank")
        if self.group is None:
            return value
        return self._between.value_of_rank(value, rank, self.chosen_options(options))

    def fallback_reason(self, devices: Sequence[Device]) -> str | None:  # noqa: ARG002
        """Why values on these devices are not reduced by this algorithm's own means; None if they are."""
        return None

    # ---------------------------------------------------------------- the public calls

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
        out: Any = None,
    ) -> Any:
        """Combines a value's replicas and puts the result on each destination.

        Args:
            per_replica_value: a DistributedValues, or anything array-like as its only replica.
            destinations: what says where: a DistributedValues, variable, array or device string.
                The value itself, for an all-reduce.
            experimental_hints: the older name of `options`.
            out: arrays to write to, in place of new ones; the value itself, to reduce in place.

        Returns:
            A bare array for one destination device, a Mirrored for several.
        """
        chosen = experimental_hints if options is None else options
        key, known = self._memory.find(reduce_op, per_replica_value, destinations, chosen)
        if known is not None:
            check_cross_replica("reduce")
            return known(per_replica_value.values, out)
        pairs = [(per_replica_value, destinations)]
        (answer,) = self._reduce(reduce_op, pairs, chosen, [out], "reduce")
        if key is not None and self._can_remember:
            op, options = ReduceOp(reduce_op), self.chosen_options(chosen)
            self._memory.keep(key, op, per_replica_value, destinations, options)
        return answer

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
        out: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Reduces many values at once: they share packs and passes. `out` has an entry for each pair."""
        pairs = checked_pairs(value_destination_pairs)
        chosen = experimental_hints if options is None else options
        outs = [None] * len(pairs) if out is None else checked_outs(out, len(pairs))
        key, known = self._memory.find_batch(reduce_op, pairs, chosen, outs)
        if known is not None:
            check_cross_replica("batch_reduce")
            return known()
        answers = self._reduce(reduce_op, pairs, chosen, outs, "batch_reduce")
        if key is not None and self._can_remember:
            self._memory.keep_batch(key, ReduceOp(reduce_op), pairs, self.chosen_options(chosen), outs)
        return answers

    def broadcast(
        self,
        tensor: Any,
        destinations: Any,
        *,
        options: CommunicationOptions | None = None,
        out: Any = None,
    ) -> Any:
        """Copies a value to each destination; a destination variable is not written.

        With `share_results` in the options, destinations in the value's own memory get the value itself,
        read-only where the library can say so: nothing is copied.
        """
        check_cross_replica("broadcast")
        devices = read_destinations(destinations)
        shares = self.chosen_options(options).share_results
        if isinstance(tensor, PerReplica):
            raise ConversionError(
                "broadcast takes one value; a PerReplica has a different one for each replica"
            )
        if out is not None:
            return copied_into(tensor, devices, out)
        if shares and not self._overrides("broadcast_implementation"):
            return shared_with(tensor, devices)
        return self.broadcast_implementation(tensor, destinations)

    def gather(
        self,
        per_replica_value: Any,
        destinations: Any,
        axis: int = 0,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Concatenates a value's replicas along `axis`, in which they may differ, on each destination."""
        check_cross_replica("gather")
        chosen = self.chosen_options(options)
        pairs, rebuilt = spread_pairs([(per_replica_value, destinations)])
        placed = [(value, read_destinations(target)) for value, target in pairs]
        if self.group is not None:
            return rebuilt(self._between.gather(placed, axis, chosen))[0]
        return rebuilt([gathered(value, devices, axis) for value, devices in placed])[0]

    def explain(
        self,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
        reduce_op: ReduceOp | str = ReduceOp.SUM,
    ) -> str:
        """What `reduce` would do with this value, as text; nothing is computed."""
        op, chosen = ReduceOp(reduce_op), self.chosen_options(options)
        pairs, _ = spread_pairs([(per_replica_value, destinations)])
        requests = [Request(read_value(value), read_destinations(target)) for value, target in pairs]
        if self.group is not None:
            return "\n\n".join(self._between.explained(request, op, chosen) for request in requests)
        return "\n\n".join(explained(request, op, chosen, self) for request in requests)

    # ---------------------------------------------------------------- hooks for subclasses

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Any,
        options: CommunicationOptions,
    ) -> Any:
        """Reduces one value; may be overridden. Arguments are checked and `options` is never None."""
        request = Request(read_value(per_replica_value), read_destinations(destinations))
        return reduce_batch([request], reduce_op, options, self)[0]

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Reduces many values; may be overridden. One by one if only `reduce_implementation` is."""
        if self._overrides("reduce_implementation"):
            return [
                self.reduce_implementation(reduce_op, value, destinations, options)
                for value, destinations in value_destination_pairs
            ]
        requests = [
            Request(read_value(value), read_destinations(destinations))
            for value, destinations in value_destination_pairs
        ]
        return reduce_batch(requests, reduce_op, options, self)

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Copies one value to each destination device; may be overridden."""
        return copied_to(tensor, read_destinations(destinations))

    # ---------------------------------------------------------------- what execution asks for

    def prepared(
        self, specs: tuple[LeafSpec, ...], op: ReduceOp, options: CommunicationOptions
    ) -> PreparedReduction:
        """The prepared reduction of this batch; kept, so that a training loop prepares once."""
        key = (specs, op, options)
        known = self._kept.get(key)
        if known is None:
            self._check_plannable(specs, op, options)
            known = PreparedReduction(
                specs,
                op,
                options,
                self.packing,
                functools.partial(self.plan_pack, op=op),
                via=self.reduce_to_device,
                name=type(self).__name__,
            )
            self._kept[key] = known
        return known

    def engine_lack(self, spec: LeafSpec, precision: Precision, op: ReduceOp) -> str | None:
        """Why an algorithm that uses an engine does without for these arrays; None if it does not."""
        reason = self.fallback_reason(spec.devices)
        if reason is not None:
            return reason
        if precision != "fast":
            return f"an engine adds in an order of its own, and precision is {precision}"
        # A mean is a sum that is divided.
        summed = ReduceOp.SUM if op is ReduceOp.MEAN else op
        return spec.backend.engine_lack(spec.dtype, summed, len(spec.devices))

    def plan_pack(
        self, spec: LeafSpec, num_elements: int, pack_number: int, precision: Precision, op: ReduceOp
    ) -> Plan:
        """The plan for one pack; a lone replica is copied, whatever the algorithm."""
        is_alone = len(spec.devices) == 1
        has_engine = self.uses_engine and not is_alone and self.engine_lack(spec, precision, op) is None
        build = PlanBuilder(spec.devices, num_elements, pack_number, has_engine=has_engine)
        if is_alone:
            return build.plan([build.copy(build.inputs[0], to=device) for device in spec.destinations])
        return build.plan(self.plan_sum(build, spec.destinations))

    @property
    def _can_remember(self) -> bool:
        """Whether a known call can be run at once: here, by our own means."""
        return self.accumulation_fn is None and self.group is None and not self._overrides_hooks()

    def _forget(self, changed: str) -> None:
        if not changed.startswith("_"):
            for kept in _KEPT:
                self.__dict__.pop(kept, None)

    @functools.cached_property
    def _memory(self) -> CallMemory:
        return CallMemory(self)

    @functools.cached_property
    def _between(self) -> BetweenProcesses:
        assert self.group is not None
        return BetweenProcesses(self.group, self.prepared)

    @functools.cached_property
    def _kept(self) -> SignatureCache[PreparedReduction]:
        return SignatureCache()

    @functools.cached_property
    def _remarks(self) -> Remarks:
        return Remarks()

    def _check_plannable(
        self, specs: Sequence[LeafSpec], op: ReduceOp, options: CommunicationOptions
    ) -> None:
        for spec in specs:
            if len(spec.devices) > 1 and not self._overrides("plan_sum"):
                self.plan_sum(PlanBuilder(spec.devices, 0), spec.destinations)
            reason = self.fallback_reason(spec.devices)
            if reason is not None:
                self._remarks.make(f"{type(self).__name__} sums on the first destination instead: {reason}")
            elif self.uses_engine and options.precision == "fast" and len(spec.devices) > 1:
                lack = self.engine_lack(spec, options.precision, op)
                if lack is not None:
                    self._remarks.make(f"{type(self).__name__} does without an engine: {lack}")

    def _overrides_hooks(self) -> bool:
        return self._overrides("reduce_implementation") or self._overrides("batch_reduce_implementation")

    def _overrides(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(CrossDeviceOps, method)

    # ---------------------------------------------------------------- from pairs to results

    def _reduce(
        self,
        reduce_op: ReduceOp | str,
        pairs: Sequence[tuple[Any, Any]],
        options: Any,
        outs: Sequence[Any],
        call: str,
    ) -> list[Any]:
        check_cross_replica(call)
        op, chosen = ReduceOp(reduce_op), self.chosen_options(options)
        spread, rebuilt = spread_pairs(pairs)
        requests = [
            Request(read_value(value), read_destinations(destinations), out)
            for (value, destinations), out in zip(spread, spread_outs(pairs, outs), strict=True)
        ]
        if self.group is not None:
            return rebuilt(self._between.reduce(requests, op, chosen))
        if self._overrides_hooks():
            return rebuilt(
                self._reduce_by_hooks(op, requests, [target for _, target in spread], chosen, call)
            )
        return rebuilt(reduce_batch(requests, op, chosen, self))

    def _reduce_by_hooks(
        self,
        op: ReduceOp,
        requests: Sequence[Request],
        destinations: Sequence[Any],
        options: CommunicationOptions,
        call: str,
    ) -> list[Any]:
        """Hands every leaf to the overridden hook; a lone replica that stays where it is needs none."""
        check_batch(requests, op, options)
        answers: list[Any] = [None] * len(requests)
        pairs: list[tuple[PerReplica, Any]] = []
        for number, request in enumerate(requests):
            if len(request.value.devices) == 1 and set(request.value.devices) == set(request.destinations):
                answers[number] = reduce_batch([request], op, options, self)[0]
            else:
                pairs += [
                    (PerReplica.of(leaf.arrays, request.value.devices), destinations[number])
                    for leaf in request.value.leaves
                ]
        if call == "reduce" and (self._overrides("reduce_implementation") or self._overrides("plan_sum")):
            made = [self.reduce_implementation(op, value, target, options) for value, target in pairs]
        else:
            made = list(self.batch_reduce_implementation(op, pairs, options)) if pairs else []
        results = iter(made)
        for number, (value, devices, out) in enumerate(requests):
            if answers[number] is None:
                leaves = [next(results) for _ in value.leaves]
                columns = [leaf.values if isinstance(leaf, DistributedValues) else (leaf,) for leaf in leaves]
                answer = leaves[0] if value.structure is None else wrapped(columns, value.structure, devices)
                answers[number] = answer if out is None else copied_into(answer, devices, out)
        return answers
