"""Lowering a plan to a fused pass: what each range of the results is made of, and in which order."""

from __future__ import annotations

import itertools
from typing import NamedTuple, assert_never

from crossdevice.plans.plan import Plan
from crossdevice.plans.steps import Add, Copy, EngineAllReduce, Finish, Join, Split, sources_of, targets_of
from crossdevice.values.recipe import Order


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
