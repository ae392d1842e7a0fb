"""Shards: an axis cut into one part for each replica."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

from crossdevice.errors import ConversionError, OptionError


def checked_axis(axis: int, num_dimensions: int, call: str, at_path: str) -> int:
    """The axis counted from the front; scalars have none."""
    try:
        axis = operator.index(axis)
    except TypeError:
        raise TypeError(f"axis must be an integer; got {axis!r}") from None
    if num_dimensions == 0:
        raise ConversionError(f"{call} needs at least one dimension{at_path}; replica 0 holds a scalar")
    if not -num_dimensions <= axis < num_dimensions:
        raise ConversionError(f"axis {axis} is out of range for {num_dimensions} dimensions{at_path}")
    return axis % num_dimensions


def read_sizes(sizes: Any) -> tuple[int, ...] | None:
    """The lengths of parts as a tuple; None for parts of equal length."""
    if sizes is None:
        return None
    try:
        read = tuple(map(operator.index, sizes))
    except TypeError:
        read = (-1,)
    if min(read, default=0) < 0:
        raise OptionError(f"sizes must be lengths, 0 or more, one for each replica; got {sizes!r}")
    return read


def part_lengths(
    length: int, num_parts: int, sizes: Sequence[int] | None = None, where: str = ""
) -> list[int]:
    """The lengths that were given; else as equal as possible, the longer ones first, as numpy.array_split's.

    >>> part_lengths(7, 3)
    [3, 2, 2]
    """
    if sizes is None:
        size, longer = divmod(length, num_parts)
        return [size + (part < longer) for part in range(num_parts)]
    if len(sizes) != num_parts:
        raise OptionError(f"sizes has {len(sizes)} lengths; expected {num_parts}, one for each replica")
    check_sum(sizes, length, where)
    return list(sizes)


def check_sum(sizes: Sequence[int] | None, length: int, where: str) -> None:
    """Refuses lengths of parts that do not add up to the length of the axis."""
    if sizes is not None and sum(sizes) != length:
        raise OptionError(f"sizes {list(sizes)} add up to {sum(sizes)}{where}; the axis has length {length}")


def cuts_of(axis: int, lengths: Sequence[int]) -> list[tuple[Any, ...]]:
    """Indices of consecutive parts of an array along an axis."""
    before = (slice(None),) * axis
    edges = itertools.pairwise(itertools.accumulate(lengths, initial=0))
    return [(*before, slice(start, stop), ...) for start, stop in edges]
