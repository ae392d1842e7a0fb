"""Arrays whose axes lie in memory in another order than their shape says: they are reduced as they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from crossdevice.backends.protocol import Array, Backend
from crossdevice.backends.registry import backend_of_type


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
