"""Runners of calls: in one process, what makes a call, keeps it, binds it or starts it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from crossdevice.backends.protocol import LinearMap
from crossdevice.errors import OptionError, ReduceOpError
from crossdevice.execution.bound import BoundCall, bind_call, side_streams_of
from crossdevice.execution.collective import Call, Collective
from crossdevice.execution.differentiation import (
    Calls,
    Combination,
    Concatenation,
    PartsExchange,
    RecordedLeaves,
    SumsOfSlices,
    lengths_of_parts,
    recorded_leaves,
)
from crossdevice.execution.known_calls import KnownCalls
from crossdevice.execution.local.batch import CheckedBatch, Request
from crossdevice.execution.local.copied_ranges import checked_all_to_all, checked_broadcast, checked_gather
from crossdevice.execution.local.copying import copied_into, copied_to, shared_with
from crossdevice.execution.local.gpu_passes import fused_pass_unavailable
from crossdevice.execution.local.hooks import Hooks, check_result, reduced_by_hook
from crossdevice.execution.local.planning import Planner, PlanningAlgorithm
from crossdevice.execution.local.prepared import CallInFull, CheckedCall, recipe_for
from crossdevice.execution.local.scattering import CheckedScatter, read_scatter
from crossdevice.execution.pending import THIS_PROCESS, Pending, start
from crossdevice.execution.reading.leaf_spec import Dense, LeafSpec, items_of
from crossdevice.execution.reading.outputs import in_given_trees, read_destinations
from crossdevice.execution.reading.structures import spread_pairs
from crossdevice.execution.reading.values import Value, read_value
from crossdevice.plans.plan import render_plan
from crossdevice.values.device import Device
from crossdevice.values.distributed import DistributedValues, Mirrored, PerReplica, component_of
from crossdevice.values.dtypes import ITEM_BYTES
from crossdevice.values.options import CommunicationOptions, as_options
from crossdevice.values.quantities import counted
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import factors_of, weights_for


class ReadCall(NamedTuple):
    """A call whose arguments were read, but not checked against each other."""

    collective: Collective
    """With the operation and the options that it runs with."""
    op: ReduceOp
    """The operation; SUM for calls that have none."""
    options: CommunicationOptions
    pairs: Sequence[tuple[Any, Any]]
    placed: Sequence[tuple[Value, tuple[Device, ...]]]
    """Values as they were read, each with the devices of its results."""
    outs: Sequence[Any]
    factors: tuple[float, ...] | None

    def in_given_trees(self, results: Sequence[Any]) -> list[Any]:
        """The results, those of structures in the trees of `out`."""
        return [
            in_given_trees(result, *placed, out)
            for result, placed, out in zip(results, self.placed, self.outs, strict=True)
        ]


class LocalRunner:
    """Makes the calls of one algorithm in this process.

    Args:
        algorithm: says how sums are planned.
        hooks: methods of TensorFlow's that a subclass may have overridden.
        calls: the calls by which derivatives are computed.
        defaults: the options that count where a call gives none.
    """

    owner: object = THIS_PROCESS
    """Started calls of one owner run one after the other."""
    _weights_for = staticmethod(weights_for)

    def __init__(
        self,
        algorithm: PlanningAlgorithm,
        hooks: Hooks,
        calls: Callable[[], Calls],
        defaults: CommunicationOptions | None = None,
    ) -> None:
        self.planner = Planner(algorithm)
        self.known_calls = KnownCalls()
        self._hooks, self._calls, self._defaults = hooks, calls, defaults
        self._calls_here = calls

    # ---------------------------------------------------------------- the ways to make a call

    def run(
        self,
        collective: Collective,
        pairs: Sequence[tuple[Any, Any]],
        outs: Sequence[Any],
        weights: Any = None,
    ) -> list[Any]:
        """Makes a call; returns the result of each pair."""
        op, factors = ReduceOp.SUM, None
        if weights is not None:
            op = self.checked_op(collective.op)
            factors = self._checked_factors(weights, op)
            collective = collective._replace(op=op, num_weights=len(factors))
        flattened, known = self.known_calls.find(collective, pairs, outs)
        if known is not None and flattened is not None:
            return known.run(flattened, None if factors is None else self._weights_for(factors, op))
        read, rebuilt = self._read(collective, pairs, outs, factors)
        recorded = recorded_leaves(read.placed, read.outs)
        linear = None if recorded is None else self._linear_map(read, recorded)
        if recorded is not None and linear is not None:
            # Called with recording off, so it does not come here again.
            run = functools.partial(self.run, collective, read.pairs, [None] * len(read.pairs))
            return rebuilt(recorded.called(run, *linear))
        checked = self._checked(read, in_any_order=True)
        results = checked.run(self.planner)
        if flattened is not None:
            self.known_calls.keep(flattened, checked, self.planner)
        return rebuilt(read.in_given_trees(results))

    def bind(self, call: Call, later: Callable[[], Any]) -> BoundCall:
        """Prepares a call of these arrays; `later` makes it in full, where nothing can be prepared."""
        checked, answer = self._checked_call(call)
        if isinstance(checked, CallInFull):
            return BoundCall(later, owner=self.owner)
        return bind_call(checked, self.planner, later, answer)

    def start(self, call: Call, later: Callable[[], Any]) -> Pending:
        """Starts a call; `later` makes it in full, where its checks cannot be made now."""
        if not self._plans(call.collective):
            return start(later, self.owner)  # a user's own hook: all of the call is made in its turn
        checked, answer = self._checked_call(call)
        return start(lambda: answer(checked.run(self.planner)), side=side_streams_of(checked))

    def _checked_call(self, call: Call) -> tuple[CheckedCall, Callable[[list[Any]], Any]]:
        """The checked call, and what makes of results what the method returns."""
        collective, pairs, outs, weights, _ = call
        factors = None if weights is None else self._checked_factors(weights, self.checked_op(collective.op))
        read, rebuilt = self._read(collective, pairs, outs, factors)
        is_whole = collective.name == "batch_reduce"

        def answer(results: list[Any]) -> Any:
            made = rebuilt(read.in_given_trees(results))
            return made if is_whole else made[0]

        return self._checked(read, in_any_order=False), answer

    def explained(self, request: Request, op: ReduceOp, options: CommunicationOptions) -> str:
        """Describes what a reduction would do."""
        return explained(request, op, options, self.planner)

    # ---------------------------------------------------------------- a call that is not known

    def options_of(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """The options that a call runs with: the defaults, but for what its own set."""
        if self._defaults is None:
            return as_options(options)
        return self._defaults if options is None else self._defaults.merge(as_options(options))

    def checked_op(self, op: ReduceOp | str | None) -> ReduceOp:
        """The operation, unless this algorithm does not have it."""
        read = ReduceOp(op)
        if self.planner.algorithm.accumulation_fn is not None and read not in (ReduceOp.SUM, ReduceOp.MEAN):
            raise ReduceOpError(
                f"{read.name} with an accumulation_fn, which takes the place of the sum in SUM and MEAN"
            )
        return read

    def _checked_factors(self, weights: Any, op: ReduceOp) -> tuple[float, ...]:
        accumulation_fn = self.planner.algorithm.accumulation_fn
        if accumulation_fn is not None or self._hooks.reduces:
            what = "has an accumulation_fn" if accumulation_fn else "overrides reduce_implementation"
            raise OptionError(
                f"weights with {self.planner.name}, which {what}: that takes no weights; "
                "multiply the values first"
            )
        return factors_of(weights, op)

    def _plans(self, collective: Collective) -> bool:
        """True if nothing of a call is done by an `accumulation_fn` or an overridden hook."""
        if collective.name == "broadcast":
            return not self._hooks.broadcasts
        if collective.is_copy:
            return True
        return self.planner.algorithm.accumulation_fn is None and not self._hooks.reduces

    def _read(
        self,
        collective: Collective,
        pairs: Sequence[tuple[Any, Any]],
        outs: Sequence[Any],
        factors: tuple[float, ...] | None,
    ) -> tuple[ReadCall, Callable[[list[Any]], list[Any]]]:
        """Reads the arguments of a call; also returns what puts results back into their structures."""
        op = ReduceOp.SUM if collective.is_copy else self.checked_op(collective.op)
        options = self.options_of(collective.options)
        if collective.name == "broadcast":
            ((tensor, target),) = pairs
            devices = read_destinations(target)
            placed = [(read_value(component_of(tensor)), devices)]
            return ReadCall(collective, op, options, pairs, placed, outs, factors), list
        spread, own_outs, rebuilt = spread_pairs(pairs, outs)
        placed = []
        for value, target in spread:
            read = read_value(value)
            placed.append((read, read.devices if target is value else read_destinations(target)))
        return ReadCall(collective, op, options, spread, placed, own_outs, factors), rebuilt

    def _checked(self, read: ReadCall, *, in_any_order: bool) -> CheckedCall:
        """The call, after every check; `in_any_order` lets it read axes as they lie in memory."""
        collective, op, options, pairs, placed, outs, factors = read
        values = [value for value, _ in placed]
        in_any_order &= not self._hooks.reduces and self.planner.algorithm.accumulation_fn is None
        match collective.name:
            case "gather":
                return checked_gather(placed, outs, collective.axis)
            case "all_to_all":
                return checked_all_to_all(values, outs, collective.axis, collective.sizes)
            case "broadcast":
                return self._checked_broadcast(read)
            case "reduce_scatter":
                scatters = [
                    read_scatter(value, op, collective.axis, collective.sizes, out, factors)
                    for value, out in zip(values, outs, strict=True)
                ]
                scatter = CheckedScatter(scatters, op, options, in_any_order=in_any_order, factors=factors)
                if self._plans(collective):
                    return scatter
                return CallInFull(
                    lambda: scatter.wrapped_parts(self._reduced(scatter.batch, scatter.targets, True))
                )
            case name:
                requests = [Request(*each, out) for each, out in zip(placed, outs, strict=True)]
                batch = CheckedBatch(requests, op, options, in_any_order=in_any_order, factors=factors)
                if self._plans(collective):
                    return batch
                targets = [target for _, target in pairs]
                return CallInFull(lambda: self._reduced(batch, targets, name == "batch_reduce"))

    def _checked_broadcast(self, read: ReadCall) -> CheckedCall:
        ((tensor, target),), ((value, devices),), (out,) = read.pairs, read.placed, read.outs
        if out is None and self._hooks.broadcasts:
            return CallInFull(lambda: [self._by_hook(tensor, target, devices)])
        if out is None and read.options.share_results:
            return CallInFull(lambda: [shared_with(tensor, devices)])
        if any(leaf.is_sparse for leaf in value.leaves):
            return CallInFull(
                lambda: [copied_to(tensor, devices) if out is None else copied_into(tensor, devices, out)]
            )
        return checked_broadcast(value, devices, out)

    def _reduced(self, batch: CheckedBatch, targets: Sequence[Any], is_batch: bool) -> list[Any]:
        """Reduces a batch by an overridden hook, or by an `accumulation_fn`."""
        if not self._hooks.reduces:
            return batch.run(self.planner)
        name = f"{self.planner.name}.{self._hooks.name_for(is_batch=is_batch)}"
        hook = self._hooks.reducing(batch.op, batch.options, is_batch=is_batch)
        return reduced_by_hook(batch, targets, hook, name, self.planner)

    def _by_hook(self, tensor: Any, target: Any, devices: tuple[Device, ...]) -> Any:
        copies = self._hooks.broadcast(tensor, target)
        check_result(copies, devices, f"{self.planner.name}.broadcast_implementation")
        return copies

    def _linear_map(
        self, read: ReadCall, recorded: RecordedLeaves
    ) -> tuple[LinearMap, type[DistributedValues], list[Any] | None] | None:
        """A call as a linear map of recorded arrays, what holds its results, and where their shapes go.

        None if its derivative is not known.
        """
        collective, op, options, *_, factors = read
        calls, places = self._calls(), recorded.places
        knows_sum = op in (ReduceOp.SUM, ReduceOp.MEAN) and factors is None
        if not self._plans(collective) or (not collective.is_copy and not knows_sum):
            return None
        match collective.name:
            case "gather":
                return Concatenation(calls, places, options, collective.axis, recorded.shapes), Mirrored, None
            case "all_to_all":
                if calls.rank is not None:  # the sizes of other processes are not known
                    return None
                lengths = functools.partial(
                    lengths_of_parts, recorded.shapes, collective.axis, collective.sizes
                )
                return PartsExchange(calls.all_to_all, places, collective.axis, lengths), PerReplica, None
            case "reduce_scatter":
                shapes: list[Any] = []  # known when the parts are
                whole = Concatenation(calls, places, options, collective.axis, shapes, op)
                return SumsOfSlices(whole, ()), PerReplica, shapes
            case "broadcast":
                return Combination(self._calls_here(), places, options), Mirrored, None
            case _:
                return Combination(calls, places, options, op), Mirrored, None


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
