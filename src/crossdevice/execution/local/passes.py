"""Base of passes over one memory: plans lowered to ranges of leaves, each in one pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, assert_never

from numpy.typing import NDArray

from crossdevice.backends.protocol import Array, Backend, address_range
from crossdevice.execution.reading.leaf_spec import LeafSpec
from crossdevice.plans.packing import Pack
from crossdevice.plans.plan import Plan
from crossdevice.plans.steps import Add, Copy, EngineAllReduce, Finish, Join, Split, sources_of, targets_of
from crossdevice.values.recipe import Order, Recipe


def in_sequence(works: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """One function that makes all these calls, one after the other."""
    if len(works) == 1:
        return works[0]

    def run() -> None:
        for work in works:
            work()

    return run


def is_view_of(view: NDArray[Any], array: Array, backend: Backend) -> bool:
    """True if a host view is the array's own memory, not a copy."""
    start, end = backend.address_range(array)
    return start <= address_range(view)[0] < end or start == end


Results: TypeAlias = "dict[int, tuple[Array, ...]]"
"""The results of each leaf, by its number: one array per destination."""


class LeafRange(NamedTuple):
    """Elements `start` to `stop` of a leaf, in one fused pass to these of its outputs."""

    leaf: int
    start: int
    stop: int
    outputs: tuple[int, ...]


class Passes:
    """Ranges of leaves in one memory, grouped by what is computed."""

    def __init__(self, specs: Mapping[int, LeafSpec]) -> None:
        self._specs = specs
        self._passes: dict[Recipe, list[LeafRange]] = {}
        self._read_twice: set[int] = set()

    def add_leaf(self, number: int, recipe: Recipe) -> None:
        """A whole leaf in one pass, its replicas in order."""
        spec = self._specs[number]
        self._add(LeafRange(number, 0, spec.num_elements, tuple(range(len(spec.destinations)))), recipe)

    def add_pack(self, pack: Pack, plan: Plan, recipe: Recipe) -> None:
        """A pack in the order of its plan: the plan's pieces, mapped to ranges of the leaves in the pack."""
        offset = 0
        pieces = lower(plan)
        if sum(piece.stop - piece.start for piece in pieces) > plan.num_elements:
            # Some destinations get another order than others: no pass may overwrite what the next one reads.
            self._read_twice.update(segment.item for segment in pack)
        for segment in pack:
            length = segment.stop - segment.start
            shift = segment.start - offset
            for piece in pieces:
                start, stop = max(piece.start, offset), min(piece.stop, offset + length)
                if start < stop:
                    task = LeafRange(segment.item, start + shift, stop + shift, piece.outputs)
                    self._add(task, recipe._replace(order=piece.order))
            offset += length

    def _add(self, task: LeafRange, recipe: Recipe) -> None:
        self._passes.setdefault(recipe, []).append(task)


class Piece(NamedTuple):
    """Elements `start` to `stop` of the pack, combined in one order, go to these outputs."""

    start: int
    stop: int
    order: Order
    outputs: tuple[int, ...]


def lower(plan: Plan) -> list[Piece]:
    """The pieces of a plan; in native arithmetic they give the bits of its steps."""
    held: dict[int, list[tuple[int, int, Order]]] = {
        buffer.number: [(0, plan.num_elements, replica)] for replica, buffer in enumerate(plan.inputs)
    }
    known: dict[Order, Order] = {}
    for step in plan.steps:
        sources = [held[buffer.number] for buffer in sources_of(step)]
        match step:
            case Copy() | Finish():
                results = [sources[0]]
            case Split():
                results = [_cut(sources[0], part.start, part.stop) for part in step.targets]
            case Join():
                results = [[piece for source in sources for piece in source]]
            case Add():
                results = [_added(sources, known)]
            case EngineAllReduce():
                results = [_added(sources, known)] * len(step.targets)
            case _:
                assert_never(step)
        held.update(zip((buffer.number for buffer in targets_of(step)), results, strict=True))
    outputs: dict[tuple[int, int, int], tuple[Order, list[int]]] = {}
    for position, buffer in enumerate(plan.outputs):
        for low, high, order in held[buffer.number]:
            # By identity: an order is as long as there are replicas, and would be hashed for every output.
            outputs.setdefault((low, high, id(order)), (order, []))[1].append(position)
    return [
        Piece(low, high, order, tuple(positions))
        for (low, high, _), (order, positions) in outputs.items()
        if low < high
    ]


def _cut(pieces: list[tuple[int, int, Order]], start: int, stop: int) -> list[tuple[int, int, Order]]:
    return [
        (max(low, start), min(high, stop), order)
        for low, high, order in pieces
        if max(low, start) < min(high, stop)
    ]


def _added(
    sources: list[list[tuple[int, int, Order]]], known: dict[Order, Order]
) -> list[tuple[int, int, Order]]:
    """Sources combined; equal orders are one object, that of `known`."""
    edges = sorted({edge for source in sources for low, high, _ in source for edge in (low, high)})
    added: list[tuple[int, int, Order]] = []
    for low, high in itertools.pairwise(edges):
        orders = [order for source in sources for _, _, order in _cut(source, low, high)]
        # (a + b) + c is a + b + c: a chain that is continued stays one chain.
        head = orders[0] if isinstance(orders[0], tuple) else (orders[0],)
        order = (*head, *orders[1:])
        added.append((low, high, known.setdefault(order, order)))
    return added
