"""All of a leaf but its elements: what plans and passes are prepared for."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from itertools import repeat
from typing import Any, NamedTuple, TypeAlias

from numpy.typing import NDArray

from crossdevice.backends.protocol import HOST_MEMORY, Array, Backend
from crossdevice.backends.registry import backend_of_type
from crossdevice.plans.packing import Item
from crossdevice.values.device import Device
from crossdevice.values.dtypes import ITEM_BYTES, result_dtype
from crossdevice.values.reduce_op import ReduceOp

Columns: TypeAlias = "Sequence[Sequence[Array]]"
"""The arrays of each leaf: one per replica, or one per destination."""

Out: TypeAlias = "Sequence[Array] | None"
"""The arrays that the results of a leaf are written to; None for new ones."""

Outs: TypeAlias = "Sequence[Out]"
"""The `Out` of each leaf."""


@dataclasses.dataclass(frozen=True, eq=False)
class LeafSpec:
    """Arrays of one library, dtype and shape on `devices`, wanted on `destinations`.

    Compared by identity: equal leaves get the same spec, so that looking up what was prepared for a batch
    of hundreds costs nothing.
    """

    backend: Backend
    dtype: str
    shape: tuple[int, ...]
    devices: tuple[Device, ...]
    destinations: tuple[Device, ...]
    into: str | None = None
    """The dtype of the results, if it is not the one that the operation gives."""
    own_op: ReduceOp | None = None
    """The operation, if it is not that of the whole batch."""

    def result_dtype(self, op: ReduceOp, is_weighted: bool = False) -> str:
        """The dtype of the results of a batch's operation."""
        if self.own_op is not None:
            return result_dtype(self.dtype, self.own_op)
        return self.into or result_dtype(self.dtype, op, is_weighted)

    @functools.cached_property
    def num_elements(self) -> int:
        """Elements of one replica's array."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of one replica's array."""
        return self.num_elements * ITEM_BYTES[self.dtype]

    @functools.cached_property
    def shares_host_memory(self) -> bool:
        """True if everything happens in the host's memory."""
        memories = {self.backend.memory_of(device) for device in (*self.devices, *self.destinations)}
        return memories == {HOST_MEMORY}

    @property
    def shares_memory(self) -> bool:
        """True if everything happens in one memory."""
        return self.shares_host_memory or self.shared_gpu is not None

    @functools.cached_property
    def shared_gpu(self) -> Device | None:
        """The one GPU on which everything happens, if it does on one."""
        (device, *others) = dict.fromkeys((*self.devices, *self.destinations))
        return None if others or device.type != "cuda" else device

    def adopted(self, flats: Sequence[NDArray[Any]], *, is_shared: bool) -> tuple[Array, ...]:
        """Host memory as results on the destinations; what they share is marked read-only where it can be."""
        results = tuple(map(self.backend.from_host, flats, repeat(self.shape), self.destinations))
        if is_shared and not self.backend.is_immutable:
            return tuple(map(self.backend.read_only, results, self.destinations))
        return results


class Dense(NamedTuple):
    """A checked leaf of plain arrays, ready to be reduced, into `out` unless that is None.

    With an `order` all of them are views whose axes are in memory order.
    """

    arrays: Sequence[Array]
    spec: LeafSpec
    out: Out = None
    order: AxisOrder | None = None
    path: str = ""

    @property
    def backend(self) -> Backend:
        """The library of its arrays."""
        return self.spec.backend


def bytes_of(backend: Backend, array: Array) -> int:
    """Bytes of an array's elements; 0 for dtypes without a known size, such as strings."""
    known: int | None = getattr(array, "nbytes", None)  # to name a dtype takes NumPy longer than to record
    if known is None:
        known = math.prod(backend.shape_of(array)) * ITEM_BYTES.get(backend.dtype_of(array), 0)
    return known


def items_of(specs: Sequence[LeafSpec]) -> list[Item]:
    """A batch as packing sees it: only leaves of one library, dtype and placement travel together."""
    return [
        Item(
            spec.num_elements,
            ITEM_BYTES[spec.dtype],
            (spec.backend, spec.dtype, spec.devices, spec.destinations, spec.into),
        )
        for spec in specs
    ]


class AxisOrder(NamedTuple):
    """The axes of a leaf's arrays from the slowest to the fastest, and its `out` as it was given."""

    axes: tuple[int, ...]
    out: Sequence[Array] | None

    def restored(self, backend: Backend, results: Sequence[Array]) -> tuple[Array, ...]:
        """Results of arrays in memory order, with the axes where they belong; `out` itself if given."""
        if self.out is not None:
            return tuple(self.out)
        permute = backend.namespace().permute_dims
        back = tuple(self.axes.index(axis) for axis in range(len(self.axes)))
        return tuple(permute(result, back) for result in results)


def shared_axis_order(arrays: Sequence[Array], out: Sequence[Array] | None) -> AxisOrder | None:
    """The order that inputs and outputs share; None where it is row-major, or they must be copied anyway."""
    backend = backend_of_type(type(arrays[0]))
    axes = None if backend is None else backend.axis_order(arrays[0])
    if backend is None or axes is None:
        return None
    shape = arrays[0].shape
    for array in (*arrays[1:], *(out or ())):
        if backend_of_type(type(array)) is not backend or array.shape != shape:
            return None
        if backend.axis_order(array) != axes:
            return None
    return AxisOrder(axes, out)


def in_memory_order(
    order: AxisOrder, arrays: Sequence[Array]
) -> tuple[tuple[Array, ...], tuple[Array, ...] | None]:
    """Contiguous views of a leaf's arrays and of its `out`; an array that is both gets one view."""
    backend = backend_of_type(type(arrays[0]))
    assert backend is not None
    permute = backend.namespace().permute_dims
    views = {id(array): permute(array, order.axes) for array in (*arrays, *(order.out or ()))}
    out = None if order.out is None else tuple(views[id(array)] for array in order.out)
    return tuple(views[id(array)] for array in arrays), out
