"""Recipes as kernels read them: the family of arithmetic that gives their bits, and orders as instructions.

Both are one answer for the host and for GPUs.

| family | what it does |
| --- | --- |
| native | combines in the dtype itself, rounding at every step |
| rounded | the same for 16-bit floats: in float32, rounded to 16 bits at every step, as their libraries do |
| wide | accumulates in float64, rounds once |
| widened, narrowed | the same in two halves: float64 from narrow floats, and narrow floats from float64 |
| compensated | float64, with the rounding errors of all additions added back before the one rounding |
| exact | the true sum, rounded once |
| extreme | minimum or maximum |
| wrapping, wrapping_mean | integers that wrap around; a mean divides what has wrapped |
| true_mean | the mean of the true sum of integers |
| weighted, weighted_compensated, weighted_exact | wide, compensated and exact sums of weights times values |
"""

from __future__ import annotations

from collections.abc import Iterator

from crossdevice.values.dtypes import FLOATS, INTEGERS, ITEM_BYTES, result_dtype
from crossdevice.values.recipe import Order, Recipe
from crossdevice.values.reduce_op import ReduceOp

START, WITH_INPUT, WITH_LEVEL = range(3)
"""Kinds of instruction: start a level with an input, combine it with one, or with the level above it."""

MAX_DEPTH = 8
"""Levels to which orders may nest; a tree over replicas, hosts and racks has 3."""


def instruction(kind: int, level: int, position: int = 0) -> int:
    """Encodes one step as a word: 8 bits of kind, 8 of level, the rest is the input's position."""
    return kind | level << 8 | position << 16


def program_of(order: Order, max_depth: int = MAX_DEPTH) -> list[int] | None:
    """Returns the instructions for an order; None if it nests too deep.

    >>> program_of((0, 1)) == [instruction(START, 0, 0), instruction(WITH_INPUT, 0, 1)]
    True
    """
    steps = list(_steps(order, 0))
    if max(level for _, level, _ in steps) > max_depth:
        return None
    return [instruction(*step) for step in steps]


def positions_of(order: Order) -> tuple[int, ...] | None:
    """Returns the inputs from left to right; None if they combine as a tree.

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


ORDERED_FAMILIES = ("native", "rounded")
"""Families with bits that depend on the order of the inputs, so that a recipe's order matters."""


def family_of(recipe: Recipe, dtype: str, into: str) -> str | None:
    """Returns the family with the bits of `numpy_pass` for these dtypes; None means: use `numpy_pass`.

    >>> family_of(Recipe(ReduceOp.SUM, "accurate", 3), "bfloat16", "bfloat16")
    'wide'
    """
    if recipe.op.is_order_statistic:
        return None
    if recipe.weights is not None:
        return _family_with_weights(recipe, dtype, into)
    op = ReduceOp.SUM if recipe.divisor is None else ReduceOp.MEAN
    if dtype not in (*FLOATS, *INTEGERS) or into != result_dtype(dtype, op):
        return _family_between_widths(recipe, dtype, into)
    if recipe.op in (ReduceOp.MIN, ReduceOp.MAX):
        return "extreme" if dtype == into else None
    if dtype in INTEGERS:
        return _family_of_integers(recipe, dtype)
    if recipe.precision == "fast":
        return "native" if ITEM_BYTES[dtype] >= 4 else "rounded"
    if recipe.op is ReduceOp.PROD:
        return "wide" if recipe.precision == "accurate" else None
    if recipe.precision == "exact":
        return "exact"
    return "compensated" if dtype == "float64" else "wide"


def _family_with_weights(recipe: Recipe, dtype: str, into: str) -> str | None:
    if not {dtype, into} <= set(FLOATS) or (dtype != into and "float64" in (dtype, into)):
        return None
    if recipe.precision == "exact":
        return "weighted_exact" if dtype == into else None
    return "weighted_compensated" if dtype == "float64" else "weighted"


def _family_between_widths(recipe: Recipe, dtype: str, into: str) -> str | None:
    """Returns the family for partial sums of narrow floats in float64, their sums, and mixed dtypes."""
    if recipe.precision != "accurate" or recipe.op is not ReduceOp.SUM or not {dtype, into} <= set(FLOATS):
        return None
    return {into: "widened", dtype: "narrowed"}.get("float64", "wide")


def _family_of_integers(recipe: Recipe, dtype: str) -> str | None:
    if recipe.divisor is None:
        return "wrapping"
    if recipe.op is not ReduceOp.SUM:
        return None
    if recipe.precision == "fast":
        return "wrapping_mean"
    return "true_mean" if ITEM_BYTES[dtype] <= 4 else None
