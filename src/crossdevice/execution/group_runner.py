"""The runner of calls that other processes take part in."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from crossdevice.backends.protocol import Backend
from crossdevice.errors import OutError
from crossdevice.execution.bound import BoundCall, bind_between_processes
from crossdevice.execution.collective import Call
from crossdevice.execution.differentiation import Calls
from crossdevice.execution.local.batch import CheckedBatch, Request
from crossdevice.execution.local.hooks import Hooks
from crossdevice.execution.local.planning import Planner, PlanningAlgorithm
from crossdevice.execution.local.prepared import CheckedCall, Prepared
from crossdevice.execution.local.scattering import read_scatter
from crossdevice.execution.pending import Pending, start
from crossdevice.execution.processes.between_processes import BetweenProcesses
from crossdevice.execution.reading.leaf_spec import Columns, Dense, LeafSpec, Outs
from crossdevice.execution.reading.outputs import read_out, wrapped
from crossdevice.execution.reading.shards import Placed, read_all_to_all
from crossdevice.execution.reading.values import Value
from crossdevice.execution.runner import LocalRunner, ReadCall
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.values.device import Device
from crossdevice.values.distributed import DistributedValues, Mirrored, PerReplica
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights, own_weights


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

    _weights_for = staticmethod(own_weights)

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
        if call.is_of_rank:
            return BoundCall(later, owner=self.owner)
        if call.collective.name == "broadcast":
            return super().bind(call, later)
        checked, answer = self._checked_call(call)
        self.between.group.check_usable()
        bound = bind_between_processes(checked, self.planner, self.between, answer)
        return BoundCall(later, owner=self.owner) if bound is None else bound

    def start(self, call: Call, later: Callable[[], Any]) -> Pending:
        """Starts a call; all of it is made in its turn, its checks too."""
        if call.collective.name == "broadcast" and not call.is_of_rank:
            return super().start(call, later)
        return start(later, self.owner)

    def explained(self, request: Request, op: ReduceOp, options: CommunicationOptions) -> str:
        """Describes what a reduction would send."""
        return self.between.explained(request, op, options)

    def _checked(self, read: ReadCall, *, in_any_order: bool) -> CheckedCall:
        """The call, after the checks that this process can make alone; axes have one order for all."""
        collective, op, options, _, placed, outs, factors = read
        between = self.between
        values = [(*each, out) for each, out in zip(placed, outs, strict=True)]
        match collective.name:
            case "broadcast":
                return super()._checked(read, in_any_order=in_any_order)
            case "gather":
                gather = between.gather(values, collective.axis, options)
                return _CallOfAll(lambda: gather, values, gather.backends)
            case "all_to_all":
                moves = [
                    read_all_to_all(value, collective.axis, collective.sizes, out) for value, _, out in values
                ]
                parts = between.all_to_all(moves, options)
                return _CallOfAll(lambda: parts, values, parts.backends, PerReplica)
            case "reduce_scatter":
                scatters = [
                    read_scatter(value, op, collective.axis, collective.sizes, out, factors)
                    for value, _, out in values
                ]
                reduction = functools.partial(
                    between.reduce_scatter, scatters, op, options, is_weighted=factors is not None
                )
                backends = [leaf.spec.backend for scatter in scatters for leaf in scatter.leaves]
                return _CallOfAll(reduction, values, backends, PerReplica, factors)
        requests = list(itertools.starmap(Request, values))
        return _BatchOfAll(between, requests, op, options, factors)


class _CallOfAll:
    """A call over the replicas of all processes, after the checks that this one can make alone.

    Memory for results is checked in the call: only all ranks together know what shapes they have.
    """

    bytes_of_results: Sequence[int] | None = None

    def __init__(
        self,
        prepare: Callable[[], Prepared],
        placed: Sequence[Placed],
        backends: Iterable[Backend],
        container: type[DistributedValues] = Mirrored,
        factors: tuple[float, ...] | None = None,
    ) -> None:
        self._prepare, self._placed, self.container = prepare, placed, container
        self.weights = None if factors is None else Weights(factors)
        self.places = [(len(value.leaves), destinations) for value, destinations, _ in placed]
        self._refusal: OutError | None = None
        left = iter(backends)
        self.dense = [
            Dense(
                leaf.arrays, LeafSpec(next(left), "", (), value.devices, destinations), into, path=leaf.path
            )
            for value, destinations, out in placed
            for leaf, into in zip(value.leaves, self._read_out(value, destinations, out), strict=True)
        ]

    @property
    def is_dense(self) -> bool:
        """True unless its memory for results is refused."""
        return self._refusal is None

    def _read_out(self, value: Value, destinations: tuple[Device, ...], out: Any) -> Outs:
        if out is not None:
            try:
                return read_out(out, value, destinations)
            except OutError as error:  # raised when the other ranks have what they asked for
                self._refusal = error
        return [None] * len(value.leaves)

    def check_outs(self, columns: Columns, outs: Outs) -> None:
        """Does nothing: the call itself checks."""

    def prepared(self, planner: Planner) -> Prepared:  # noqa: ARG002
        """The call without its arrays."""
        return self._prepare()

    def run(self, planner: Planner) -> list[Any]:
        """The wrapped result of each value."""
        columns, outs = [leaf.arrays for leaf in self.dense], [leaf.out for leaf in self.dense]
        results = self.prepared(planner).run(columns, outs, self.weights)
        if self._refusal is not None:
            raise self._refusal
        return self.wrapped(results)

    def wrapped(self, results: Iterable[Sequence[Any]]) -> list[Any]:
        """The results of all leaves, as one value for each that was read."""
        left = iter(results)
        return [
            wrapped([next(left) for _ in value.leaves], value.structure, destinations, self.container)
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

    @functools.cached_property
    def weights(self) -> Weights | None:
        """The weights of the replicas of this process, which are some of those that count."""
        return None if self.factors is None else Weights(self.factors)

    def prepared(self, planner: Planner) -> Prepared | None:  # noqa: ARG002
        """The call without its arrays; None unless all of them are dense, on the host or on one GPU."""
        return self._between.reduction(self) if self._between.can_repeat(self) else None

    def run(self, planner: Planner) -> list[Any]:  # noqa: ARG002
        """The wrapped result of each request."""
        return self._between.reduce(self)
