"""The interface between crossdevice and an array library, and what backends of host memory share."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from crossdevice.errors import DeviceError, DtypeError
from crossdevice.values.device import Device, Track, host_device
from crossdevice.values.distributed import IndexedSlices
from crossdevice.values.dtypes import SHORT_FLOATS
from crossdevice.values.reduce_op import ReduceOp

if TYPE_CHECKING:
    from crossdevice.backends.cuda_streams import SideStreams


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


Array = Any
"""An array of the backend's library."""

HOST_MEMORY = "host"


class Backend(abc.ABC):
    """One array library. Dtypes are named as in `values.dtypes`; nothing here changes its arguments
    except `write` and `mark_written`.

    The first part is what every library must say for itself. The rest has defaults in terms of the array
    API standard (`namespace`); a library overrides what it does better or lacks.
    """

    name: str

    is_immutable: bool = False
    """True if arrays cannot be written to: results may then share one memory, and `out=` is refused."""

    shares_gpu_arrays: bool = False
    """True if arrays on a GPU can be handed over and taken back by DLPack."""

    counts_writes: bool = False
    """True if the library keeps count of writes to its arrays, so that `mark_written` matters."""

    autograd: Autograd | None = None
    """Automatic differentiation of calls, in a library that has it; None otherwise."""

    # ---------------------------------------------------------------- required

    @abc.abstractmethod
    def namespace(self) -> Any:
        """Returns the library's array API namespace."""

    @abc.abstractmethod
    def check_device(self, device: Device) -> None:
        """Refuses devices that do not exist, naming those that do."""

    @abc.abstractmethod
    def host_view(self, array: Array) -> NDArray[Any]:
        """Returns a host array's elements as a flat, contiguous, native ndarray: a view, else a copy."""

    @abc.abstractmethod
    def writable_view(self, array: Array) -> NDArray[Any] | None:
        """Returns the same as a view that writes to the array; None if that is impossible."""

    @abc.abstractmethod
    def address_range(self, array: Array) -> tuple[int, int]:
        """Returns the first and the last address of an array, gaps between its elements included."""

    @abc.abstractmethod
    def from_host(self, flat: NDArray[Any], shape: tuple[int, ...], device: Device) -> Array:
        """Returns an array on `device`; in host memory it adopts `flat`."""

    @abc.abstractmethod
    def copy(self, array: Array, device: Device) -> Array:
        """Returns the same values in new memory on `device`."""

    @abc.abstractmethod
    def from_parts(self, parts: Array) -> Array:
        """Returns the complex array of real and imaginary parts in turn.

        The standard cannot make a complex number of an infinite part, so there is no default.
        """

    @abc.abstractmethod
    def scatter_rows(self, rows: Array, indices: Array, shape: tuple[int, ...]) -> Array:
        """Returns zeros of `shape` with each row added at its index; repeated indices add up."""

    # ---------------------------------------------------------------- arrays as they are

    def check_array(self, array: Array, where: str) -> None:  # noqa: B027 - most have nothing to refuse
        """Refuses arrays that are not plain and dense; `where` opens the message."""

    def signature(self, array: Array) -> Hashable:
        """Returns what checks depend on: arrays with equal signatures pass or fail them alike."""
        return type(array), array.dtype, array.shape, array.device

    def memory_of(self, device: Device) -> str:
        """Identifies the memory of a device: equal answers share arrays; `"host"` is NumPy's memory."""
        return HOST_MEMORY if device.is_host else str(device)

    def dtype_of(self, array: Array) -> str:
        """Returns the dtype's name, without the library's prefix."""
        return str(array.dtype).rpartition(".")[2]

    def shape_of(self, array: Array) -> tuple[int, ...]:
        """Returns the shape."""
        return tuple(array.shape)

    def are_flat(self, arrays: Sequence[Array]) -> bool:  # noqa: ARG002
        """Returns True if kernels can read these arrays, and others with equal signatures, in place."""
        return False

    def is_contiguous(self, array: Array) -> bool:  # noqa: ARG002
        """Returns True if `host_view` of a host array is a view: its elements are contiguous."""
        return True

    def look_at(self, arrays: Sequence[Array]) -> Callable[[tuple[Array, ...]], bool]:
        """Returns a function that tells whether other arrays have the signatures of these, one by one."""
        signature = self.signature
        known = list(map(signature, arrays))
        return lambda found: list(map(signature, found)) == known

    def announce_write(self, arrays: tuple[Array, ...]) -> bool:  # noqa: ARG002
        """Counts a write to arrays with the signatures of written ones, where the library keeps count.

        Returns False if these may not be written to now.
        """
        return True

    def pointers_to(self, arrays: tuple[Array, ...]) -> tuple[Array, ...] | list[int] | None:  # noqa: ARG002
        """Finds the elements of arrays for which `are_flat` holds, for kernels; None if it cannot.

        Returns a tuple of ndarrays, in which kernels look themselves, or a list of addresses.
        """
        return None

    def adopted(self, memory: tuple[NDArray[Any], ...]) -> tuple[Array, ...]:
        """Wraps host arrays of the same memory and shapes."""
        return tuple(self.from_host(array.reshape(-1), array.shape, host_device(0)) for array in memory)

    def axis_order(self, array: Array) -> tuple[int, ...] | None:  # noqa: ARG002
        """Returns the axes from slowest to fastest: the order in which a permuted array is contiguous.

        None if the array is contiguous as it is, or in no order.
        """
        return None

    def addresses_of(self, arrays: Sequence[Array]) -> list[int]:
        """Returns the address of each array's first element."""
        return [self.address_range(array)[0] for array in arrays]

    def as_indexed_slices(self, array: Array) -> IndexedSlices | None:  # noqa: ARG002
        """Converts the library's own kind of sparse rows to ours; None for everything else."""
        return None

    # ---------------------------------------------------------------- other shapes and places

    def to_host(self, array: Array) -> NDArray[Any]:
        """Returns the elements of an array on any device, as a flat ndarray."""
        return self.host_view(array)

    def read_only(self, array: Array, device: Device) -> Array:  # noqa: ARG002
        """Returns another array of the same memory, on a device that shares it; read-only if possible."""
        return array

    def flat(self, array: Array) -> Array:
        """Returns the elements as a flat contiguous array on the same device: a view, else a copy."""
        return self.namespace().reshape(array, (-1,))

    def reshape(self, flat: Array, shape: tuple[int, ...]) -> Array:
        """Returns a flat array in another shape."""
        return self.namespace().reshape(flat, shape)

    def part_of(self, flat: Array, start: int, stop: int) -> Array:
        """Returns some elements of a flat array: a view, else a copy."""
        return flat[start:stop]

    def concat(self, arrays: Sequence[Array], axis: int, device: Device) -> Array:  # noqa: ARG002
        """Concatenates arrays of one memory along `axis`, in new memory on `device`, which shares it."""
        return self.namespace().concat(list(arrays), axis=axis)

    def write(self, out: Array, value: Array) -> None:
        """Copies values into an existing array."""
        out[...] = value

    def mark_written(self, outs: Sequence[Array]) -> None:  # noqa: B027 - most keep no count
        """Tells the library that memory of arrays was written to, where it keeps count of that."""

    # ---------------------------------------------------------------- arithmetic where no kernel does it

    def working_on(self, device: Device) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Sets the device for the library's functions in a block, if their arguments do not decide it."""
        return nullcontext()

    def thread_state(self, devices: Sequence[Device]) -> ThreadState | None:  # noqa: ARG002
        """Returns the per-thread settings that replicas inherit or own; None if there are none.

        Args:
            devices: the devices of the replicas; empty if unknown.
        """
        return None

    def cast(self, array: Array, dtype: str) -> Array:
        """Returns the values in another dtype."""
        xp = self.namespace()
        named = getattr(xp, dtype, None)
        if named is None:
            raise DtypeError(f"{self.name} has no dtype {dtype}")
        return xp.astype(array, named)

    def round_once(self, wide: Array, dtype: str) -> Array:
        """Rounds float64 or complex128 values once to `dtype`, even to a 16-bit one.

        The standard's own dtypes are all wide enough for a plain cast.
        """
        return self.cast(wide, dtype)

    def divided(self, total: Array, divisor: float) -> Array:
        """Returns a true division of a flat array, not a multiplication by the reciprocal.

        By an array of one: by a plain number, PyTorch on a GPU would multiply by its reciprocal.
        """
        return total / self.namespace().full_like(total[:1], divisor)

    def parts_of(self, array: Array) -> Array:
        """Returns a flat complex array's real and imaginary parts in turn, twice as many real elements."""
        xp = self.namespace()
        return self.flat(xp.stack([xp.real(array), xp.imag(array)], axis=-1))

    # ---------------------------------------------------------------- GPUs and engines

    def gpu_stream(self, device: Device) -> int | None:  # noqa: ARG002
        """Returns the handle of the stream that the library works on now; None for PyTorch's current one."""
        return None

    def from_dlpack(self, tensor: Any) -> Array:
        """Returns an array of the same memory on the same GPU."""
        return self.namespace().from_dlpack(tensor)

    def engine_name(self) -> str | None:
        """Names the engine for whole collectives on these arrays, with its version; None without one."""
        return None

    def engine_unavailable(self, dtype: str, op: ReduceOp, num_devices: int) -> str | None:  # noqa: ARG002
        """Returns the reason no engine can reproduce this result on that many devices; None if one can."""
        return f"{self.name} arrays have no collective engine"

    def engine_all_reduce(self, arrays: Sequence[Array], op: ReduceOp) -> list[Array]:
        """Runs one collective over flat arrays, one per device, ordered by their current streams."""
        raise NotImplementedError(f"{self.name} arrays have no collective engine")

    def streams(self, devices: Iterable[Device]) -> Streams | None:  # noqa: ARG002
        """Returns streams for one run of a plan on these devices; None to run all steps in order."""
        return None

    def side_streams(self, devices: Iterable[Device]) -> SideStreams | None:  # noqa: ARG002
        """Returns streams for work that the current ones do not wait for; None if there are none."""
        return None


class LinearMap(Protocol):
    """A call that is linear in its arrays, and its transpose, as its derivatives need them."""

    def __call__(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """Makes the call."""

    def transposed(self) -> LinearMap:
        """Returns the map from gradients of the results to gradients of the arrays."""


ThreadState: TypeAlias = "Callable[[Device], AbstractContextManager[Any]]"
"""Enters, on another thread and for a replica's device, the state that was read on this one."""

Merge: TypeAlias = "Callable[[list[Any]], Sequence[Any]]"
"""Turns the values of all replicas into the answers of all replicas."""


class Exchange(Protocol):
    """A meeting of all replicas at the same call: each gets its own answer from `merge`."""

    def __call__(self, value: Any, merge: Merge, *, is_backward: bool = False) -> Any:
        """Takes part for one replica, in its own thread or, in a backward pass, one of the library's."""


class Autograd(Protocol):
    """Automatic differentiation by a library that records computations on arrays."""

    def is_recording(self) -> bool:
        """Returns True if the library records what this thread computes."""

    def is_recorded(self, array: Any) -> bool:
        """Returns True if the library, which owns the array, records what this thread computes from it."""

    def unrecorded(self, array: Any) -> Any:
        """Returns the same elements, detached from what was recorded."""

    def cut(self, value: Any) -> Any:
        """Returns a structure of arrays with nothing recorded; warns if there was."""

    def linear_call(
        self, run: Callable[[], Sequence[Array]], linear: LinearMap, arrays: Sequence[Array]
    ) -> Sequence[Array]:
        """Returns the results of `run`, recorded as those of `linear` of the arrays."""

    def meeting(self, exchange: Exchange, replica: int, value: Any, merge: Merge) -> Any:
        """Returns a replica's answer to a call that all make, recorded in the replica's own graph."""


class Streams(Protocol):
    """Tracks on which a library works at the same time; work outside counts as done in order.

    Entered before the first step and left after the last: what was enqueued before is done before, what is
    enqueued after is done after, on the streams that were current on every device and are so again.
    """

    def __enter__(self) -> Any: ...

    def __exit__(self, *failure: object) -> None: ...

    def switch_to(self, tracks: tuple[Track, ...]) -> None:
        """Makes the library work on these tracks; no tracks: no work follows."""

    def mark(self, tracks: Sequence[Track]) -> Any:
        """Marks the current end of these tracks."""

    def wait(self, tracks: Sequence[Track], mark: Any) -> None:
        """Makes later work on these tracks wait for the mark."""

    def keep(self, array: Array, tracks: Sequence[Track]) -> None:
        """Keeps the array's memory until these tracks reach this point."""

    def hand_over(self, array: Array, device: Device) -> None:
        """Releases the array from the tracks: it will be used on the device's current stream."""


@functools.cache
def dtype_named(name: str) -> np.dtype[Any]:
    """Returns the NumPy dtype of that name, also of those that NumPy itself lacks."""
    if name == "bfloat16" or name in SHORT_FLOATS:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)
