"""The runner of calls that other processes take part in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from crossdevice.backends.protocol import Array
from crossdevice.execution.bound import BoundCall, bind_between_processes
from crossdevice.execution.collective import Call
from crossdevice.execution.linear_maps import Calls
from crossdevice.execution.local.batch import CheckedBatch, Request
from crossdevice.execution.local.hooks import Hooks
from crossdevice.execution.local.planning import Planner, PlanningAlgorithm
from crossdevice.execution.local.prepared import CallInFull, CheckedCall, Prepared
from crossdevice.execution.local.scattering import read_scatter
from crossdevice.execution.pending import Pending, start
from crossdevice.execution.processes.between_processes import BetweenProcesses, PreparedGather
from crossdevice.execution.reading.gathers import Placed, read_all_to_all
from crossdevice.execution.reading.leaf_spec import Columns, Dense, LeafSpec, Outs
from crossdevice.execution.reading.outputs import wrapped
from crossdevice.execution.runner import LocalRunner, ReadCall
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.values.distributed import DistributedValues, Mirrored
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights


class GroupRunner(LocalRunner):
    """Makes the calls of one algorithm on one group of processes; a broadcast is of this process alone.

    Args:
        group: the processes.
        algorithm: says how the replicas of this process are summed.
        hooks: methods of TensorFlow's; those that reduce are for the replicas of one process.
        calls: the calls by which derivatives are computed, made by all processes.
        calls_here: those of this process alone.
        defaults: the options that count where a call gives none.
    """

    def __init__(
        self,
        group: ProcessGroup,
        algorithm: PlanningAlgorithm,
        hooks: Hooks,
        calls: Callable[[], Calls],
        calls_here: Callable[[], Calls],
        defaults: CommunicationOptions,
    ) -> None:
        own = hooks._replace(overridden=hooks.overridden & {"broadcast_implementation"})
        super().__init__(algorithm, own, calls, defaults)
        self.owner, self._calls_here = group, calls_here
        self.between = BetweenProcesses(group, self.planner.prepared)

    def bind(self, call: Call, later: Callable[[], Any]) -> BoundCall:
        """Prepares a call of these arrays; each of its runs is a call of the group's."""
        if call.collective.name == "broadcast":
            return super().bind(call, later)
        checked, answer = self._checked_call(call)
        self.between.group.check_usable()
        bound = None
        if isinstance(checked, _BatchOfAll):
            bound = bind_between_processes(checked, self.between, answer)
        return BoundCall(later, owner=self.owner) if bound is None else bound

    def start(self, call: Call, later: Callable[[], Any]) -> Pending:
        """Starts a call; all of it is made in its turn, its checks too."""
        if call.collective.name == "broadcast":
            return super().start(call, later)
        return start(later, self.owner)

    def explained(self, request: Request, op: ReduceOp, options: CommunicationOptions) -> str:
        """Describes what a reduction would send."""
        return self.between.explained(request, op, options)

    def _checked(self, read: ReadCall, *, in_any_order: bool) -> CheckedCall:
        """The call, after the checks that this process can make alone; axes have one order for all."""
        collective, op, options, _, placed, outs, factors = read
        between = self.between
        match collective.name:
            case "broadcast":
                return super()._checked(read, in_any_order=in_any_order)
            case "gather":
                gathers = [(*each, out) for each, out in zip(placed, outs, strict=True)]
                return _GatherOfAll(between, gathers, collective.axis, options)
            case "all_to_all":
                moves = [
                    read_all_to_all(value, collective.axis, collective.sizes, out)
                    for (value, _), out in zip(placed, outs, strict=True)
                ]
                return CallInFull(lambda: between.all_to_all(moves, options))
            case "reduce_scatter":
                scatters = [
                    read_scatter(value, op, collective.axis, collective.sizes, out, factors)
                    for (value, _), out in zip(placed, outs, strict=True)
                ]
                return CallInFull(lambda: between.reduce_scatter(scatters, op, options, factors))
        requests = [Request(*each, out) for each, out in zip(placed, outs, strict=True)]
        return _BatchOfAll(between, requests, op, options, factors)


class _PreparedGathers:
    """Gathers over the replicas of all processes, each a call of the group, without their arrays."""

    def __init__(self, gathers: Sequence[PreparedGather]) -> None:
        self._gathers = gathers

    def run(self, columns: Columns, outs: Outs, weights: Weights | None = None) -> list[tuple[Array, ...]]:
        """For each leaf its result on each destination, in new memory."""
        del outs, weights
        left = iter(columns)
        rows = [gather.rows([next(left) for _ in gather.leaves]) for gather in self._gathers]
        return [
            results for gather, own in zip(self._gathers, rows, strict=True) for results in gather.run(own)
        ]

    def bind(self, columns: Columns, outs: Columns, weights: Weights | None = None) -> Callable[[], Any]:
        """A function that gathers these arrays again: how long results are is known only in the call."""
        del outs, weights
        return functools.partial(self.run, columns, [])

    def flat_passes(self) -> None:
        """None: other processes take part."""


class _GatherOfAll:
    """Gathers over the replicas of all processes; known calls if they are given no `out`.

    Memory for results is checked when the lengths of all ranks are known.
    """

    container: type[DistributedValues] = Mirrored
    weights: Weights | None = None
    bytes_of_results: Sequence[int] | None = None

    def __init__(
        self, between: BetweenProcesses, placed: Sequence[Placed], axis: int, options: CommunicationOptions
    ) -> None:
        self._between, self._placed = between, placed
        self._gathers = [
            between.prepared_gather(value, destinations, axis, options) for value, destinations, _ in placed
        ]
        self.is_dense = all(out is None for *_, out in placed)
        self.places = [(len(value.leaves), destinations) for value, destinations, _ in placed]
        self.dense = [
            Dense(leaf.arrays, LeafSpec(backend, "", (), value.devices, destinations), path=leaf.path)
            for gather, (value, destinations, _) in zip(self._gathers, placed, strict=True)
            for leaf, (backend, _) in zip(value.leaves, gather.leaves, strict=True)
        ]

    def check_outs(self, columns: Columns, outs: Outs) -> None:
        """Does nothing: known calls have no `out`."""

    def prepared(self, planner: Planner) -> Prepared:  # noqa: ARG002
        """The calls without their arrays."""
        return _PreparedGathers(self._gathers)

    def run(self, planner: Planner) -> list[Any]:  # noqa: ARG002
        """The wrapped result of each value."""
        return self._between.gather(self._gathers, self._placed)

    def wrapped(self, results: Iterable[Sequence[Any]]) -> list[Any]:
        """The results of all leaves, as one value for each that was read."""
        left = iter(results)
        return [
            wrapped([next(left) for _ in value.leaves], value.structure, destinations)
            for value, destinations, _ in self._placed
        ]


class _BatchOfAll(CheckedBatch):
    """A batch that is reduced over the replicas of all processes."""

    def __init__(
        self,
        between: BetweenProcesses,
        requests: Sequence[Request],
        op: ReduceOp,
        options: CommunicationOptions,
        factors: tuple[float, ...] | None,
    ) -> None:
        super().__init__(requests, op, options, factors=factors)
        self._between = between

    def prepared(self, planner: Planner) -> Prepared | None:  # noqa: ARG002
        """The call without its arrays; None unless all of them are dense, on the host or on one GPU."""
        return self._between.prepared(self)

    def run(self, planner: Planner) -> list[Any]:  # noqa: ARG002
        """The wrapped result of each request."""
        return self._between.reduce(self)
