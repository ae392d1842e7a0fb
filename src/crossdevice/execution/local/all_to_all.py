"""All-to-all: each replica's arrays are cut into a part for each replica, which gets these end to end."""

from __future__ import annotations

from typing import Any, NamedTuple

from crossdevice.errors import OptionError
from crossdevice.execution.local.gathering import Gathering, check_gather
from crossdevice.execution.reading.shards import check_sum, read_sizes
from crossdevice.execution.reading.values import Value

Sizes = tuple[tuple[int, ...] | None, ...]
"""The lengths of each replica's parts, for the replicas of this process; None for parts of equal length."""


class AllToAll(NamedTuple):
    """A checked value whose parts go from each replica to all replicas, into `out` unless that is None."""

    value: Value
    gatherings: list[Gathering]
    sizes: Sizes
    out: Any


def read_all_to_all(read: Value, axis: int, sizes: Any, out: Any) -> AllToAll:
    """Checks the arguments of an all-to-all."""
    of_replicas = read_sizes_of_all(sizes, len(read.devices))
    gatherings = [check_gather(leaf, read.devices, read.devices, axis, "all_to_all") for leaf in read.leaves]
    for leaf, (arrays, backend, own_axis) in zip(read.leaves, gatherings, strict=True):
        for replica, (array, given) in enumerate(zip(arrays, of_replicas, strict=True)):
            check_sum(given, backend.shape_of(array)[own_axis], f" in replica {replica}{leaf.at_path}")
    return AllToAll(read, gatherings, of_replicas, out)


def read_sizes_of_all(sizes: Any, num_replicas: int) -> Sizes:
    """One list of lengths for all replicas, or one for each."""
    if not hasattr(sizes, "__len__") or not any(hasattr(each, "__len__") for each in sizes):
        return (read_sizes(sizes),) * num_replicas
    if len(sizes) != num_replicas:
        raise OptionError(f"sizes has {len(sizes)} lists; expected {num_replicas}, one for each replica")
    return tuple(map(read_sizes, sizes))
