"""Memory that is written to must not be read or written by others, except exactly in place."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from crossdevice.errors import OutError
from crossdevice.execution.leaf_spec import Dense

RangeFields: TypeAlias = "tuple[int, int, bool, int, int]"
"""Of a `Range`: plain tuples are made and sorted faster."""


class Range(NamedTuple):
    """Addresses `start` to `end`, of an input or an output of a leaf."""

    start: int
    end: int
    is_written: bool
    leaf: int
    number: int

    def __str__(self) -> str:
        return f"out[{self.number}]" if self.is_written else f"replica {self.number}"


def check_overlaps(leaves: Sequence[Dense]) -> None:
    """Refuses outputs that overlap each other, or an input they are not exactly (in place is exact)."""
    check_ranges(_ranges(leaves))


def check_ranges(found: Iterable[RangeFields]) -> None:
    """The same for known ranges; an input that is one of its leaf's own outputs has none of its own."""
    ranges = sorted(found)
    if all(left[1] <= right[0] for left, right in itertools.pairwise(ranges)):
        return
    active: list[Range] = []
    for current in itertools.starmap(Range, ranges):
        active = [other for other in active if other.end > current.start]
        for other in active:
            if current.is_written and other.is_written:
                raise OutError(f"{other} and {current} overlap in memory; expected one array per destination")
            if current.is_written != other.is_written and not _is_in_place(current, other):
                written, read = (current, other) if current.is_written else (other, current)
                raise OutError(
                    f"{written} overlaps {read} in memory without being it; "
                    "in place means exactly the same array"
                )
        if current.end > current.start:
            active.append(current)


def _ranges(leaves: Sequence[Dense]) -> list[RangeFields]:
    ranges: list[RangeFields] = []
    for leaf, (arrays, spec, out) in enumerate(leaves):
        if spec.shares_memory:
            bounds, outs = spec.backend.address_range, out or ()
            replaced = set(map(id, outs))
            ranges += [(*bounds(array), True, leaf, number) for number, array in enumerate(outs)]
            ranges += [
                (*bounds(array), False, leaf, number)
                for number, array in enumerate(arrays)
                if id(array) not in replaced
            ]
    return ranges


def _is_in_place(one: Range, other: Range) -> bool:
    return (one.start, one.end, one.leaf) == (other.start, other.end, other.leaf)
