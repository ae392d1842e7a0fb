"""NumPy arrays: host memory, which all logical devices `cpu:k` share."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import Backend, address_range, check_host_device, dtype_named, native
from crossdevice.errors import ConversionError
from crossdevice.values.device import Device

_NUMBER_DTYPES = {"b": "bool", "i": "int32", "u": "int32", "f": "float32", "c": "complex128"}
"""dtypes of plain numbers, by the kind of dtype that NumPy reads them as."""


class NumpyBackend(Backend):
    """NumPy arrays, and also plain Python numbers and lists of them.

    Arrays of a subclass of ndarray are taken as the ndarrays they are underneath: `np.matrix`, for one, keeps
    two axes whatever is done with it.
    """

    name = "numpy"

    def namespace(self) -> Any:
        """Returns NumPy through array-api-compat, imported on demand since that imports all of NumPy."""
        import array_api_compat.numpy as xp

        return xp

    def check_array(self, array: Any, where: str) -> None:
        """Refuses masked arrays, which would lose their masks."""
        if _is_masked(array):
            raise ConversionError(f"{where} is a masked array; fill it first, its mask would be lost")

    # In C: it is asked for every array of every call. Strides tell whether kernels can read it as it is.
    signature = staticmethod(operator.attrgetter("__class__", "dtype", "shape", "strides"))  # type: ignore[assignment]

    def check_device(self, device: Device) -> None:
        """Accepts only the host's logical devices."""
        check_host_device("numpy", device)

    def dtype_of(self, array: Any) -> str:
        """Returns the name without byte order: big-endian arrays are read by value."""
        return _name_of(array.dtype)

    def host_view(self, array: NDArray[Any]) -> NDArray[Any]:
        """Returns the array itself if it is flat already."""
        is_flat = type(array) is np.ndarray and array.ndim == 1 and array.flags.c_contiguous
        return array if is_flat and array.dtype.isnative else native(np.asarray(array))

    def are_flat(self, arrays: Sequence[NDArray[Any]]) -> bool:
        """Returns True if each is an ndarray in native byte order and C-contiguous."""
        return all(
            type(own) is np.ndarray and own.flags.c_contiguous and own.dtype.isnative for own in arrays
        )

    def is_contiguous(self, array: NDArray[Any]) -> bool:
        """Returns True for native byte order and elements in the order of their indices."""
        return array.flags.c_contiguous and array.dtype.isnative

    def pointers_to(self, arrays: tuple[NDArray[Any], ...]) -> tuple[NDArray[Any], ...]:
        """Returns the ndarrays, which kernels read as C structs."""
        return arrays

    def adopted(self, memory: tuple[NDArray[Any], ...]) -> tuple[NDArray[Any], ...]:
        """Returns them unchanged: they are NumPy's own."""
        return memory

    def address_range(self, array: NDArray[Any]) -> tuple[int, int]:
        """Returns the array's own range."""
        return address_range(array if isinstance(array, np.ndarray) else np.asarray(array))

    def writable_view(self, array: NDArray[Any]) -> NDArray[Any] | None:
        """Returns a view of a contiguous, writable, native array; None otherwise."""
        if not isinstance(array, np.ndarray) or _is_masked(array):
            return None
        if not (array.dtype.isnative and array.flags.c_contiguous and array.flags.writeable):
            return None
        return np.asarray(array).reshape(-1)

    def from_host(self, flat: NDArray[Any], shape: tuple[int, ...], device: Device) -> NDArray[Any]:  # noqa: ARG002
        """Returns the same memory in this shape."""
        return flat if flat.shape == shape else flat.reshape(shape)

    def read_only(self, array: NDArray[Any], device: Device) -> NDArray[Any]:  # noqa: ARG002
        """Returns a view that cannot be written to."""
        view = np.asarray(array).view()
        view.flags.writeable = False
        return view

    def copy(self, array: NDArray[Any], device: Device) -> NDArray[Any]:  # noqa: ARG002
        """Copies to new memory, which all host devices share."""
        return np.array(array, copy=True, order="C")

    def flat(self, array: NDArray[Any]) -> NDArray[Any]:
        """Returns a view if the elements are contiguous."""
        return np.asarray(array).reshape(-1)

    def concat(self, arrays: Sequence[NDArray[Any]], axis: int, device: Device) -> NDArray[Any]:  # noqa: ARG002
        """Concatenates into new memory, which all host devices share."""
        return np.concatenate(list(map(np.asarray, arrays)), axis=axis)

    def cast(self, array: NDArray[Any], dtype: str) -> NDArray[Any]:
        """Converts to another dtype, bfloat16 included."""
        return np.asarray(array).astype(dtype_named(dtype))

    def from_parts(self, parts: NDArray[Any]) -> NDArray[Any]:
        """Returns the same memory, seen as complex."""
        return parts.view(np.result_type(parts.dtype, np.complex64))

    def scatter_rows(self, rows: NDArray[Any], indices: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """Adds up the rows of repeated indices."""
        dense = np.zeros(shape, rows.dtype)
        np.add.at(dense, np.asarray(indices), np.asarray(rows))
        return dense


@functools.lru_cache(maxsize=256)
def _name_of(dtype: np.dtype[Any]) -> str:
    """Caches the name, which NumPy builds on each access, in 4 us."""
    return str(dtype.name)


def arrays_of_numbers(column: Sequence[Any]) -> list[NDArray[Any]]:
    """Converts the numbers of all replicas to arrays; integers are int64 on all if they are on one.

    >>> [array.dtype.name for array in arrays_of_numbers([5, 2**40])]
    ['int64', 'int64']
    """
    arrays = [array_of_numbers(numbers) for numbers in column]
    if {array.dtype.name for array in arrays} == {"int32", "int64"}:
        return [array.astype(np.int64) for array in arrays]
    return arrays


def _is_masked(array: Any) -> bool:
    """Returns True for a masked array; its module is not imported, which would delay a first call."""
    # While another thread imports it, it has no such class yet, and nobody has an array of it.
    return isinstance(array, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ()))


def array_of_numbers(numbers: Any) -> NDArray[Any]:
    """Converts plain numbers as TensorFlow does: floats to float32, integers to int32 where they fit.

    >>> array_of_numbers([1, 2]).dtype, array_of_numbers(0.5).dtype, array_of_numbers(2**40).dtype
    (dtype('int32'), dtype('float32'), dtype('int64'))
    """
    try:
        array = np.asarray(numbers)
    except ValueError:
        raise ConversionError(
            f"{numbers!r} cannot be read as an array of numbers: its lists differ in length or depth"
        ) from None
    narrow = _NUMBER_DTYPES.get(array.dtype.kind)
    if narrow is None:
        raise ConversionError(f"{numbers!r} cannot be read as an array of numbers")
    if narrow == "int32" and array.size and not (array.min() >= -(2**31) and array.max() < 2**31):
        return array
    with np.errstate(over="ignore"):  # a number too large for float32 is infinite there
        return array.astype(narrow)
