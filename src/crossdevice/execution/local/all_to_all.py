"""All-to-all: each replica's arrays are cut into a part for each replica, which gets these end to end."""

from __future__ import annotations

from typing import Any, NamedTuple

from crossdevice.backends.protocol import Array
from crossdevice.errors import OptionError
from crossdevice.execution.local.gathering import Gathering, check_gather, delivered_late, direct_outs
from crossdevice.execution.reading.outputs import Expected, read_out_of_shapes, wrapped
from crossdevice.execution.reading.shards import check_sum, cut, part_lengths, read_sizes
from crossdevice.execution.reading.values import Value, read_value
from crossdevice.execution.tracing import READING, Work, flight_recorder, now, recorded
from crossdevice.values.distributed import PerReplica

Sizes = tuple[tuple[int, ...] | None, ...]
"""The lengths of each replica's parts, for the replicas of this process; None for parts of equal length."""


class AllToAll(NamedTuple):
    """A checked value whose parts go from each replica to all replicas, into `out` unless that is None."""

    value: Value
    gatherings: list[Gathering]
    sizes: Sizes
    out: Any

    def run(self) -> Any:
        """Each replica's parts of all arrays, in replica order, in new memory on its device."""
        started = now()
        devices = self.value.devices
        of_leaves = [self._gatherings_of_replicas(leaf) for leaf in range(len(self.gatherings))]
        expected = [
            Expected(whole.backend, whole.dtype, [gathering.shape for gathering in gatherings])
            for whole, gatherings in zip(self.gatherings, of_leaves, strict=True)
        ]
        outs = read_out_of_shapes(self.out, self.value, expected, devices)
        flight_recorder.events.append((READING, started, now(), 1))
        num_bytes = sum(gathering.num_bytes for gathering in self.gatherings)
        direct = direct_outs(self.gatherings, devices, devices, outs)
        with recorded(Work("copy", "all_to_all", devices, num_bytes)):
            results = [
                [
                    gathering.run(devices, [at], None if into is None else [into[number]])[0]
                    for number, (gathering, at) in enumerate(zip(gatherings, devices, strict=True))
                ]
                for gatherings, into in zip(of_leaves, direct, strict=True)
            ]
        delivered = delivered_late(results, direct, outs, self.gatherings)
        return wrapped(delivered, self.value.structure, devices, PerReplica)

    def _gatherings_of_replicas(self, leaf: int) -> list[Gathering]:
        """Returns the parts of a leaf for each replica."""
        arrays, backend, axis = self.gatherings[leaf]
        parts: list[list[Array]] = []
        for array, sizes, device in zip(arrays, self.sizes, self.value.devices, strict=True):
            lengths = part_lengths(backend.shape_of(array)[axis], len(arrays), sizes)
            parts.append(cut(array, axis, lengths, backend, device))
        return [Gathering(column, backend, axis) for column in zip(*parts, strict=True)]


def read_all_to_all(value: Any, axis: int, sizes: Any, out: Any) -> AllToAll:
    """Reads and checks the arguments of an all-to-all."""
    read = read_value(value)
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
