"""Gathering: every replica's array, end to end, on each destination."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from crossdevice.backends.protocol import Array, Backend
from crossdevice.errors import ConversionError, DtypeMismatchError, ShapeMismatchError
from crossdevice.execution.reading.leaf_spec import bytes_of
from crossdevice.execution.reading.outputs import wrapped
from crossdevice.execution.reading.values import Leaf, check_agreement, one_backend, read_value
from crossdevice.execution.tracing import READING, Work, flight_recorder, now, recorded, transfer
from crossdevice.values.device import Device


class Gathering(NamedTuple):
    """A checked leaf, ready to be gathered."""

    arrays: tuple[Array, ...]
    backend: Backend
    axis: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all replicas together."""
        return sum([bytes_of(self.backend, array) for array in self.arrays])

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


def gathered(value: Any, destinations: tuple[Device, ...], axis: int) -> Any:
    """The value's replicas end to end on each destination, wrapped."""
    started = now()
    read = read_value(value)
    gatherings = [check_gather(leaf, read.devices, axis) for leaf in read.leaves]
    for gathering in gatherings:
        for device in destinations:
            gathering.backend.check_device(device)
    flight_recorder.events.append((READING, started, now(), 1))
    devices = (*read.devices, *destinations)
    num_bytes = sum(gathering.num_bytes for gathering in gatherings)
    with recorded(Work("copy", "gather", devices, num_bytes, f"axis {axis}")):
        results = [gathering.run(read.devices, destinations) for gathering in gatherings]
    return wrapped(results, read.structure, destinations)


def check_gather(leaf: Leaf, devices: Sequence[Device], axis: int) -> Gathering:
    """Refuses scalars, axes out of range and arrays that differ in more than the axis."""
    if leaf.is_sparse:
        raise NotImplementedError(
            f"gather of IndexedSlices{leaf.at_path} is not defined; reduce them instead"
        )
    backend = one_backend(leaf.arrays, devices, leaf.path)
    shapes = [backend.shape_of(array) for array in leaf.arrays]
    axis = operator.index(axis)
    check_agreement(
        [len(shape) for shape in shapes], devices, "number of dimensions", ShapeMismatchError, str, leaf.path
    )
    rank = len(shapes[0])
    if rank == 0:
        raise ConversionError(f"gather needs at least one dimension{leaf.at_path}; replica 0 holds a scalar")
    if not -rank <= axis < rank:
        raise ConversionError(f"axis {axis} is out of range for {rank} dimensions{leaf.at_path}")
    axis %= rank
    check_agreement(
        [backend.dtype_of(array) for array in leaf.arrays],
        devices,
        "dtype",
        DtypeMismatchError,
        str,
        leaf.path,
    )
    check_agreement(
        [shape[:axis] + shape[axis + 1 :] for shape in shapes],
        devices,
        f"shape outside of axis {axis}",
        ShapeMismatchError,
        str,
        leaf.path,
    )
    return Gathering(leaf.arrays, backend, axis)
