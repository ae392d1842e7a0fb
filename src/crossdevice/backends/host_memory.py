"""Host memory as ndarrays: its addresses, and the devices that can reach it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.errors import DeviceError
from crossdevice.values.device import Device


def address_range(array: NDArray[Any]) -> tuple[int, int]:
    """Returns the first and the last address of an ndarray, gaps between strides included."""
    start: int = array.__array_interface__["data"][0]
    if array.flags.c_contiguous:
        return start, start + array.nbytes
    return strided_range(start, array)


def strided_range(start: int, array: Any) -> tuple[int, int]:
    """Returns the range of any array with strides in bytes and its first element at `start`."""
    if not array.size:
        return start, start
    reach = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    end = start + sum(step for step in reach if step > 0) + array.itemsize
    return start + sum(step for step in reach if step < 0), end


def check_host_device(name: str, device: Device) -> None:
    """Refuses every device that is not a logical device of this process."""
    here = (device.job, device.replica, device.task) == ("localhost", 0, 0)
    if not device.is_host or device.index < 0 or not here:
        raise DeviceError(f"{device} does not exist for {name} arrays; those that do are cpu:0, cpu:1, ...")


def native(array: NDArray[Any]) -> NDArray[Any]:
    """Returns a flat, contiguous array in native byte order: the array itself if it is one already."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return np.ascontiguousarray(array).reshape(-1)
