"""The base of all algorithms: the public calls, and what a subclass may override."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from crossdevice.algorithms.prepared_calls import PreparedCalls
from crossdevice.algorithms.settings import Settings
from crossdevice.algorithms.sharded_calls import ShardedCalls
from crossdevice.costs.rounds import Round
from crossdevice.costs.topology import Topology
from crossdevice.errors import ConversionError, OptionError, ReduceOpError
from crossdevice.execution.differentiation import read_recorded_leaves, recorded_leaves
from crossdevice.execution.explaining import explained
from crossdevice.execution.fingerprints import check_same as check_replicas_same
from crossdevice.execution.known_calls import Flattened, KnownCalls
from crossdevice.execution.linear_maps import Calls, Combination, Concatenation
from crossdevice.execution.local.batch import CheckedBatch, Request, read_requests
from crossdevice.execution.local.copying import component_of, copied_into, copied_to, shared_with
from crossdevice.execution.local.gathering import Placed, gathered
from crossdevice.execution.local.hooks import check_result, reduced_by_hook
from crossdevice.execution.local.planning import Planner
from crossdevice.execution.processes.between_processes import BetweenProcesses
from crossdevice.execution.reading.destinations import read_destinations
from crossdevice.execution.reading.structures import checked_outs, checked_pairs, spread_pairs
from crossdevice.execution.reading.values import read_value
from crossdevice.plans.builder import PlanBuilder
from crossdevice.plans.packing import Packing
from crossdevice.plans.steps import Buffer
from crossdevice.values.device import Device
from crossdevice.values.distributed import PerReplica, as_distributed
from crossdevice.values.options import CommunicationOptions, as_options, either
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.replica_scope import check_cross_replica
from crossdevice.values.weights import factors_of, weights_for


class CrossDeviceOps(PreparedCalls, ShardedCalls, Settings):
    """Combines values of several devices (reduce, batch_reduce, gather) and copies them (broadcast).

    `reduce_scatter`, `all_gather` and `all_to_all` do the same with a part for each replica.

    Nested structures are accepted wherever a value is, and the result has the same structure: a
    PerReplica of dicts becomes a Mirrored of dicts, a dict of PerReplicas becomes a dict of Mirrored.

    To write an algorithm, override `plan_sum`. To replace the arithmetic, override
    `reduce_implementation`; the two other `*_implementation` hooks are for batches and broadcasts.

    >>> import numpy as np
    >>> from crossdevice import PerReplica, RingAllReduce
    >>> value = PerReplica([np.float32([1, 2]), np.float32([3, 4])])
    >>> RingAllReduce().reduce("mean", value, "cpu:0")
    array([2., 3.], dtype=float32)
    """

    reduce_to_device: Device | None = None
    uses_engine: bool = False
    """Whether its plans contain engine steps if `build.has_engine` is true."""
    accumulation_fn: Callable[[tuple[Any, ...]], Any] | None = None

    # ---------------------------------------------------------------- what an algorithm says

    def plan_sum(self, build: PlanBuilder, destinations: Sequence[Device]) -> Sequence[Buffer]:
        """Plans one pack; returns a buffer on each destination with the sum of all `build.inputs`."""
        raise NotImplementedError(
            f"{type(self).__name__} overrides neither plan_sum nor reduce_implementation"
        )

    def plan_rounds(self, topology: Topology, num_bytes: float) -> Sequence[Round] | None:  # noqa: ARG002
        """The rounds of an all-reduce over a topology, to time thousands of devices; None if unknown."""
        return None

    def fallback_reason(self, devices: Sequence[Device]) -> str | None:  # noqa: ARG002
        """Reason this algorithm cannot be used for values on these devices; None if it can."""
        return None

    # ---------------------------------------------------------------- the public calls

    def check_same(self, value: Any) -> None:
        """Raises BitsMismatchError unless all replicas of a distributed value hold the same bits.

        The message names the replicas in the minority, and the leaves in which they differ.

        Args:
            value: a DistributedValues, or a structure of them.

        Raises:
            BitsMismatchError: replicas differ.

        >>> from crossdevice import Mirrored, RingAllReduce
        >>> RingAllReduce().check_same(Mirrored([[1.0, 2.0], [1.0, 2.0]]))
        """
        check_replicas_same(value)

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
        out: Any = None,
        weights: Any = None,
    ) -> Any:
        """Combines the replicas of a value and puts the result on each destination.

        Args:
            reduce_op: `"sum"`, `"mean"`, `"min"`, `"max"`, `"prod"`, `"median"`, a `ReduceOp` or a
                `trimmed_mean`.
            per_replica_value: a DistributedValues; anything array-like counts as one replica.
            destinations: the devices for the result, given as a DistributedValues, variable, array or
                device string. Pass the value itself for an all-reduce.
            options: precision, deadline, packing and more; None takes the defaults.
            experimental_hints: the older name of `options`.
            out: arrays for the result instead of new ones; pass the value itself to reduce in place.
            weights: a number for each replica, by which it is multiplied. SUM takes any real numbers; MEAN
                divides by their sum. Products and sums are wide, and rounded once, also under `"fast"`.

        Returns:
            A bare array for one destination device, a Mirrored for several.

        Raises:
            MismatchError: replicas differ in shape, dtype, structure, device or library; the message names
                the odd one out.
            DtypeError: the operation is not defined for this dtype.
            ReduceOpError: the operation is unknown.
            OptionError: an option, a weight or a size is outside its range; or the algorithm is unknown.
            ConversionError: something cannot be read as an array.
            DestinationError: `destinations` names no device.
            OutError: `out` does not fit the results.
            ContextError: the call is made inside a replica function; use `get_replica_context()` there.
            DeadlineError: other processes did not come in time.
            ProcessGroupError: a process of the group was lost.

        >>> import numpy as np
        >>> from crossdevice import DirectAllReduce, PerReplica
        >>> value = PerReplica([np.float32([1, 2]), np.float32([3, 4])])
        >>> DirectAllReduce().reduce("sum", value, value).values[1]
        array([4., 6.], dtype=float32)
        """
        check_cross_replica("reduce")
        chosen = options if experimental_hints is None else either(options, experimental_hints)
        pairs = [(per_replica_value, destinations)]
        if weights is not None:
            return self._reduce_weighted(reduce_op, pairs, chosen, [out], weights)[0]
        outs = [out]
        flattened, known = self._known_calls.find(reduce_op, pairs, chosen, outs)
        if known is not None and flattened is not None:
            return known.run(flattened)[0]
        return self._reduce(reduce_op, pairs, chosen, outs, flattened, is_batch=False)[0]

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
        out: Sequence[Any] | None = None,
        weights: Any = None,
    ) -> list[Any]:
        """Reduces many values at once, in shared packs and passes.

        Args:
            reduce_op: the operation, as in `reduce`.
            value_destination_pairs: a list or other iterable of (value, destinations), each as in `reduce`.
            options: precision, deadline, packing and more; None takes the defaults.
            experimental_hints: the older name of `options`.
            out: arrays for the results instead of new ones, one entry per pair.
            weights: a number for each replica, as in `reduce`; it counts for all values.

        Returns:
            A list with what `reduce` would return for each pair.

        Raises:
            MismatchError: replicas differ in shape, dtype, structure, device or library; the message names
                the odd one out.
            DtypeError: the operation is not defined for this dtype.
            ReduceOpError: the operation is unknown.
            OptionError: an option, a weight or a size is outside its range; or the algorithm is unknown.
            ConversionError: something cannot be read as an array.
            DestinationError: `destinations` names no device.
            OutError: `out` does not fit the results.
            ContextError: the call is made inside a replica function; use `get_replica_context()` there.
            DeadlineError: other processes did not come in time.
            ProcessGroupError: a process of the group was lost.

        >>> from crossdevice import DirectAllReduce, PerReplica
        >>> a, b = PerReplica([1.0, 2.0]), PerReplica([3.0, 4.0])
        >>> [float(total) for total in DirectAllReduce().batch_reduce("sum", [(a, "cpu:0"), (b, "cpu:1")])]
        [3.0, 7.0]
        """
        check_cross_replica("batch_reduce")
        pairs = checked_pairs(value_destination_pairs)
        chosen = either(options, experimental_hints)
        outs = checked_outs(out, len(pairs))
        if weights is not None:
            return self._reduce_weighted(reduce_op, pairs, chosen, outs, weights)
        flattened, known = self._known_calls.find(reduce_op, pairs, chosen, outs)
        if known is not None and flattened is not None:
            return known.run(flattened)
        return self._reduce(reduce_op, pairs, chosen, outs, flattened, is_batch=True)

    def broadcast(
        self,
        tensor: Any,
        destinations: Any,
        *,
        options: CommunicationOptions | None = None,
        out: Any = None,
    ) -> Any:
        """Copies a value to each destination; a destination variable is not written.

        With `share_results` in the options, destinations in the value's own memory get the value itself
        instead of a copy, read-only if the library supports it.

        Args:
            tensor: an array, or a structure of arrays; the first component of a Mirrored.
            destinations: the devices for the copies, as in `reduce`.
            options: only `share_results` counts, and `timeout_seconds` between processes.
            out: arrays for the copies instead of new ones.

        Returns:
            A bare array for one destination device, a Mirrored for several.

        Raises:
            ConversionError: something cannot be read as an array.
            DestinationError: `destinations` names no device.
            OutError: `out` does not fit the results.
            ContextError: the call is made inside a replica function; use `get_replica_context()` there.

        >>> from crossdevice import DirectAllReduce, PerReplica
        >>> [float(copy) for copy in DirectAllReduce().broadcast(2.0, PerReplica([0.0, 0.0])).values]
        [2.0, 2.0]
        """
        check_cross_replica("broadcast")
        devices = read_destinations(destinations)
        shares = self._chosen_options(options).share_results
        tensor = as_distributed(tensor)
        if isinstance(tensor, PerReplica):
            raise ConversionError(
                "broadcast takes one value; a PerReplica has a different one for each replica"
            )
        recorded = read_recorded_leaves([(component_of(tensor), devices)], [out])
        if out is not None:
            return copied_into(tensor, devices, out)
        if self._overrides("broadcast_implementation"):
            copies = self.broadcast_implementation(tensor, destinations)
            check_result(copies, devices, f"{type(self).__name__}.broadcast_implementation")
            return copies
        place = shared_with if shares else copied_to
        if recorded is None:
            return place(tensor, devices)
        linear = Combination(self._within_process()._calls, recorded.places, as_options(options))
        return recorded.called(lambda: [place(tensor, devices)], linear)[0]

    def gather(
        self,
        per_replica_value: Any,
        destinations: Any,
        axis: int = 0,
        options: CommunicationOptions | None = None,
        *,
        out: Any = None,
    ) -> Any:
        """Concatenates the replicas of a value along `axis`, on each destination; sizes there may differ.

        Args:
            per_replica_value: a DistributedValues, or a structure of them; dtypes and all other sizes have
                to agree.
            destinations: the devices for the result, as in `reduce`.
            axis: the axis along which arrays are concatenated.
            options: a deadline between processes; None takes the defaults.
            out: arrays for the result instead of new ones.

        Returns:
            A bare array for one destination device, a Mirrored for several.

        Raises:
            MismatchError: replicas differ in shape, dtype, structure, device or library; the message names
                the odd one out.
            ConversionError: something cannot be read as an array.
            DestinationError: `destinations` names no device.
            OutError: `out` does not fit the results.
            ContextError: the call is made inside a replica function; use `get_replica_context()` there.
            DeadlineError: other processes did not come in time.
            ProcessGroupError: a process of the group was lost.

        >>> from crossdevice import DirectAllReduce, PerReplica
        >>> DirectAllReduce().gather(PerReplica([[1, 2], [3]]), "cpu:0")
        array([1, 2, 3], dtype=int32)
        """
        check_cross_replica("gather")
        spread, outs, rebuilt = spread_pairs([(per_replica_value, destinations)], [out])
        placed = [
            (value, read_destinations(target), into)
            for (value, target), into in zip(spread, outs, strict=True)
        ]
        chosen = self._chosen_options(options)
        run = functools.partial(self._gather, placed, axis, chosen)
        recorded = read_recorded_leaves([(value, devices) for value, devices, _ in placed], outs)
        if recorded is None:
            return rebuilt(run())[0]
        linear = Concatenation(self._calls, recorded.places, chosen, axis, recorded.shapes)
        return rebuilt(recorded.called(run, linear))[0]

    def explain(
        self,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
        reduce_op: ReduceOp | str = ReduceOp.SUM,
    ) -> str:
        """Describes what `reduce` would do with this value; nothing is computed.

        Args:
            per_replica_value: the value, as for `reduce`.
            destinations: the devices for the result, as for `reduce`.
            options: the options, as for `reduce`.
            reduce_op: the operation, as for `reduce`.

        Returns:
            Text with the algorithm, why it was chosen, its steps and the bytes it sends.

        Raises:
            MismatchError: replicas differ in shape, dtype, structure, device or library; the message names
                the odd one out.
            DtypeError: the operation is not defined for this dtype.
            ReduceOpError: the operation is unknown.
            OptionError: an option, a weight or a size is outside its range; or the algorithm is unknown.
            ConversionError: something cannot be read as an array.
            DestinationError: `destinations` names no device.

        >>> from crossdevice import DirectAllReduce, PerReplica
        >>> print(DirectAllReduce().explain(PerReplica([1.0, 2.0]), "cpu:0").splitlines()[0])
        DirectAllReduce: SUM of 2 replicas, precision accurate
        """
        op, chosen = self._checked_op(reduce_op), self._chosen_options(options)
        requests, _ = read_requests([(per_replica_value, destinations)], [None])
        return "\n\n".join(self._explain(request, op, chosen) for request in requests)

    # ---------------------------------------------------------------- hooks for subclasses

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Any,
        options: CommunicationOptions,
    ) -> Any:
        """Reduces one value; a subclass may override it. In a direct call, `options` may be None.

        Args:
            reduce_op: the operation, always a member of `ReduceOp` in calls that come from `reduce`.
            per_replica_value: the checked value.
            destinations: what the caller gave.
            options: the options of the call.

        Returns:
            What `reduce` is to return for this value.

        Raises:
            OutError: a subclass returned something that does not fit; the message names the hook.
        """
        request = Request(read_value(per_replica_value), read_destinations(destinations))
        op, chosen = self._checked_op(reduce_op), self._chosen_options(options)
        return CheckedBatch([request], op, chosen).run(self._planner)[0]

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Reduces many values; a subclass may override it. One by one if it overrides only the above.

        Args:
            reduce_op: the operation.
            value_destination_pairs: the checked values, each with what the caller gave as its destinations.
            options: the options of the call.

        Returns:
            A list with the result for each pair.

        Raises:
            OutError: a subclass returned something that does not fit; the message names the hook.
        """
        op, chosen = self._checked_op(reduce_op), self._chosen_options(options)
        value_destination_pairs = checked_pairs(value_destination_pairs)
        if self._overrides("reduce_implementation"):
            return [
                self.reduce_implementation(op, value, destinations, chosen)
                for value, destinations in value_destination_pairs
            ]
        requests = [
            Request(read_value(value), read_destinations(destinations))
            for value, destinations in value_destination_pairs
        ]
        return CheckedBatch(requests, op, chosen).run(self._planner)

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Copies one value to each destination device; a subclass may override it.

        Args:
            tensor: the value to copy.
            destinations: what the caller gave.

        Returns:
            A bare array for one destination device, a Mirrored for several.

        Raises:
            DestinationError: `destinations` names no device.
        """
        return copied_to(tensor, read_destinations(destinations))

    # ---------------------------------------------------------------- inside one process, or between several

    def _checked_op(self, reduce_op: ReduceOp | str) -> ReduceOp:
        op = ReduceOp(reduce_op)
        if self.accumulation_fn is not None and op not in (ReduceOp.SUM, ReduceOp.MEAN):
            raise ReduceOpError(
                f"{op.name} with an accumulation_fn, which takes the place of the sum in SUM and MEAN"
            )
        return op

    def _chosen_options(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """The options that a call runs with; None means the defaults."""
        return as_options(options)

    def _checked_factors(self, weights: Any, op: ReduceOp) -> tuple[float, ...]:
        if self.accumulation_fn is not None or self._overrides_hooks:
            what = "has an accumulation_fn" if self.accumulation_fn else "overrides reduce_implementation"
            raise OptionError(
                f"weights with {type(self).__name__}, which {what}: that takes no weights; "
                "multiply the values first"
            )
        return factors_of(weights, op)

    def _reduce_weighted(
        self,
        reduce_op: ReduceOp | str,
        pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None,
        outs: Sequence[Any],
        weights: Any,
    ) -> list[Any]:
        """`reduce` and `batch_reduce` with weights."""
        op = self._checked_op(reduce_op)
        factors = self._checked_factors(weights, op)
        flattened, known = self._known_calls.find(op, pairs, options, outs, len(factors))
        if known is not None and flattened is not None:
            return known.run(flattened, weights_for(factors, op))
        return self._reduce(op, pairs, options, outs, flattened, is_batch=True, factors=factors)

    def _reduce(
        self,
        reduce_op: ReduceOp | str,
        pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None,
        outs: Sequence[Any],
        flattened: Flattened | None,
        *,
        is_batch: bool,
        factors: tuple[float, ...] | None = None,
    ) -> list[Any]:
        """Reads, checks and runs a call that is not known; keeps it if its arrays are `flattened`."""
        op, chosen = self._checked_op(reduce_op), self._chosen_options(options)
        requests, rebuilt = read_requests(pairs, outs)
        recorded = recorded_leaves([(request.value, request.destinations) for request in requests], outs)
        if recorded is not None and factors is None and self._differentiates(op):
            spread, _, _ = spread_pairs(pairs, outs)
            # Called with recording off, so it does not come here again.
            run = functools.partial(
                self._reduce, op, spread, chosen, [None] * len(spread), None, is_batch=is_batch
            )
            return rebuilt(recorded.called(run, Combination(self._calls, recorded.places, chosen, op)))
        batch = CheckedBatch(requests, op, chosen, in_any_order=self._runs_locally, factors=factors)
        if self._overrides_hooks:
            targets = [target for _, target in spread_pairs(pairs, outs)[0]]
            return rebuilt(self._reduce_by_hooks(batch, targets, is_batch))
        between = self._between
        results = batch.run(self._planner) if between is None else between.reduce(batch)
        if flattened is not None:
            prepare = (
                functools.partial(batch.prepared, self._planner)
                if between is None
                else functools.partial(between.prepared, batch)
            )
            self._known_calls.keep(flattened, batch, prepare)
        return rebuilt(results)

    def _within_process(self) -> CrossDeviceOps:
        """The same algorithm with the same options, for the replicas of this process alone."""
        return self

    @property
    def _calls(self) -> Calls:
        """The calls that compute derivatives."""
        return Calls(self.batch_reduce, self.gather, self.reduce_scatter)

    @property
    def _between(self) -> BetweenProcesses | None:
        """Makes the calls that other processes take part in; None if none do."""
        return None

    def _gather(self, placed: Sequence[Placed], axis: int, options: CommunicationOptions) -> list[Any]:
        if self._between is not None:
            return self._between.gather(placed, axis, options)
        return [gathered(value, devices, axis, out) for value, devices, out in placed]

    def _explain(self, request: Request, op: ReduceOp, options: CommunicationOptions) -> str:
        if self._between is not None:
            return self._between.explained(request, op, options)
        return explained(request, op, options, self._planner)

    def _reduce_by_hooks(self, batch: CheckedBatch, destinations: Sequence[Any], is_batch: bool) -> list[Any]:
        op, options = batch.op, batch.options
        one_by_one = not is_batch and (
            self._overrides("reduce_implementation") or self._overrides("plan_sum")
        )

        def hook(pairs: list[tuple[PerReplica, Any]]) -> Any:
            if one_by_one:
                return [self.reduce_implementation(op, value, target, options) for value, target in pairs]
            return self.batch_reduce_implementation(op, pairs, options)

        is_whole = not one_by_one and self._overrides("batch_reduce_implementation")
        name = f"{type(self).__name__}.{'batch_' if is_whole else ''}reduce_implementation"
        return reduced_by_hook(batch, destinations, hook, name, self._planner)

    @property
    def _runs_locally(self) -> bool:
        """True if calls run plans in this process alone, so that they can be prepared and repeated."""
        return self._runs_plans

    @property
    def _runs_plans(self) -> bool:
        """True if sums are planned, not made by an `accumulation_fn` or an overridden hook."""
        return self.accumulation_fn is None and not self._overrides_hooks

    def _differentiates(self, op: ReduceOp) -> bool:
        """True if the derivative of the reduction is known."""
        return op in (ReduceOp.SUM, ReduceOp.MEAN) and self._runs_plans

    @property
    def _overrides_hooks(self) -> bool:
        return self._overrides("reduce_implementation") or self._overrides("batch_reduce_implementation")

    def _overrides(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(CrossDeviceOps, method)

    @functools.cached_property
    def _known_calls(self) -> KnownCalls:
        return KnownCalls(keeps=self._runs_locally or self._between is not None)

    @functools.cached_property
    def _planner(self) -> Planner:
        return Planner(self)


class PackedOps(CrossDeviceOps):
    """An algorithm that has one setting: the number of packs into which a batch is split."""

    def __init__(self, num_packs: int = 1) -> None:
        self.packing = Packing(num_packs)
