"""Writing rows of an array at given indices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from crossdevice.errors import MismatchError
from crossdevice.strategies.variables.variable import Variable, backend_of_variable
from crossdevice.values.indexed_slices import IndexedSlices

_FUNCTIONS: dict[str, np.ufunc] = {
    "scatter_add": np.add,
    "scatter_sub": np.subtract,
    "scatter_mul": np.multiply,
    "scatter_div": np.divide,
    "scatter_min": np.minimum,
    "scatter_max": np.maximum,
}
"""What becomes of the rows at the indices; `scatter_update` replaces them."""


def scatter_with(method: str) -> Callable[[Variable, IndexedSlices], object]:
    """How to write slices to one copy of a variable: repeated indices all count, in order.

    The rows are written on the host: array libraries do not agree on what repeated indices mean.
    """

    def write(variable: Variable, slices: IndexedSlices) -> object:
        backend = backend_of_variable(variable.operand())
        rows = backend.to_host(variable.operand()).reshape(variable.shape).copy()
        indices = backend.to_host(slices.indices)
        values = backend.to_host(slices.values).reshape(backend.shape_of(slices.values))
        if indices.size and not (indices.min() >= 0 and indices.max() < len(rows)):
            raise MismatchError(
                f"{method} of variable {variable.name!r}: an index is outside of its {len(rows)} rows"
            )
        if method in _FUNCTIONS:
            _FUNCTIONS[method].at(rows, indices, values)
        else:
            rows[indices] = values
        return variable.store(backend.from_host(rows.reshape(-1), variable.shape, variable.device))

    return write
