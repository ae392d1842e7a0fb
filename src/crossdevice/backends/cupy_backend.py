"""CuPy arrays, on CUDA devices."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import array_api_compat.cupy as xp
import cupy
import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.cuda_streams import CudaStreams, SideStreams
from crossdevice.backends.nccl_engines import NcclBackend, Share
from crossdevice.backends.protocol import ThreadState, strided_range
from crossdevice.errors import ConversionError, DeviceError
from crossdevice.values.device import Device


class CupyBackend(NcclBackend):
    """CuPy arrays, never in host memory; on one GPU the Triton kernels for PyTorch do their work.

    That happens on CuPy's own current stream, so that it needs no events.
    """

    name = "cupy"
    shares_gpu_arrays = True

    def namespace(self) -> Any:
        """Returns CuPy, through array-api-compat."""
        return xp

    def working_on(self, device: Device) -> AbstractContextManager[Any]:
        """Makes the device CuPy's current one, on which CuPy computes."""
        return cupy_device(device)

    def thread_state(self, devices: Sequence[Device]) -> ThreadState | None:
        """Makes a replica's new arrays live on its GPU."""
        return self.working_on if devices and not any(device.is_host for device in devices) else None

    def signature(self, array: Any) -> Hashable:
        """Uses the number of the device, since CuPy's devices cannot be hashed."""
        return type(array), array.dtype, array.shape, array.device.id

    def check_array(self, array: Any, where: str) -> None:
        """Refuses bfloat16, which CuPy holds but computes with only in part."""
        if self.dtype_of(array) == "bfloat16":
            raise ConversionError(f"{where} is a bfloat16 array of CuPy; expected another dtype, or PyTorch")

    def check_device(self, device: Device) -> None:
        """Accepts only GPUs of this process."""
        count = cupy.cuda.runtime.getDeviceCount()
        if device.type != "cuda" or not 0 <= device.index < count:
            found = ", ".join(f"cuda:{number}" for number in range(count))
            raise DeviceError(f"{device} does not exist for cupy arrays; those that do are {found}")

    def host_view(self, array: Any) -> NDArray[Any]:
        """Returns a copy: the elements are not on the host."""
        return np.ascontiguousarray(cupy.asnumpy(array)).reshape(-1)

    def address_range(self, array: Any) -> tuple[int, int]:
        """Returns the range on the GPU, gaps between elements included."""
        return strided_range(array.data.ptr, array)

    def gpu_stream(self, device: Device) -> int | None:
        """Returns CuPy's current stream of the device."""
        with self.working_on(device):
            handle: int = cupy.cuda.get_current_stream().ptr
        return handle

    def from_dlpack(self, tensor: Any) -> Any:
        """Adopts the memory in CuPy's own namespace."""
        return cupy.from_dlpack(tensor)

    def writable_view(self, array: Any) -> None:  # noqa: ARG002
        """Always None: CuPy has no host memory."""
        return

    def from_host(self, flat: NDArray[Any], shape: tuple[int, ...], device: Device) -> Any:
        """Returns a copy on the device."""
        with self.working_on(device):
            return cupy.array(flat).reshape(shape)

    def copy(self, array: Any, device: Device) -> Any:
        """Copies to new, contiguous memory; CuPy itself does not order copies between two devices."""
        if array.device.id == cupy_device(device).id:
            with self.working_on(device):
                return cupy.array(array, copy=True, order="C")
        with array.device:
            here = cupy.cuda.get_current_stream()
            written = here.record()
        with self.working_on(device):
            there = cupy.cuda.get_current_stream()
            there.wait_event(written)
            copied = cupy.array(array, copy=True, order="C")
            read = there.record()
        with array.device:
            here.wait_event(read)
        return copied

    def concat(self, arrays: Sequence[Any], axis: int, device: Device) -> Any:
        """Concatenates on the device of the arrays."""
        with self.working_on(device):
            return cupy.concatenate(list(arrays), axis)

    def from_parts(self, parts: Any) -> Any:
        """Returns the same memory, seen as complex."""
        return parts.view(np.result_type(parts.dtype, np.complex64))

    def scatter_rows(self, rows: Any, indices: Any, shape: tuple[int, ...]) -> Any:
        """Adds up the rows of repeated indices."""
        with rows.device:
            dense = cupy.zeros(shape, rows.dtype)
            cupy.add.at(dense, indices, rows)
        return dense

    def share_of(self, source: Any, device: Device) -> Share:
        """Prepares one device's part, on CuPy's current stream."""
        target = cupy.empty_like(source)
        stream = cupy.cuda.get_current_stream().ptr
        return Share(source, target, device, stream, source.data.ptr, target.data.ptr, source.size)

    def streams(self, devices: Iterable[Device]) -> CupyStreams | None:
        """Returns side streams if there are several GPUs."""
        apart = set(devices)
        return CupyStreams(apart) if len(apart) > 1 else None

    def side_streams(self, devices: Iterable[Device]) -> SideStreams | None:
        """Returns side streams of all devices: CuPy has GPUs only."""
        return SideStreams(CupyStreams(devices))


class CupyStreams(CudaStreams):
    """CuPy's streams; its pool does not know of readers, so arrays that are read are kept until the end."""

    _kept: ClassVar[dict[Any, Any]] = {}

    def __init__(self, devices: Iterable[Device]) -> None:
        super().__init__(devices)
        self._held: list[Any] = []

    def __exit__(self, *failure: object) -> None:
        """Releases the arrays once the current streams wait for all readers."""
        super().__exit__(*failure)
        self._held.clear()

    def new_stream(self, device: Device) -> Any:
        """Returns a non-blocking stream with its device, which the default stream lacks."""
        where = cupy_device(device)
        with where:
            return where, cupy.cuda.Stream(non_blocking=True)

    def current_stream(self, device: Device) -> Any:
        """Returns the current stream of the calling thread."""
        where = cupy_device(device)
        with where:
            return where, cupy.cuda.get_current_stream()

    def handle_of(self, stream: Any) -> int:
        """Returns the `cudaStream_t`."""
        return stream[1].ptr

    def use(self, stream: Any) -> None:
        """Makes the device current first: CuPy takes a stream only then."""
        where, side = stream
        where.use()
        side.use()

    def current_device(self) -> Any:
        """Returns the current device of the calling thread."""
        return cupy.cuda.Device()

    def use_device(self, device: Any) -> None:
        """Sets the device for the calling thread."""
        device.use()

    def event_on(self, stream: Any) -> Any:
        """Records a new event on the stream's device."""
        where, side = stream
        with where:
            return side.record(cupy.cuda.Event(disable_timing=True))

    def has_happened(self, event: Any) -> bool:
        """Queries the event without waiting for it."""
        return event.done

    def make_wait(self, stream: Any, event: Any) -> None:
        """Makes the GPU wait; the host goes on."""
        where, side = stream
        with where:
            side.wait_event(event)

    def keep_for(self, stream: Any, array: Any) -> None:  # noqa: ARG002
        """Keeps the array until the current streams wait for all tracks."""
        self._held.append(array)


def cupy_device(device: Device) -> Any:
    """Returns CuPy's name of a device."""
    return cupy.cuda.Device(device.index)
