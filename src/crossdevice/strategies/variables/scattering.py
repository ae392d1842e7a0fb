"""Writing rows of an array at given indices."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import numpy as np

from crossdevice.backends.registry import backend_of_type
from crossdevice.errors import ConversionError, MismatchError
from crossdevice.values.indexed_slices import IndexedSlices
from crossdevice.values.variable import Variable


class Scatter(enum.Enum):
    """What happens to the rows at the indices."""

    ADD = "scatter_add"
    SUB = "scatter_sub"
    MUL = "scatter_mul"
    DIV = "scatter_div"
    MIN = "scatter_min"
    MAX = "scatter_max"
    UPDATE = "scatter_update"

    def __str__(self) -> str:
        return self.value


_FUNCTIONS: dict[Scatter, np.ufunc] = {
    Scatter.ADD: np.add,
    Scatter.SUB: np.subtract,
    Scatter.MUL: np.multiply,
    Scatter.DIV: np.divide,
    Scatter.MIN: np.minimum,
    Scatter.MAX: np.maximum,
}


def scatter_with(kind: Scatter) -> Callable[[Variable, IndexedSlices], object]:
    """How to write slices to one copy of a variable: repeated indices all count, in order.

    The rows are written on the host: array libraries do not agree on what repeated indices mean.
    """

    def write(variable: Variable, slices: IndexedSlices) -> object:
        backend = backend_of_type(type(variable.value()))
        if backend is None:
            raise ConversionError(f"variable {variable.name!r} holds no array")
        rows = backend.to_host(variable.value()).reshape(variable.shape).copy()
        indices = backend.to_host(slices.indices)
        values = backend.to_host(slices.values).reshape(backend.shape_of(slices.values))
        if indices.size and not (indices.min() >= 0 and indices.max() < len(rows)):
            raise MismatchError(
                f"{kind} of variable {variable.name!r}: an index is outside of its {len(rows)} rows"
            )
        if kind is Scatter.UPDATE:
            rows[indices] = values
        else:
            _FUNCTIONS[kind].at(rows, indices, values)
        flat: Any = rows.reshape(-1)
        return variable.assign(backend.from_host(flat, variable.shape, variable.device))

    return write
