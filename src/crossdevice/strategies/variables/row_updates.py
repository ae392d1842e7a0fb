"""Writing rows of an array at given indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from crossdevice.backends.registry import backend_of_type
from crossdevice.errors import ConversionError, DtypeMismatchError, MismatchError, ShapeMismatchError
from crossdevice.execution.local.sparse import to_dense
from crossdevice.values.distributed import IndexedSlices
from crossdevice.values.dtypes import INTEGERS
from crossdevice.values.quantities import counted, kind_text

if TYPE_CHECKING:
    from crossdevice.strategies.variables.variable import Variable

_FUNCTIONS: dict[str, np.ufunc] = {
    "scatter_add": np.add,
    "scatter_sub": np.subtract,
    "scatter_mul": np.multiply,
    "scatter_div": np.divide,
    "scatter_min": np.minimum,
    "scatter_max": np.maximum,
}
"""Functions of the rows at the indices and the new ones; `scatter_update` replaces them."""


def _scatter_method(method: str, doc: str) -> Callable[..., Any]:
    def scatter(
        self: ScatterMethods,
        sparse_delta: Any,
        use_locking: bool = False,  # noqa: ARG001 - as in TensorFlow
        name: str | None = None,  # noqa: ARG001
    ) -> Any:
        return self._scatter(method, sparse_delta)

    scatter.__name__, scatter.__doc__ = method, doc
    return scatter


class ScatterMethods:
    """The methods of a variable that write rows at indices; repeated indices all count, in order.

    `use_locking` and `name` are TensorFlow's, and change nothing.
    """

    __slots__ = ()

    scatter_add = _scatter_method("scatter_add", "Adds rows at their indices.")
    scatter_sub = _scatter_method("scatter_sub", "Subtracts rows at their indices.")
    scatter_mul = _scatter_method("scatter_mul", "Multiplies by rows at their indices.")
    scatter_div = _scatter_method("scatter_div", "Divides by rows at their indices.")
    scatter_min = _scatter_method("scatter_min", "Takes the minimum with rows at their indices.")
    scatter_max = _scatter_method("scatter_max", "Takes the maximum with rows at their indices.")
    scatter_update = _scatter_method("scatter_update", "Replaces the rows at the indices.")

    def _scatter(self, method: str, slices: Any) -> Any:
        """Brings rows to the arrays they concern here and now."""
        raise NotImplementedError


def rows_of(method: str, slices: Any) -> IndexedSlices:
    """Converts the argument of a scatter method, sparse tensors too, to IndexedSlices of arrays."""
    rows = _as_slices(slices)
    if rows is None:
        raise ConversionError(f"{method} takes IndexedSlices, got {kind_text(slices)}")
    return IndexedSlices(rows.values, _array_of_indices(method, rows.indices), rows.dense_shape)


def whole_array(value: Any, name: str) -> Any:
    """Returns the dense array of a sparse value that is written to a whole variable; others unchanged."""
    rows = _as_slices(value)
    return value if rows is None else to_dense(rows, f"the value given to variable {name!r}")


def _as_slices(value: Any) -> IndexedSlices | None:
    if isinstance(value, IndexedSlices):
        return value
    backend = backend_of_type(type(value))
    return None if backend is None else backend.as_indexed_slices(value)


def _array_of_indices(method: str, indices: Any) -> Any:
    backend = backend_of_type(type(indices)) if hasattr(indices, "dtype") else None
    try:
        array = np.asarray(indices) if backend is None else indices
    except ValueError:  # lists of different lengths
        array = np.asarray(None)
    dtype = array.dtype.name if backend is None else backend.dtype_of(array)
    if dtype not in INTEGERS:
        raise DtypeMismatchError(
            f"{method} takes rows by integers; got indices that are {dtype}: {indices!r}"
        )
    return array


def scatter_with(method: str) -> Callable[[Variable, IndexedSlices], object]:
    """Returns a function that writes slices to one copy of a variable.

    The rows are written on the host: array libraries do not agree on what repeated indices mean.
    """

    def write(variable: Variable, slices: IndexedSlices) -> object:
        backend = backend_of_type(type(variable.operand()))
        of_indices = backend_of_type(type(slices.indices))
        assert backend is not None, "variables are made of arrays"
        assert of_indices is not None, "indices were made an array"
        shape, target = variable.shape, f"{method} of variable {variable.name!r}"
        if not shape:
            raise ShapeMismatchError(f"{target}: it is a scalar, which has no rows; use assign")
        index_shape, row_shape = of_indices.shape_of(slices.indices), backend.shape_of(slices.values)
        wanted = (*index_shape, *shape[1:])
        if row_shape not in ((), wanted):
            raise ShapeMismatchError(
                f"{target}: values have shape {row_shape}; expected {wanted}, a row of shape {shape[1:]} for "
                "each index, or one number for all"
            )
        rows = backend.to_host(variable.operand()).reshape(shape).copy()
        indices = of_indices.to_host(slices.indices).reshape(index_shape)
        values = backend.to_host(slices.values).reshape(row_shape)
        if indices.size and not (indices.min() >= 0 and indices.max() < len(rows)):
            raise MismatchError(f"{target}: an index is outside of its {counted(len(rows), 'row')}")
        if method in _FUNCTIONS:
            _FUNCTIONS[method].at(rows, indices, values)
        else:
            rows[indices] = values
        return variable.store(backend.from_host(rows.reshape(-1), shape, variable.device))

    return write
