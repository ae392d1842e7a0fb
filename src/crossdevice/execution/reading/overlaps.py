"""Memory that is written to must not be read or written by others, except exactly in place."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from crossdevice.errors import OutError
from crossdevice.execution.reading.leaf_spec import Dense


class _Range(NamedTuple):
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
    ranges = sorted(_ranges(leaves))
    if all(left[1] <= right[0] for left, right in itertools.pairwise(ranges)):
        return
    active: list[_Range] = []
    for current in itertools.starmap(_Range, ranges):
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


def are_apart(leaves: Sequence[Dense]) -> bool:
    """True if no memory is both read and written, not even in place."""
    ends = {True: 0, False: 0}  # of what was written, and what was read, further to the front
    ranges = [
        (*leaf.spec.backend.address_range(array), is_written)
        for leaf in leaves
        for is_written, arrays in ((True, leaf.out or ()), (False, leaf.arrays))
        for array in arrays
    ]
    for start, end, is_written in sorted(ranges):
        if start < end and start < (max(ends.values()) if is_written else ends[True]):
            return False
        ends[is_written] = max(ends[is_written], end)
    return True


def _ranges(leaves: Sequence[Dense]) -> list[tuple[int, int, bool, int, int]]:
    """The fields of a `_Range` for each array, but for inputs that are one of their leaf's own outputs."""
    ranges: list[tuple[int, int, bool, int, int]] = []
    for leaf, (arrays, spec, out, *_) in enumerate(leaves):
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


def _is_in_place(one: _Range, other: _Range) -> bool:
    return (one.start, one.end, one.leaf) == (other.start, other.end, other.leaf)
