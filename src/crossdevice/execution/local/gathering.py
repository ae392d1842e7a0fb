"""Gathering: every replica's array, end to end, on each destination."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from crossdevice.backends.protocol import Array, Backend
from crossdevice.errors import DtypeMismatchError, ShapeMismatchError
from crossdevice.execution.reading.leaf_spec import bytes_of
from crossdevice.execution.reading.outputs import Expected, delivered, read_out_of_shapes, wrapped
from crossdevice.execution.reading.shards import checked_axis
from crossdevice.execution.reading.values import Leaf, check_agreement, one_backend, read_value
from crossdevice.execution.tracing import READING, Work, flight_recorder, now, recorded, transfer
from crossdevice.values.device import Device

Placed: TypeAlias = tuple[Any, tuple[Device, ...], Any]
"""A value to be gathered, its destinations, and the `out` of the result."""


class Gathering(NamedTuple):
    """A checked leaf, ready to be gathered."""

    arrays: tuple[Array, ...]
    backend: Backend
    axis: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all replicas together."""
        return sum([bytes_of(self.backend, array) for array in self.arrays])

    @property
    def dtype(self) -> str:
        """That of all arrays."""
        return self.backend.dtype_of(self.arrays[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the result."""
        return self.shape_with(sum(self.backend.shape_of(array)[self.axis] for array in self.arrays))

    def shape_with(self, length: Any) -> tuple[Any, ...]:
        """That of all arrays, but with this length along the axis."""
        shape = self.backend.shape_of(self.arrays[0])
        return (*shape[: self.axis], length, *shape[self.axis + 1 :])

    def run(self, devices: Sequence[Device], destinations: Sequence[Device]) -> list[Array]:
        """The arrays in replica order along the axis, in new memory on each destination."""
        return [self._gathered(devices, destination) for destination in destinations]

    def _gathered(self, devices: Sequence[Device], destination: Device) -> Array:
        here = [
            self._brought(array, device, destination)
            for array, device in zip(self.arrays, devices, strict=True)
        ]
        with recorded(Work("pack", f"join along axis {self.axis}", (destination,))):
            return self.backend.concat(here, self.axis, destination)

    def _brought(self, array: Array, source: Device, target: Device) -> Array:
        if self.backend.memory_of(source) == self.backend.memory_of(target):
            return array
        with recorded(transfer(source, target, bytes_of(self.backend, array))):
            return self.backend.copy(array, target)


def gathered(value: Any, destinations: tuple[Device, ...], axis: int, out: Any = None) -> Any:
    """The value's replicas end to end on each destination, wrapped; into `out` unless that is None."""
    started = now()
    read = read_value(value)
    gatherings = [check_gather(leaf, read.devices, destinations, axis) for leaf in read.leaves]
    expected = [
        Expected(gathering.backend, gathering.dtype, [gathering.shape] * len(destinations))
        for gathering in gatherings
    ]
    outs = read_out_of_shapes(out, read, expected, destinations)
    flight_recorder.events.append((READING, started, now(), 1))
    devices = (*read.devices, *destinations)
    num_bytes = sum(gathering.num_bytes for gathering in gatherings)
    with recorded(Work("copy", "gather", devices, num_bytes, f"axis {axis}")):
        results = [gathering.run(read.devices, destinations) for gathering in gatherings]
    into = [
        delivered(arrays, own_out, gathering.backend)
        for arrays, own_out, gathering in zip(results, outs, gatherings, strict=True)
    ]
    return wrapped(into, read.structure, destinations)


def check_gather(
    leaf: Leaf, devices: Sequence[Device], destinations: Sequence[Device], axis: int, call: str = "gather"
) -> Gathering:
    """Refuses scalars, axes out of range and arrays that differ in more than the axis."""
    if leaf.is_sparse:
        raise NotImplementedError(
            f"{call} of IndexedSlices{leaf.at_path} is not defined; reduce them instead"
        )
    arrays, path = leaf.arrays, leaf.path
    backend = one_backend(arrays, devices, path, destinations)
    shapes = [backend.shape_of(array) for array in arrays]
    ranks = [len(shape) for shape in shapes]
    check_agreement(ranks, devices, "number of dimensions", ShapeMismatchError, path)
    axis = checked_axis(axis, ranks[0], call, leaf.at_path)
    check_agreement([backend.dtype_of(array) for array in arrays], devices, "dtype", DtypeMismatchError, path)
    rests = [shape[:axis] + shape[axis + 1 :] for shape in shapes]
    check_agreement(rests, devices, f"shape outside of axis {axis}", ShapeMismatchError, path)
    return Gathering(arrays, backend, axis)
