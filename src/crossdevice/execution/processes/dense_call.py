"""A reduction of dense arrays with the other ranks, of which all but the arrays is known."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from crossdevice.backends.protocol import Array
from crossdevice.execution.processes.agreement import Agreed, Description, agreed_call, what_is_called
from crossdevice.execution.processes.choice import Part, courses_of, in_order, parts_of
from crossdevice.execution.processes.gpu_peers import find_peers
from crossdevice.execution.processes.host_reduction import HostReduction
from crossdevice.execution.processes.programs import Delivery
from crossdevice.execution.processes.reduced_batch import Prepare, ReducedBatch
from crossdevice.execution.processes.task_agreement import Course
from crossdevice.execution.processes.transports.peer_memory import PeerReduction
from crossdevice.execution.reading.leaf_spec import Columns, LeafSpec, Outs
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights, refuse_weights

OfRanks = tuple[tuple[int, ...], ...]
"""For each rank the number of its replicas of each leaf."""

Answer = TypeVar("Answer")


class DenseCall:
    """A call of dense leaves that was made before; its arrays are others, of the same signatures."""

    def __init__(
        self,
        group: ProcessGroup,
        description: Description,
        timeout_seconds: float | None,
        specs: tuple[LeafSpec, ...],
        op: ReduceOp,
        options: CommunicationOptions,
        prepare: Prepare,
    ) -> None:
        replicas = tuple(len(spec.devices) for spec in specs)
        self._group, self._key, self._seconds = group, (description.digest, replicas), timeout_seconds
        self._place = (group, description, replicas, timeout_seconds)
        self._what = what_is_called(description, replicas)
        self._work = (specs, op, options)
        self._prepare = prepare
        self._parts_of: dict[OfRanks, list[Part]] = {}
        self._works: dict[OfRanks, Callable[..., Delivery]] = {}

    def run(self, columns: Columns, outs: Outs, weights: Weights | None = None) -> list[tuple[Array, ...]]:
        """For each leaf its result on each destination, written to `outs` where given."""
        refuse_weights(weights, "known calls between processes have none")
        # Inputs in `outs` are written to when nothing can fail any more.
        return self._made(self._works, self._plain, columns, outs)()

    def flat_passes(self) -> None:
        """None: other processes take part."""

    def bind(self, columns: Columns, outs: Columns, weights: Weights | None = None) -> Callable[[], None]:
        """A function that reduces these arrays into those of `outs` whenever it is called."""
        refuse_weights(weights, "bound calls between processes have none")
        works: dict[OfRanks, Callable[..., None]] = {}
        return lambda: self._made(works, lambda parts: self._bound(parts, columns, outs))

    def _made(
        self,
        works: dict[OfRanks, Callable[..., Answer]],
        prepare: Callable[[list[Part]], Callable[..., Answer]],
        *args: Any,
    ) -> Answer:
        """Makes the group's next call: `work(call, *args)`, with the one of `works` for these ranks.

        It is prepared in the first such call, and ranks are asked only if they have to be.
        """
        group = self._group
        known: Agreed | None = None if group.checks == "always" else group.agreed.get(self._key)
        work = None if known is None else works.get(known.counts)
        if known is not None and work is not None:
            return group.make_call(work, self._what, known.signature, self._seconds, *args)
        with agreed_call(*self._place, self._courses) as (call, of_ranks):
            work = works.get(of_ranks)
            if work is None:
                work = works[of_ranks] = prepare(self._parts(call, of_ranks))
            return work(call, *args)

    def _plain(self, parts: list[Part]) -> Callable[..., Delivery]:
        if len(parts) == 1:
            prepared = parts[0].prepared
            return prepared.repeated() if isinstance(prepared, HostReduction) else prepared.run

        def run(call: GroupCall, columns: Columns, outs: Outs) -> Delivery:
            deliveries = [(part.leaves, part.run(call, columns, outs)) for part in parts]
            return functools.partial(in_order, deliveries)

        return run

    def _bound(self, parts: Sequence[Part], columns: Columns, outs: Columns) -> Callable[[GroupCall], None]:
        if len(parts) == 1 and isinstance(parts[0].prepared, (HostReduction, PeerReduction)):
            return parts[0].prepared.bound(columns, outs)

        def run(call: GroupCall) -> None:
            for delivery in [part.run(call, columns, outs) for part in parts]:
                delivery()

        return run

    def _courses(self, call: GroupCall, of_ranks: OfRanks) -> list[Course]:
        return courses_of(self._parts(call, of_ranks))

    def _parts(self, call: GroupCall, of_ranks: OfRanks) -> list[Part]:
        known = self._parts_of.get(of_ranks)
        if known is None:
            find_peers(call, None)  # as in any first reduction of a group
            counts = tuple(zip(*of_ranks, strict=True))
            batch = ReducedBatch(*self._work, counts, call.group, self._prepare)
            known = self._parts_of[of_ranks] = parts_of(batch)
        return known
