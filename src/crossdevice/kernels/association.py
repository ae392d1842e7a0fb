"""Orders in which inputs combine, as the instructions that a kernel follows."""

from __future__ import annotations

from collections.abc import Iterator

from crossdevice.values.recipe import Order

START, WITH_INPUT, WITH_LEVEL = range(3)
"""Kinds of instruction: start a level with an input, combine it with one, or with the level above it."""

MAX_DEPTH = 8
"""Levels to which orders may nest; a tree over replicas, hosts and racks has 3."""


def instruction(kind: int, level: int, position: int = 0) -> int:
    """One step, as the word a kernel reads: 8 bits of kind, 8 of level, the rest is the input's position."""
    return kind | level << 8 | position << 16


def program_of(order: Order, max_depth: int = MAX_DEPTH) -> list[int] | None:
    """The instructions for an order; None if it nests too deep.

    >>> program_of((0, 1)) == [instruction(START, 0, 0), instruction(WITH_INPUT, 0, 1)]
    True
    """
    steps = list(_steps(order, 0))
    if max(level for _, level, _ in steps) > max_depth:
        return None
    return [instruction(*step) for step in steps]


def positions_of(order: Order) -> tuple[int, ...] | None:
    """The inputs from left to right if that is how they combine; None if the order is a tree.

    >>> positions_of(((2, 0), 1)), positions_of(((0, 1), (2, 3)))
    ((2, 0, 1), None)
    """
    steps = list(_steps(order, 0))
    if any(kind == WITH_LEVEL for kind, _, _ in steps):
        return None
    return tuple(position for _, _, position in steps)


def _steps(order: Order, level: int) -> Iterator[tuple[int, int, int]]:
    order = _unwrapped(order)
    if isinstance(order, int):
        yield START, level, order
        return
    yield from _steps(order[0], level)
    for child in map(_unwrapped, order[1:]):
        if isinstance(child, int):
            yield WITH_INPUT, level, child
        else:
            yield from _steps(child, level + 1)
            yield WITH_LEVEL, level, 0


def _unwrapped(order: Order) -> Order:
    while isinstance(order, tuple) and len(order) == 1:
        order = order[0]
    return order
