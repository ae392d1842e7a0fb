"""Reductions and reduce-scatters with the other ranks, of which all but the arrays is known."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from crossdevice.backends.protocol import Array
from crossdevice.errors import OutError
from crossdevice.execution.processes.agreement import (
    Course,
    Description,
    OfRanks,
    RepeatedCall,
    refused_by_all,
    seconds_of,
    weights_of_all_ranks,
)
from crossdevice.execution.processes.choice import Part, courses_of, in_order, own_gpu, parts_of
from crossdevice.execution.processes.gpu_peers import find_peers
from crossdevice.execution.processes.host_reduction import HostReduction, refuse
from crossdevice.execution.processes.programs import Delivery
from crossdevice.execution.processes.reduced_batch import LeafParts, ReducedBatch
from crossdevice.execution.processes.transports.peer_memory import PeerReduction
from crossdevice.execution.processes.verifying import Verification, check_written
from crossdevice.execution.reading.leaf_spec import Columns, Outs
from crossdevice.execution.reading.outputs import Expected, check_outs_of_shapes, delivered
from crossdevice.execution.reading.shards import part_lengths
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.weights import Weights

Work: TypeAlias = Callable[[GroupCall, Columns, Outs, "Weights | None"], Delivery]
"""What this rank does in a call, given its arrays, memory for results, and the weights of its replicas."""


class GroupReduction:
    """All of a call but its arrays; what ranks do is prepared once for the replicas that all of them have.

    Args:
        description: what ranks compare.
        replicas: how many replicas this rank has of each leaf described.
        batch: the dense leaves among them; its counts are known in a call.
        numbers: which of the leaves described these are.
        axes: the axis along which each of them is cut, so that every replica gets its own part; None if all
            get all of it.
        sizes: the lengths of the parts; None for parts of equal length.
    """

    def __init__(
        self,
        description: Description,
        replicas: tuple[int, ...],
        batch: ReducedBatch,
        numbers: Sequence[int],
        axes: Sequence[int] | None = None,
        sizes: tuple[int, ...] | None = None,
    ) -> None:
        seconds = seconds_of(batch.options)
        self.call = RepeatedCall(batch.group, description, replicas, seconds, self._courses)
        self._batch, self._numbers, self._axes, self._sizes = batch, numbers, axes, sizes
        self._paths = [description.leaves[number].path for number in numbers]
        self._prepared: dict[OfRanks, tuple[list[Part], list[LeafParts] | None]] = {}
        self._works: dict[OfRanks, Work] = {}

    def run(self, columns: Columns, outs: Outs, weights: Weights | None = None) -> list[tuple[Array, ...]]:
        """For each leaf its result on each destination, written to `outs` where given."""
        # Inputs in `outs` are written to when nothing can fail any more.
        return self.call.make(self._works, self._work, columns, outs, weights)()

    def flat_passes(self) -> None:
        """None: other processes take part."""

    def bind(self, columns: Columns, outs: Columns, weights: Weights | None = None) -> Callable[[], Any]:
        """A function that reduces these arrays into those of `outs` whenever it is called."""
        works: dict[OfRanks, Callable[[GroupCall], Any]] = {}

        def bound(call: GroupCall, of_ranks: OfRanks) -> Callable[[GroupCall], Any]:
            parts, _ = self._parts(call, of_ranks)
            is_plain = weights is None and self._axes is None and not self._batch.options.verify
            if is_plain and len(parts) == 1 and isinstance(parts[0].prepared, (HostReduction, PeerReduction)):
                return parts[0].prepared.bound(columns, outs)
            work = self._work(call, of_ranks)
            return lambda call: work(call, columns, outs, weights)()

        return lambda: self.call.make(works, bound)

    def exchange(self, call: GroupCall, of_ranks: OfRanks) -> Work:
        """Returns the work of this rank once it has the weights of all ranks."""
        parts, _ = self._parts(call, of_ranks)
        if self._batch.options.verify:
            return functools.partial(self._verified, parts)
        if len(parts) == 1:
            prepared = parts[0].prepared
            return prepared.repeated() if isinstance(prepared, HostReduction) else prepared.run
        return functools.partial(_together, parts)

    def _work(self, call: GroupCall, of_ranks: OfRanks) -> Work:
        work, (_, cut) = self.exchange(call, of_ranks), self._parts(call, of_ranks)
        if self._batch.is_weighted and self._numbers:
            counts = [replicas[0] for replicas in of_ranks]  # weights are one for each replica of all leaves
            work = functools.partial(self._weighted, work, counts)
        return work if cut is None else functools.partial(self._scattered, work, cut)

    def _weighted(
        self,
        work: Work,
        counts: Sequence[int],
        call: GroupCall,
        columns: Columns,
        outs: Outs,
        weights: Weights | None,
    ) -> Delivery:
        assert weights is not None
        of_all = weights_of_all_ranks(call, self._batch.op, weights.factors, counts)
        return work(call, columns, outs, of_all)

    def _scattered(
        self,
        work: Work,
        cut: Sequence[LeafParts],
        call: GroupCall,
        columns: Columns,
        outs: Outs,
        weights: Weights | None,
    ) -> Delivery:
        """The same, into memory that is refused when the other ranks have what they asked for."""
        try:
            if any(out is not None for out in outs):
                dtypes = [leaf.spec.result_dtype(self._batch.op, self._batch.is_weighted) for leaf in cut]
                expected = [
                    Expected(leaf.spec.backend, dtype, leaf.own_shapes, leaf.spec.destinations, path)
                    for leaf, dtype, path in zip(cut, dtypes, self._paths, strict=True)
                ]
                check_outs_of_shapes(outs, expected)
        except OutError as error:
            work(call, columns, [None] * len(outs), weights)
            return functools.partial(refuse, error)
        return work(call, columns, outs, weights)

    def _verified(
        self, parts: Sequence[Part], call: GroupCall, columns: Columns, outs: Outs, weights: Weights | None
    ) -> Delivery:
        """The same for a verified call: inputs are as they were until all ranks have found all well."""
        verification = call.hops if isinstance(call.hops, Verification) else Verification(call)
        made: dict[int, tuple[Array, ...]] = {}
        direct = set()
        for (number,), prepared, _ in parts:
            assert isinstance(prepared, HostReduction)
            path, arrays, out = self._paths[number], [columns[number]], outs[number]
            # Large ones are written where they are to be: to copy them would take as long as to check them.
            if prepared.writes_directly(arrays, out):
                direct.add(number)
            into = [out if number in direct else None]
            made[number] = prepared.run_verified(call, verification, path, arrays, into, weights)
        verification.conclude()

        def deliver() -> list[tuple[Array, ...]]:
            found = []
            for number, (spec, out) in enumerate(zip(self._batch.specs, outs, strict=True)):
                result = made[number]
                if out is not None and number not in direct:
                    result = delivered(result, out, spec.backend)
                    check_written(self._paths[number], result, made[number])
                found.append(result)
            return found

        return deliver

    def _courses(self, call: GroupCall, of_ranks: OfRanks) -> list[Course]:
        return courses_of(self._parts(call, of_ranks)[0])

    def _parts(self, call: GroupCall, of_ranks: OfRanks) -> tuple[list[Part], list[LeafParts] | None]:
        """Returns the parts of the batch, and how a scatter cuts each leaf; None if it is not cut."""
        known = self._prepared.get(of_ranks)
        if known is None:
            batch, rank = self._batch, call.group.rank
            find_peers(call, own_gpu(batch.specs))
            counts = [tuple([of_rank[number] for of_rank in of_ranks]) for number in self._numbers]
            cut = None
            with refused_by_all():
                if self._axes is not None:
                    cut = [
                        LeafParts(
                            spec, axis, part_lengths(spec.shape[axis], sum(count), self._sizes), count, rank
                        )
                        for spec, axis, count in zip(batch.specs, self._axes, counts, strict=True)
                    ]
                parts = parts_of(dataclasses.replace(batch, counts=counts, parts=cut))
            known = self._prepared[of_ranks] = parts, cut
        return known


def _together(
    parts: Sequence[Part], call: GroupCall, columns: Columns, outs: Outs, weights: Weights | None
) -> Delivery:
    deliveries = [(part.leaves, part.run(call, columns, outs, weights)) for part in parts]
    return functools.partial(in_order, deliveries)
