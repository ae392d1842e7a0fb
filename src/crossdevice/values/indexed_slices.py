"""Rows of a larger array, by index: the sparse gradients of embedding tables."""

from __future__ import annotations

from typing import Any

from crossdevice.errors import ConversionError
from crossdevice.values.device import Device, device_of


class IndexedSlices:
    """`values[i]` belongs to row `indices[i]` of an array of shape `dense_shape`.

    Indices may repeat; repeated rows are added when the value is converted to a dense array.

    Args:
        values: the rows.
        indices: the number of each row in the whole array.
        dense_shape: the shape of the whole array; needed where it is made dense.

    >>> import numpy as np, crossdevice as cd
    >>> rows = IndexedSlices(np.float32([[1], [2], [3]]), indices=np.array([0, 2, 2]), dense_shape=(4, 1))
    >>> cd.to_dense(rows).ravel()
    array([1., 0., 5., 0.], dtype=float32)
    """

    __slots__ = ("dense_shape", "indices", "values")

    def __init__(self, values: Any, indices: Any, dense_shape: Any = None) -> None:
        self.values = values
        self.indices = indices
        self.dense_shape = None if dense_shape is None else _checked_shape(dense_shape)

    def with_parts(self, values: Any, indices: Any, dense_shape: tuple[int, ...] | None) -> Any:
        """Returns sparse rows of the same kind, in the library they came from."""
        return IndexedSlices(values, indices, dense_shape)

    @property
    def device(self) -> Device | str:
        """The device of `values`; `"cpu"` for host memory, as NumPy says it."""
        return device_of(self.values) or "cpu"

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of the array that the rows belong to, if it is known."""
        return self.dense_shape

    @property
    def dtype(self) -> Any:
        """The dtype of `values`."""
        return self.values.dtype

    def __repr__(self) -> str:
        parts = f"values={self.values!r}, indices={self.indices!r}, dense_shape={self.dense_shape}"
        return f"IndexedSlices({parts})"


def _checked_shape(given: Any) -> tuple[int, ...]:
    try:
        shape = tuple(map(int, given))
    except (TypeError, ValueError):
        shape = ()
    if not shape or min(shape) < 0:
        raise ConversionError(
            f"dense_shape must be the shape of an array with rows, such as (4, 2); got {given!r}"
        )
    return shape
