"""What all libraries share that follow the array API standard."""

from __future__ import annotations

import abc
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import HOST_MEMORY, Array, Streams
from crossdevice.errors import DeviceError
from crossdevice.values.device import Device
from crossdevice.values.indexed_slices import IndexedSlices
from crossdevice.values.reduce_op import ReduceOp


class ArrayApiBackend(abc.ABC):
    """A backend in terms of the standard's functions; a library's own file adds what the standard lacks."""

    name: str
    is_immutable = False
    shares_gpu_arrays = False
    counts_writes = False

    @abc.abstractmethod
    def namespace(self) -> Any:
        """The library's array API namespace."""

    @abc.abstractmethod
    def host_view(self, array: Array) -> NDArray[Any]:
        """A host array's elements as a flat, contiguous, native ndarray."""

    def working_on(self, device: Device) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Functions of the standard work where their arguments are."""
        return nullcontext()

    def memory_of(self, device: Device) -> str:
        """The host's memory is one; every other device has its own."""
        return HOST_MEMORY if device.is_host else str(device)

    def signature(self, array: Array) -> Hashable:
        """Type, dtype, shape and device."""
        return type(array), array.dtype, array.shape, array.device

    @abc.abstractmethod
    def address_range(self, array: Array) -> tuple[int, int]:
        """Where an array's memory starts and ends."""

    def addresses_of(self, arrays: Sequence[Array]) -> list[int]:
        """Where their memory starts."""
        return [self.address_range(array)[0] for array in arrays]

    def dtype_of(self, array: Array) -> str:
        """The dtype's name, without the library's prefix."""
        return str(array.dtype).rpartition(".")[2]

    def shape_of(self, array: Array) -> tuple[int, ...]:
        """The shape."""
        return tuple(array.shape)

    def read_only(self, array: Array, device: Device) -> Array:  # noqa: ARG002
        """The standard has no such mark."""
        return array

    def to_host(self, array: Array) -> NDArray[Any]:
        """The elements as a flat ndarray."""
        return self.host_view(array)

    def flat(self, array: Array) -> Array:
        """The elements as a flat array."""
        return self.namespace().reshape(array, (-1,))

    def reshape(self, flat: Array, shape: tuple[int, ...]) -> Array:
        """A flat array in another shape."""
        return self.namespace().reshape(flat, shape)

    def part_of(self, flat: Array, start: int, stop: int) -> Array:
        """A slice."""
        return flat[start:stop]

    def concat(self, arrays: Sequence[Array], axis: int, device: Device) -> Array:  # noqa: ARG002
        """Arrays end to end along `axis`, where they are."""
        return self.namespace().concat(list(arrays), axis=axis)

    def cast(self, array: Array, dtype: str) -> Array:
        """The values in another dtype."""
        xp = self.namespace()
        return xp.astype(array, getattr(xp, dtype))

    def round_once(self, wide: Array, dtype: str) -> Array:
        """The standard's own dtypes are all wide enough for a plain cast."""
        return self.cast(wide, dtype)

    def divided(self, total: Array, divisor: int) -> Array:
        """By an array of one: by a plain number, PyTorch on a GPU would multiply by its reciprocal."""
        return total / self.namespace().full_like(total[:1], divisor)

    def parts_of(self, array: Array) -> Array:
        """The standard cannot make a complex number of an infinite part, so `from_parts` has no default."""
        xp = self.namespace()
        return self.flat(xp.stack([xp.real(array), xp.imag(array)], axis=-1))

    def mark_written(self, outs: Sequence[Array]) -> None:  # noqa: B027 - nothing to do is an answer
        """Most libraries keep no count."""

    def as_indexed_slices(self, array: Array) -> IndexedSlices | None:  # noqa: ARG002
        """The standard has no sparse arrays."""
        return None

    def write(self, out: Array, value: Array) -> None:
        """Copies values into an existing array."""
        out[...] = value

    def gpu_stream(self, device: Device) -> int | None:  # noqa: ARG002
        """PyTorch's, unless the library has one that can be asked for."""
        return None

    def from_dlpack(self, tensor: Any) -> Array:
        """Most libraries do as the standard says."""
        return self.namespace().from_dlpack(tensor)

    def engine_name(self) -> str | None:
        """Most libraries have no engine."""
        return None

    def engine_lack(self, dtype: str, op: ReduceOp, num_devices: int) -> str | None:  # noqa: ARG002
        """Most libraries have no engine."""
        return f"{self.name} arrays have no collective engine"

    def engine_all_reduce(self, arrays: Sequence[Array], op: ReduceOp) -> list[Array]:
        """Most libraries have no engine."""
        raise NotImplementedError(f"{self.name} arrays have no collective engine")

    def streams(self, devices: Iterable[Device]) -> Streams | None:  # noqa: ARG002
        """Most libraries compute at once, or order what they compute themselves."""
        return None


def address_range(array: NDArray[Any]) -> tuple[int, int]:
    """Where an ndarray's memory starts and ends; from end to end for one with strides."""
    start: int = array.__array_interface__["data"][0]
    if array.flags.c_contiguous:
        return start, start + array.nbytes
    return strided_range(start, array)


def strided_range(start: int, array: Any) -> tuple[int, int]:
    """The same for any array with strides in bytes whose first element is at `start`."""
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
    """A flat, contiguous array in this machine's byte order: the array itself where it already is one."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return np.ascontiguousarray(array).reshape(-1)
