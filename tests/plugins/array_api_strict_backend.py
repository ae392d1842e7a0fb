"""Arrays of array-api-strict: the array API standard and nothing more, to test against."""

from __future__ import annotations

from typing import Any

import array_api_strict as xp
import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import Backend, address_range, check_host_device, native
from crossdevice.errors import ConversionError
from crossdevice.values.device import Device


class ArrayApiStrictBackend(Backend):
    """What any library of the standard needs: DLPack in both directions, and what the standard lacks."""

    name = "array_api_strict"

    def namespace(self) -> Any:
        """The standard."""
        return xp

    def check_array(self, array: Any, where: str) -> None:
        """Its other devices exist only to be refused."""
        if array.device != xp.Device("CPU_DEVICE"):
            raise ConversionError(f"{where} is on {array.device}; expected an array on the host")

    def check_device(self, device: Device) -> None:
        """Only the host's logical devices exist."""
        check_host_device("array_api_strict", device)

    def host_view(self, array: Any) -> NDArray[Any]:
        """The array's memory."""
        return native(np.from_dlpack(array))

    def address_range(self, array: Any) -> tuple[int, int]:
        """That of its view."""
        return address_range(np.from_dlpack(array))

    def writable_view(self, array: Any) -> NDArray[Any] | None:
        """Contiguous memory, or not at all."""
        view = np.from_dlpack(array)
        return view.reshape(-1) if view.flags.c_contiguous and view.flags.writeable else None

    def from_host(self, flat: NDArray[Any], shape: tuple[int, ...], device: Device) -> Any:
        """The same memory in shape."""
        return xp.from_dlpack(flat.reshape(shape))

    def copy(self, array: Any, device: Device) -> Any:
        """New memory; every host device has the same."""
        return xp.asarray(array, copy=True)

    def from_parts(self, parts: Any) -> Any:
        """The same memory, seen as complex."""
        flat = self.host_view(parts)
        return xp.from_dlpack(flat.view(np.result_type(flat.dtype, np.complex64)))

    def scatter_rows(self, rows: Any, indices: Any, shape: tuple[int, ...]) -> Any:
        """Repeated indices add up, one row after another."""
        dense = xp.zeros(shape, dtype=rows.dtype)
        for number in range(rows.shape[0]):
            row = int(indices[number])
            dense[row, ...] = dense[row, ...] + rows[number, ...]
        return dense
