"""A batch of dense leaves that ranks reduce together: all that they know of it, and the tasks it makes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from crossdevice.execution.local.prepared import PreparedReduction, recipe_for
from crossdevice.execution.processes.layouts.all_reduce import all_reduce
from crossdevice.execution.processes.layouts.reduce_scatter import reduce_scatter
from crossdevice.execution.reading.leaf_spec import LeafSpec
from crossdevice.plans.packing import Item, Packing
from crossdevice.plans.task_ledger import check_tasks, meaning_of_all_reduce, meaning_of_reduce_scatter
from crossdevice.plans.tasks import ReducedLeaf, TaskPlan
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.values.device import Device
from crossdevice.values.dtypes import COMPLEXES, INTEGERS, ITEM_BYTES, PARTS
from crossdevice.values.options import CommunicationOptions, Precision
from crossdevice.values.recipe import Recipe
from crossdevice.values.reduce_op import ReduceOp

Prepare: TypeAlias = Callable[[tuple[LeafSpec, ...], ReduceOp, CommunicationOptions], PreparedReduction]
"""How the devices of this process are reduced."""

PACK_BYTES = 32 << 20
"""A pack is closed once it is larger, unless the options say otherwise."""

_WIDE = {
    "float16": "float64",
    "bfloat16": "float64",
    "float32": "float64",
    "complex64": "complex128",
}


def not_shared(group: ProcessGroup) -> str:
    """Reason nothing goes through shared memory, in a group without."""
    return f"ranks do not all share memory: {group.not_shared_reason}"


class LeafParts:
    """A leaf, its elements in the order of rows along an axis, so that each part is a range of them.

    `lengths` has the length of the part of each replica there is, `counts` the replicas of each rank.
    """

    def __init__(
        self, spec: LeafSpec, axis: int, lengths: Sequence[int], counts: tuple[int, ...], rank: int
    ) -> None:
        self.spec, self.axis, self.counts = spec, axis, counts
        rest = (*spec.shape[:axis], *spec.shape[axis + 1 :])
        self.edges = [math.prod(rest) * row for row in itertools.accumulate(lengths, initial=0)]
        """The elements at which the parts of all replicas begin and end."""
        own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        self.own_ranges = list(itertools.pairwise(self.edges))[own]
        self.own_rows = [(length, *rest) for length in lengths[own]]
        """The shape of each of this rank's parts, as rows along the axis."""
        self.is_even = axis == 0 and len(set(lengths)) == 1

    @property
    def own_shapes(self) -> list[tuple[int, ...]]:
        """The shape of each of this rank's parts."""
        return [(*rest[: self.axis], length, *rest[self.axis :]) for length, *rest in self.own_rows]


class Wanted(NamedTuple):
    """A leaf for which a transport is chosen, and what is known of it: the same on all ranks."""

    spec: LeafSpec
    op: ReduceOp
    options: CommunicationOptions
    group: ProcessGroup
    counts: tuple[int, ...] | None = None
    """Its replicas on each rank; None before ranks have compared them."""
    is_weighted: bool = False
    parts: LeafParts | None = None
    """Set if each replica gets its own part."""


class WantedCopies(NamedTuple):
    """A call that copies, for which a transport is chosen: the same on all ranks."""

    group: ProcessGroup
    is_on_gpu: bool
    """Whether all arrays are on GPUs that all ranks reach."""
    is_verified: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class ReducedBatch:
    """Leaves that take one transport; `counts` has, for each, the number of its replicas on each rank.

    With `parts` every replica gets its own part of each result, else all get all of it. `prepare` says how
    the devices of this process are reduced where that is done on them.
    """

    specs: Sequence[LeafSpec]
    op: ReduceOp
    options: CommunicationOptions
    counts: Sequence[tuple[int, ...]]
    group: ProcessGroup
    prepare: Prepare
    is_weighted: bool = False
    parts: Sequence[LeafParts] | None = None

    @functools.cached_property
    def dtypes(self) -> list[str]:
        """The dtypes of results."""
        return [spec.result_dtype(self.op, self.is_weighted) for spec in self.specs]

    @functools.cached_property
    def devices(self) -> tuple[Device, ...]:
        """The devices of this process's arrays."""
        return tuple(dict.fromkeys(device for spec in self.specs for device in spec.devices))

    @property
    def num_bytes(self) -> int:
        """Bytes of one replica's arrays."""
        return sum(spec.num_bytes for spec in self.specs)

    @functools.cached_property
    def leaves(self) -> list[ReducedLeaf]:
        """The leaves as layouts see them."""
        return [self._leaf(number) for number in range(len(self.specs))]

    def wanted(self, number: int) -> Wanted:
        """Describes a leaf as the choice of its transport sees it."""
        parts = None if self.parts is None else self.parts[number]
        counts = self.counts[number]
        return Wanted(self.specs[number], self.op, self.options, self.group, counts, self.is_weighted, parts)

    def of_leaves(self, numbers: Sequence[int]) -> ReducedBatch:
        """Some of its leaves."""
        return dataclasses.replace(
            self,
            specs=tuple([self.specs[number] for number in numbers]),
            counts=tuple([self.counts[number] for number in numbers]),
            parts=None if self.parts is None else [self.parts[number] for number in numbers],
        )

    def packs(self) -> list[list[ReducedLeaf]]:
        """Leaves that travel together: of one dtype, and of as many replicas on each rank."""
        items = [
            Item(spec.num_elements, ITEM_BYTES[spec.dtype], (spec.dtype, spec.into, spec.own_op, leaf.counts))
            for spec, leaf in zip(self.specs, self.leaves, strict=True)
        ]
        packs = Packing().packs(items, self.options.bytes_per_pack or PACK_BYTES)
        return [[self.leaves[segment.item] for segment in pack] for pack in packs]

    def plan(
        self,
        leaves: Sequence[ReducedLeaf],
        *,
        workers: Sequence[int] | None = None,
        is_small: bool = False,
        is_even: bool = False,
        seen_by: int | None = None,
    ) -> TaskPlan:
        """The tasks for some of its leaves, proved.

        `workers` has for each rank the one that combines in its place; if leaves are small every rank
        combines everything, and with `is_even` equal shards, unless each gets its own part anyway.
        """
        recipes = {leaf.number: self._recipe(leaf.number) for leaf in leaves}
        if self.parts is None:
            combining = None if workers is None else sorted(set(workers))
            plan = all_reduce(leaves, combining, is_small=is_small, is_even=is_even, seen_by=seen_by)
            whole = {leaf.number: (leaf.length, leaf.counts, recipes[leaf.number]) for leaf in leaves}
            check_tasks(plan, meaning_of_all_reduce(whole))
            return plan
        edges = {leaf.number: self._edges(leaf.number) for leaf in leaves}
        plan = reduce_scatter(leaves, list(edges.values()), workers, seen_by=seen_by)
        scattered = {
            leaf.number: (
                [stop - start for start, stop in itertools.pairwise(edges[leaf.number])],
                leaf.counts,
                recipes[leaf.number],
            )
            for leaf in leaves
        }
        check_tasks(plan, meaning_of_reduce_scatter(scattered))
        return plan

    def _op_of(self, number: int) -> tuple[ReduceOp, bool]:
        """The operation of a leaf, and whether its replicas have weights."""
        own = self.specs[number].own_op
        return (self.op, self.is_weighted) if own is None else (own, False)

    def _recipe(self, number: int) -> Recipe:
        """Returns the recipe of a leaf's results, as in one process."""
        op, is_weighted = self._op_of(number)
        return recipe_for(op, self.options, sum(self.counts[number]), is_weighted)

    def _edges(self, number: int) -> list[int]:
        assert self.parts is not None
        reals = self.leaves[number].length // max(self.specs[number].num_elements, 1)
        return [edge * reals for edge in self.parts[number].edges]

    def _leaf(self, number: int) -> ReducedLeaf:
        spec, counts = self.specs[number], self.counts[number]
        op, is_weighted = self._op_of(number)
        partial = partial_dtype(spec.dtype, op, self.options.precision, max(counts), is_weighted=is_weighted)
        # Complex numbers are pairs of reals, unless they are multiplied.
        in_parts = spec.dtype in COMPLEXES and op is not ReduceOp.PROD
        real = PARTS if in_parts else {}
        of_ranks = self._recipe(number)
        return ReducedLeaf(
            number,
            spec.num_elements * (2 if in_parts else 1),
            counts,
            real.get(spec.dtype, spec.dtype),
            None if partial is None else real.get(partial, partial),
            real.get(self.dtypes[number], self.dtypes[number]),
            Recipe(of_ranks.op, self.options.precision),
            of_ranks,
        )


def partial_dtype(
    dtype: str, op: ReduceOp, precision: Precision, most_replicas: int, *, is_weighted: bool = False
) -> str | None:
    """The dtype of one partial result per process; None if its replicas' arrays travel themselves.

    They do whenever a partial result would not have the bits of the whole: with weights, for medians, under
    `exact`, and for true means of integers. Under `accurate`, partial sums are as wide as the accumulator,
    and travel only if that is fewer bytes than the arrays, so that one replica per process sends what a ring
    would.

    >>> partial_dtype("float32", ReduceOp.SUM, "accurate", most_replicas=4)
    'float64'
    >>> partial_dtype("float32", ReduceOp.SUM, "accurate", most_replicas=2) is None
    True
    """
    if most_replicas == 1 or is_weighted or op.is_order_statistic:
        return None
    if precision == "fast" or op in (ReduceOp.MIN, ReduceOp.MAX):
        return dtype
    if dtype in INTEGERS:
        return None if op is ReduceOp.MEAN else dtype
    wide = _WIDE.get(dtype)
    if wide is None or precision == "exact" or (op is ReduceOp.PROD and dtype in COMPLEXES):
        return None
    return wide if ITEM_BYTES[wide] < most_replicas * ITEM_BYTES[dtype] else None
