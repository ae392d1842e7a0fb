"""Arithmetic of GPUs that repeats the bits of the host, as a small hashable value, and tasks of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from crossdevice.kernels.families import ORDERED_FAMILIES, family_of, positions_of, program_of
from crossdevice.kernels.host.fused_pass import divisor_for
from crossdevice.kernels.host.reference.rounding import BFLOAT16
from crossdevice.values.dtypes import COMPLEXES, FLOATS, ITEM_BYTES, PARTS, SHORT_FLOATS
from crossdevice.values.recipe import Order, Recipe
from crossdevice.values.reduce_op import ReduceOp

BLOCK_BYTES = 4096
"""Bytes that one program of a kernel reads of each input."""

MAX_EXACT_BLOCK = 512
"""The most elements of a block of exact sums: with more, registers are left for half as many threads."""

MAX_ARRAYS = 64
"""Inputs, and outputs, of one task whose code is written out for each of them: of all but exact sums."""

ROW_NUMBERS = 3
"""Numbers that tell a program of a launch by table what it does: `rows_of`."""

MAX_EXACT_DIVISOR = 1 << 31
"""The largest divisor of exact means, for which long division has 64 bits; as on the host."""

COMPILED_FAMILIES = (
    "native",
    "rounded",
    "wide",
    "compensated",
    "exact",
    "extreme",
    "wrapping",
    "wrapping_mean",
    "true_mean",
    "weighted",
    "weighted_compensated",
)


class Arithmetic(NamedTuple):
    """The steps from N inputs to a result; all of them are compiled into a kernel.

    `element` and `result` name dtypes, no complex ones: those are twice as many of their parts.
    """

    family: str
    op: str
    element: str
    result: str
    divisor: float | None = None
    program: tuple[int, ...] = ()
    """Instructions for inputs that combine as a tree; empty if they combine from left to right."""

    @property
    def numbers_per_input(self) -> int:
        """2 if the addresses of inputs are followed by the bits of their weights and two more numbers."""
        return 2 if self.family.startswith("weighted") else 1

    @property
    def max_arrays(self) -> int | None:
        """The most inputs, and outputs, of one task; None for any number, whose addresses are in a table."""
        return None if self.family == "exact" else MAX_ARRAYS


class Arrangement(NamedTuple):
    """An arithmetic and the order of its inputs (None: as given)."""

    arithmetic: Arithmetic
    positions: tuple[int, ...] | None = None


def arranged(recipe: Recipe, dtype: str, into: str) -> Arrangement | str:
    """Returns the arrangement of kernels that repeats `numpy_pass`, or the reason there is none.

    >>> arranged(Recipe(ReduceOp.SUM, "accurate", 3), "bfloat16", "bfloat16").arithmetic[:4]
    ('wide', 'SUM', 'bfloat16', 'bfloat16')
    >>> arranged(Recipe(ReduceOp.PROD, "exact"), "float64", "float64")
    'exact products of float64 have no GPU kernel'
    """
    if dtype == "bool":
        return "bool has no GPU kernel"
    if recipe.op is ReduceOp.PROD and dtype in COMPLEXES:
        return f"products of {dtype} have no GPU kernel"
    if dtype in SHORT_FLOATS:
        return f"{dtype} has no GPU kernel"
    element, result = PARTS.get(dtype, dtype), PARTS.get(into, into)
    family = family_of(recipe, element, result)
    if family == "exact" and (recipe.divisor or 0) > MAX_EXACT_DIVISOR:
        return f"exact means of more than {MAX_EXACT_DIVISOR} have no GPU kernel"
    if family not in COMPILED_FAMILIES:
        what = "exact products" if element in FLOATS else "means without wrap-around"
        if recipe.op.is_order_statistic:
            what = "medians and trimmed means"
        elif recipe.weights is not None:
            what = "exact weighted sums" if element in FLOATS else "weighted sums"
        return f"{what} of {dtype} have no GPU kernel"
    into_dtype = BFLOAT16 if result == "bfloat16" else np.dtype(result)
    divisor = None if recipe.divisor is None else divisor_for(recipe, into_dtype)
    arithmetic = Arithmetic(family, recipe.op.name, element, result, divisor)
    if recipe.order is None or family not in ORDERED_FAMILIES:
        return Arrangement(arithmetic)
    return _in_order(arithmetic, recipe.order)


def block_elements(arithmetic: Arithmetic) -> int:
    """Returns the number of elements that one program reads of each input."""
    block = BLOCK_BYTES // ITEM_BYTES[arithmetic.element]
    return min(block, MAX_EXACT_BLOCK) if arithmetic.family == "exact" else block


def exact_warps(arithmetic: Arithmetic) -> int:
    """Returns the warps for a block of exact sums: a thread has registers for few elements of float64."""
    return 8 if ITEM_BYTES[arithmetic.element] == ITEM_BYTES["float64"] else 4


def parts_in(dtype: str) -> int:
    """Returns the number of kernel elements in one element of a dtype."""
    return 2 if dtype in PARTS else 1


def _in_order(arithmetic: Arithmetic, order: Order) -> Arrangement:
    positions = positions_of(order)
    if positions is not None:
        return Arrangement(arithmetic, positions)
    program = program_of(order, max_depth=MAX_ARRAYS)
    return Arrangement(arithmetic._replace(program=tuple(program or ())))


Start = Callable[[int], None]
"""Launches a prepared kernel on the stream with this handle."""

Launch = Callable[[Sequence[int]], Start]
"""Prepares a kernel with these arguments, constants left out."""


class AddressOffset(NamedTuple):
    """An array's start: an offset in bytes from the address at a position of a list of addresses."""

    position: int
    offset: int = 0

    def moved(self, num_bytes: int) -> AddressOffset:
        """Returns the offset advanced by this many bytes."""
        return AddressOffset(self.position, self.offset + num_bytes)


class KernelTask(NamedTuple):
    """One range of elements of every input, combined into the same range of every output."""

    arithmetic: Arithmetic
    inputs: tuple[AddressOffset, ...]
    outputs: tuple[AddressOffset, ...]
    num_elements: int


def rows_of(tasks: Sequence[KernelTask]) -> NDArray[np.int64]:
    """Lists for each program of a launch its task, its block, and the number of elements of the task."""
    block = block_elements(tasks[0].arithmetic)
    sizes = np.array([task.num_elements for task in tasks], np.int64)
    num_blocks = -(-sizes // block)
    task = np.repeat(np.arange(len(tasks)), num_blocks)
    firsts = np.cumsum(num_blocks) - num_blocks
    return np.stack([task, np.arange(len(task)) - firsts[task], sizes[task]], axis=1)
