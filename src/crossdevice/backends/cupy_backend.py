"""CuPy arrays, on CUDA devices."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import array_api_compat.cupy as xp
import cupy
import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.array_api_backend import ArrayApiBackend, strided_range
from crossdevice.errors import ConversionError, DeviceError
from crossdevice.values.device import Device


class CupyBackend(ArrayApiBackend):
    """No array of CuPy is in the host's memory; on one GPU the kernels of PyTorch and Triton do their work.

    That happens on CuPy's own current stream, so that it needs no events.
    """

    name = "cupy"
    shares_gpu_arrays = True

    def namespace(self) -> Any:
        """CuPy, through array-api-compat."""
        return xp

    def working_on(self, device: Device) -> AbstractContextManager[Any]:
        """CuPy computes on the current device."""
        where: AbstractContextManager[Any] = cupy.cuda.Device(device.index)
        return where

    def signature(self, array: Any) -> Hashable:
        """CuPy's devices cannot be hashed; their numbers can."""
        return type(array), array.dtype, array.shape, array.device.id

    def check_array(self, array: Any, where: str) -> None:
        """CuPy can hold bfloat16, but computes with it only in part."""
        if self.dtype_of(array) == "bfloat16":
            raise ConversionError(f"{where} is a bfloat16 array of CuPy; expected another dtype, or PyTorch")

    def check_device(self, device: Device) -> None:
        """GPUs of this process only."""
        count = cupy.cuda.runtime.getDeviceCount()
        if device.type != "cuda" or not 0 <= device.index < count:
            found = ", ".join(f"cuda:{number}" for number in range(count))
            raise DeviceError(f"{device} does not exist for cupy arrays; those that do are {found}")

    def host_view(self, array: Any) -> NDArray[Any]:
        """A copy: the elements are not on the host."""
        return np.ascontiguousarray(cupy.asnumpy(array)).reshape(-1)

    def address_range(self, array: Any) -> tuple[int, int]:
        """On the GPU, gaps between elements included."""
        return strided_range(array.data.ptr, array)

    def gpu_stream(self, device: Device) -> int | None:
        """CuPy's current stream of the device."""
        with self.working_on(device):
            handle: int = cupy.cuda.get_current_stream().ptr
        return handle

    def from_dlpack(self, tensor: Any) -> Any:
        """In CuPy's own namespace."""
        return cupy.from_dlpack(tensor)

    def writable_view(self, array: Any) -> None:  # noqa: ARG002
        """There is none on the host."""
        return

    def from_host(self, flat: NDArray[Any], shape: tuple[int, ...], device: Device) -> Any:
        """A copy on the device."""
        with self.working_on(device):
            return cupy.array(flat).reshape(shape)

    def copy(self, array: Any, device: Device) -> Any:
        """New, contiguous memory on the device."""
        with self.working_on(device):
            return cupy.array(array, copy=True, order="C")

    def concat(self, arrays: Sequence[Any], axis: int, device: Device) -> Any:
        """On the device where they are."""
        with self.working_on(device):
            return cupy.concatenate(list(arrays), axis)

    def from_parts(self, parts: Any) -> Any:
        """The same memory, seen as complex."""
        return parts.view(np.result_type(parts.dtype, np.complex64))

    def scatter_rows(self, rows: Any, indices: Any, shape: tuple[int, ...]) -> Any:
        """Repeated indices add up."""
        with rows.device:
            dense = cupy.zeros(shape, rows.dtype)
            cupy.add.at(dense, indices, rows)
        return dense
