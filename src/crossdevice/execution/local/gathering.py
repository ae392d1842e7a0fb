"""Gathering: every replica's array, end to end, on each destination."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from itertools import repeat
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from crossdevice.backends.protocol import HOST_MEMORY, Array, Backend
from crossdevice.errors import DtypeMismatchError, ShapeMismatchError
from crossdevice.execution.reading.leaf_spec import Columns, Dense, LeafSpec, Out, Outs, bytes_of
from crossdevice.execution.reading.outputs import (
    Expected,
    delivered,
    read_out_of_shapes,
    wrapped,
    written_view,
)
from crossdevice.execution.reading.overlaps import are_apart
from crossdevice.execution.reading.shards import checked_axis
from crossdevice.execution.reading.values import Leaf, check_agreement, one_backend, read_value
from crossdevice.execution.tracing import READING, Work, flight_recorder, now, recorded, transfer
from crossdevice.kernels.host.fused_pass import fused_batch
from crossdevice.kernels.host.resources.pool import result_pool
from crossdevice.values.device import Device
from crossdevice.values.dtypes import ITEM_BYTES
from crossdevice.values.recipe import COPYING

Placed: TypeAlias = tuple[Any, tuple[Device, ...], Any]
"""A value to be gathered, its destinations, and the `out` of the result."""

MIN_PASS_BYTES = 1 << 18
"""Below this, the library's own concatenation takes less time than preparing a pass."""


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
        """The dtype of all arrays."""
        return self.backend.dtype_of(self.arrays[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return self.shape_with(sum(self.backend.shape_of(array)[self.axis] for array in self.arrays))

    def shape_with(self, length: Any) -> tuple[Any, ...]:
        """The shape of an array with this length along the axis."""
        shape = self.backend.shape_of(self.arrays[0])
        return (*shape[: self.axis], length, *shape[self.axis + 1 :])

    def run(
        self, devices: Sequence[Device], destinations: Sequence[Device], out: Out = None
    ) -> tuple[Array, ...]:
        """The arrays in replica order along the axis, in new memory on each destination, or in `out`.

        Nothing that is read may be in `out`.
        """
        before = self.backend.shape_of(self.arrays[0])[: self.axis]
        are_ranges = self.num_bytes >= MIN_PASS_BYTES and math.prod(before) == 1 and self.dtype in ITEM_BYTES
        memories = (self.backend.memory_of(device) for device in (*devices, *destinations))
        if are_ranges and set(memories) == {HOST_MEMORY}:
            return self._joined_on_host(destinations, out)
        results = [self._gathered(devices, destination) for destination in destinations]
        return delivered(results, out, self.backend)

    def _joined_on_host(self, destinations: Sequence[Device], out: Out) -> tuple[Array, ...]:
        """One pass that reads each array once and writes it to all destinations."""
        backend, shape = self.backend, self.shape
        views = [backend.host_view(array) for array in self.arrays]
        if out is None:
            flats = result_pool.empty_batch([(math.prod(shape), views[0].dtype)] * len(destinations))
        else:
            flats = list(map(written_view, repeat(backend), out))
        inputs, outputs = ([flat.view(np.uint8) for flat in these] for these in (views, flats))
        edges = itertools.pairwise(itertools.accumulate([view.size for view in inputs], initial=0))
        tasks = [
            ([view], [flat[start:stop] for flat in outputs])
            for view, (start, stop) in zip(inputs, edges, strict=True)
            if view.size
        ]
        with recorded(Work("pack", f"join along axis {self.axis}", tuple(destinations))):
            fused_batch(tasks, COPYING)
        if out is None:
            return tuple(map(backend.from_host, flats, repeat(shape), destinations))
        backend.mark_written(tuple(out))
        return tuple(out)

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
    direct = direct_outs(gatherings, read.devices, destinations, outs)
    with recorded(Work("copy", "gather", devices, num_bytes, f"axis {axis}")):
        results = [
            gathering.run(read.devices, destinations, into)
            for gathering, into in zip(gatherings, direct, strict=True)
        ]
    return wrapped(delivered_late(results, direct, outs, gatherings), read.structure, destinations)


def direct_outs(
    gatherings: Sequence[Gathering], devices: tuple[Device, ...], destinations: tuple[Device, ...], outs: Outs
) -> Outs:
    """The arrays of `outs` if they can be written to while inputs are read; else None for each leaf."""
    if all(out is None for out in outs):
        return outs
    leaves = [
        Dense(gathering.arrays, LeafSpec(gathering.backend, "", (), devices, destinations), out)
        for gathering, out in zip(gatherings, outs, strict=True)
    ]
    are_free = all(leaf.spec.shares_host_memory for leaf in leaves) and are_apart(leaves)
    return outs if are_free else [None] * len(outs)


def delivered_late(
    results: Columns, direct: Outs, outs: Outs, gatherings: Sequence[Gathering]
) -> list[Sequence[Array]]:
    """Results in `outs`: those that were not written there directly are copied there now."""
    return [
        arrays if written is not None else delivered(arrays, out, gathering.backend)
        for arrays, written, out, gathering in zip(results, direct, outs, gatherings, strict=True)
    ]


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
