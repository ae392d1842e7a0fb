"""Base of passes over one memory: plans lowered to ranges of leaves, each in one pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from numpy.typing import NDArray

from crossdevice.backends.protocol import Array, Backend, address_range
from crossdevice.execution.local.lowering import lower
from crossdevice.execution.reading.leaf_spec import LeafSpec
from crossdevice.plans.packing import Pack
from crossdevice.plans.plan import Plan
from crossdevice.values.recipe import Recipe


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
