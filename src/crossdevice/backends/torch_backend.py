"""PyTorch tensors, on any device PyTorch knows."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, ClassVar

import array_api_compat.torch as xp
import numpy as np
import torch
from numpy.typing import NDArray

from crossdevice.backends.cuda_streams import CudaStreams, SideStreams
from crossdevice.backends.nccl_engines import NcclBackend, Share
from crossdevice.backends.protocol import check_host_device, dtype_named
from crossdevice.backends.torch_autograd import TorchAutograd, warn_if_recorded
from crossdevice.errors import ConversionError, DeviceError
from crossdevice.values.device import Device
from crossdevice.values.distributed import IndexedSlices
from crossdevice.values.dtypes import SHORT_FLOATS
from crossdevice.values.quantities import kind_text

_CARRIERS = {"bfloat16": "int16", **dict.fromkeys(SHORT_FLOATS, "uint8")}
"""Dtypes that NumPy itself lacks, and the integers as which PyTorch hands them over."""

_LACKING = {getattr(torch, name): name for name in _CARRIERS}


_PLAIN = {np.dtype(name) for name in ("float32", "float64", "int32", "int64", "complex64", "complex128")}
"""Dtypes that `torch.from_numpy` keeps."""


class TensorMemory:
    """A contiguous tensor as NumPy reads it; `Tensor.numpy` would forbid for ever to resize its storage.

    Args:
        type_text: the dtype of its elements for NumPy, as `np.dtype.str` has it.
        size: the number of those elements.
    """

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: torch.Tensor, type_text: str, size: int) -> None:
        self._tensor, address = tensor, tensor.data_ptr()
        if size and not address:
            raise ConversionError(f"a call was given {_without_memory(tensor)}")
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": type_text,
            "version": 3,
        }


def _without_memory(tensor: torch.Tensor) -> str:
    return (
        f"{kind_text(tensor)} of shape {tuple(tensor.shape)} without memory of its own; "
        "expected a dense tensor with data (of a DTensor pass its to_local() or full_tensor())"
    )


_dtype = operator.attrgetter("dtype")
_of_any = operator.attrgetter("__class__", "dtype", "shape", "device", "layout", "requires_grad")
_of_host = operator.attrgetter("__class__", "dtype", "shape", "is_cpu", "layout", "requires_grad")


@functools.cache
def _type_text(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return np.dtype(_CARRIERS.get(name, name)).str


class TorchBackend(NcclBackend):
    """Results are detached, unless a call is made by way of `autograd`."""

    name = "torch"
    shares_gpu_arrays = True
    counts_writes = True
    autograd = TorchAutograd()

    def namespace(self) -> Any:
        """Returns PyTorch, through array-api-compat."""
        return xp

    def check_array(self, array: torch.Tensor, where: str) -> None:
        """Refuses sparse, quantized, nested and meta tensors, without plain elements, and DTensors."""
        if array.layout != torch.strided or array.is_quantized or array.is_nested or array.is_meta:
            kind = "quantized" if array.is_quantized else "nested" if array.is_nested else array.layout
            raise ConversionError(
                f"{where} is a {kind} tensor on {array.device}; expected a dense one with data "
                "(reductions also take torch.sparse_coo with one sparse axis, and crossdevice.IndexedSlices)"
            )
        if array.numel() and not array.data_ptr():
            raise ConversionError(f"{where} is {_without_memory(array)}")
        warn_if_recorded(array)

    def as_indexed_slices(self, array: torch.Tensor) -> IndexedSlices | None:
        """Reads a `torch.sparse_coo` tensor of whole rows, such as an embedding's gradient."""
        if array.layout != torch.sparse_coo or array.sparse_dim() != 1:
            return None
        warn_if_recorded(array)
        rows = array.detach()  # repeated indices stay as they are: consumers add them up
        return _SparseRows(rows._values(), rows._indices()[0], rows.shape)

    def signature(self, array: Any) -> Hashable:
        """Returns type, dtype, shape, device, layout, and strides if they are not those of the shape.

        Tensors whose use is recorded have none: whether that is differentiated is asked in every call.
        """
        if array.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("recorded")
        strides = None if array.is_contiguous() else array.stride()
        return type(array), array.dtype, array.shape, array.device, array.layout, strides

    def are_flat(self, arrays: Sequence[torch.Tensor]) -> bool:
        """Returns True if all are contiguous, and none is a view that conjugates or negates."""
        return all(array.layout == torch.strided and self.is_contiguous(array) for array in arrays)

    def look_at(self, arrays: Sequence[torch.Tensor]) -> Callable[[tuple[torch.Tensor, ...]], bool]:
        """Compares attribute by attribute, in half of the time that signatures take."""
        attributes = _of_host if all(array.is_cpu for array in arrays) else _of_any
        known, number = list(map(attributes, arrays)), len(arrays)
        looks: list[Callable[[torch.Tensor], Any]] = [torch.Tensor.is_contiguous, torch.Tensor.is_neg]
        if not all(map(torch.Tensor.is_contiguous, arrays)):
            looks[0] = torch.Tensor.stride
        if any(map(torch.Tensor.is_complex, arrays)):
            looks.append(torch.Tensor.is_conj)
        seen = [(look, list(map(look, arrays))) for look in looks]
        are_recorded = any(array.requires_grad for array in arrays)

        def fit(found: tuple[torch.Tensor, ...]) -> bool:
            # One tensor after the other: thousands of tuples at once would be garbage to be collected.
            if len(found) != number or not all(map(operator.eq, map(attributes, found), known)):
                return False
            for look, before in seen:
                if list(map(look, found)) != before:
                    return False
            return not (are_recorded and torch.is_grad_enabled())

        return fit

    def announce_write(self, arrays: tuple[torch.Tensor, ...]) -> bool:
        """Refuses inference tensors outside inference mode: signatures do not tell them apart."""
        if any(map(torch.Tensor.is_inference, arrays)) and not torch.is_inference_mode_enabled():
            return False
        try:
            torch.autograd.graph.increment_version(arrays)
        except (RuntimeError, TypeError):
            self.mark_written(arrays)
        return True

    def pointers_to(self, arrays: tuple[torch.Tensor, ...]) -> list[int] | None:
        """Returns addresses; None if memory was freed, which signatures do not tell."""
        addresses = list(map(torch.Tensor.data_ptr, arrays))
        if not all(addresses) and any(array.numel() and not array.data_ptr() for array in arrays):
            return None
        return addresses

    def adopted(self, memory: tuple[NDArray[Any], ...]) -> tuple[torch.Tensor, ...]:
        """Adopts plain dtypes without a check of each; dtypes that NumPy lacks like any result."""
        if set(map(_dtype, memory)) <= _PLAIN:
            return tuple(map(torch.from_numpy, memory))
        return super().adopted(memory)

    def axis_order(self, array: torch.Tensor) -> tuple[int, ...] | None:
        """Orders by strides: `channels_last`, transposes, and other permutations of dense tensors."""
        if array.layout != torch.strided or array.is_nested or array.is_contiguous():
            return None
        strides = array.stride()
        axes = tuple(sorted(range(array.ndim), key=lambda axis: -strides[axis]))
        return axes if array.permute(axes).is_contiguous() else None

    def is_contiguous(self, array: torch.Tensor) -> bool:
        """Returns True for elements in the order of their indices, without lazy operations."""
        return array.is_contiguous() and not array.is_conj() and not array.is_neg()

    def check_device(self, device: Device) -> None:
        """Accepts logical host devices, and others that exist."""
        if device.is_host:
            check_host_device("torch", device)
        elif not _exists(device):
            found = ", ".join(["cpu:0, cpu:1, ...", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))])
            raise DeviceError(f"{device} does not exist here; the devices that do are {found}")

    def host_view(self, array: torch.Tensor) -> NDArray[Any]:
        """Returns the tensor's memory, flat; dtypes that NumPy lacks pass through integers."""
        # Every step here is taken for thousands of gradients: those that change nothing are left out.
        if array.is_conj() or array.is_neg() or not array.is_contiguous():
            array = self.flat(array)
        view = np.asarray(TensorMemory(array, _type_text(array.dtype), array.numel()))
        lacking = _LACKING.get(array.dtype)
        return view if lacking is None else view.view(dtype_named(lacking))

    def to_host(self, array: torch.Tensor) -> NDArray[Any]:
        """Copies the elements from the tensor's device."""
        return self.host_view(array.detach().cpu())

    def address_range(self, array: torch.Tensor) -> tuple[int, int]:
        """Returns the range from the first to the last byte of the tensor's elements."""
        plain = array.detach()
        reach = sum((size - 1) * stride for size, stride in zip(plain.shape, plain.stride(), strict=True))
        start = plain.data_ptr()
        return start, start + (reach + 1) * plain.element_size() if plain.numel() else start

    def addresses_of(self, arrays: Sequence[torch.Tensor]) -> list[int]:
        """Returns the addresses of the first elements."""
        return list(map(torch.Tensor.data_ptr, arrays))

    def concat(self, arrays: Sequence[torch.Tensor], axis: int, device: Device) -> torch.Tensor:  # noqa: ARG002
        """Concatenates; detached, like every result."""
        return torch.cat([array.detach() for array in arrays], dim=axis)

    def writable_view(self, array: torch.Tensor) -> NDArray[Any] | None:
        """Returns the memory of a contiguous host tensor; None for inference tensors."""
        if array.is_inference() and not torch.is_inference_mode_enabled():
            return None
        if array.device.type != "cpu" or not array.is_contiguous() or array.is_conj() or array.is_neg():
            return None
        return self.host_view(array)

    def from_host(self, flat: NDArray[Any], shape: tuple[int, ...], device: Device) -> torch.Tensor:
        """Adopts the memory on the host; copies it to any other device."""
        shaped = flat.reshape(shape)
        name = shaped.dtype.name if shaped.dtype.kind not in "iufcb" or shaped.dtype.itemsize == 1 else ""
        if name in _CARRIERS:
            tensor = torch.from_numpy(shaped.view(_CARRIERS[name])).view(getattr(torch, name))
        else:
            tensor = torch.from_numpy(shaped)
        return tensor if device.is_host else tensor.to(torch_device(device))

    def read_only(self, array: torch.Tensor, device: Device) -> torch.Tensor:  # noqa: ARG002
        """Returns the same memory: PyTorch has no read-only tensors."""
        return array.detach()

    def flat(self, array: torch.Tensor) -> torch.Tensor:
        """Detaches and makes contiguous; resolves conjugates and negatives, since engines read the memory."""
        return array.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)

    def copy(self, array: torch.Tensor, device: Device) -> torch.Tensor:
        """Copies to new, contiguous memory on the device."""
        return array.detach().to(torch_device(device), copy=True, memory_format=torch.contiguous_format)

    def round_once(self, wide: torch.Tensor, dtype: str) -> torch.Tensor:
        """Rounds to odd in float32 first: PyTorch goes to 16 bits through float32, which rounds twice."""
        if dtype not in ("bfloat16", "float16"):
            return self.cast(wide, dtype)
        near = wide.to(torch.float32)
        back = near.to(torch.float64)
        bits = near.view(torch.int32)
        bits = torch.where(back.abs() > wide.abs(), bits - 1, bits)
        bits = torch.where((back != wide) & ~wide.isnan(), bits | 1, bits)
        return self.cast(bits.view(torch.float32), dtype)

    def from_parts(self, parts: torch.Tensor) -> torch.Tensor:
        """Returns the same memory, seen as complex."""
        return torch.view_as_complex(parts.reshape(-1, 2))

    def scatter_rows(self, rows: torch.Tensor, indices: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Adds up the rows of repeated indices."""
        # PyTorch has few functions for the wider unsigned integers; signed ones wrap to the same bits.
        signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
        as_added = signed.get(rows.dtype, rows.dtype)
        dense = torch.zeros(shape, dtype=as_added, device=rows.device)
        return dense.index_add_(0, indices, rows.detach().view(as_added)).view(rows.dtype)

    def mark_written(self, outs: Sequence[torch.Tensor]) -> None:
        """Bumps version counters, so that a backward pass that saved the old values refuses the new ones."""
        try:
            torch.autograd.graph.increment_version(outs)
        # Older releases take them one by one, none those made for inference.
        except (RuntimeError, TypeError):
            for out in outs:
                if not out.is_inference():
                    torch.autograd.graph.increment_version(out)

    def write(self, out: torch.Tensor, value: torch.Tensor) -> None:
        """Writes in place, without automatic differentiation."""
        out.detach().copy_(value)

    def from_dlpack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor itself."""
        return tensor

    def share_of(self, source: torch.Tensor, device: Device) -> Share:
        """Prepares one device's part, on PyTorch's current stream."""
        target = torch.empty_like(source)
        stream = torch.cuda.current_stream(source.device).cuda_stream
        return Share(source, target, device, stream, source.data_ptr(), target.data_ptr(), source.numel())

    def streams(self, devices: Iterable[Device]) -> TorchStreams | None:
        """Returns side streams if there are several GPUs; other devices are left to PyTorch."""
        apart = {device for device in devices if not device.is_host}
        if len(apart) < 2 or {device.type for device in apart} != {"cuda"}:
            return None
        return TorchStreams(apart)

    def side_streams(self, devices: Iterable[Device]) -> SideStreams | None:
        """Returns side streams of all GPUs among the devices."""
        apart = {device for device in devices if device.type == "cuda"}
        return SideStreams(TorchStreams(apart)) if apart else None


class _SparseRows(IndexedSlices):
    """The rows of a former `torch.sparse_coo` tensor."""

    __slots__ = ()

    def with_parts(self, values: Any, indices: Any, dense_shape: tuple[int, ...] | None) -> Any:
        """Returns a `torch.sparse_coo` tensor."""
        assert dense_shape is not None
        return torch.sparse_coo_tensor(indices[None], values, dense_shape, check_invariants=False)


class TorchStreams(CudaStreams):
    """PyTorch's own streams; its allocator is told which of them read an array."""

    _kept: ClassVar[dict[Any, Any]] = {}

    def new_stream(self, device: Device) -> Any:
        """Takes a stream from PyTorch's pool."""
        return torch.cuda.Stream(torch_device(device))

    def current_stream(self, device: Device) -> Any:
        """Returns the current stream of the calling thread."""
        return torch.cuda.current_stream(torch_device(device))

    def handle_of(self, stream: Any) -> int:
        """Returns the `cudaStream_t`."""
        return stream.cuda_stream

    def use(self, stream: Any) -> None:
        """Sets the current device too."""
        torch.cuda.set_stream(stream)

    def current_device(self) -> int:
        """Returns the number of the current device."""
        return torch.cuda.current_device()

    def use_device(self, device: int) -> None:
        """Makes the device of this number current."""
        torch.cuda.set_device(device)

    def event_on(self, stream: Any) -> Any:
        """Records a new event."""
        return stream.record_event()

    def has_happened(self, event: Any) -> bool:
        """Queries the event without waiting for it."""
        return event.query()

    def make_wait(self, stream: Any, event: Any) -> None:
        """Makes the GPU wait; the host goes on."""
        stream.wait_event(event)

    def keep_for(self, stream: Any, array: torch.Tensor) -> None:
        """Tells the caching allocator, which waits for the stream before it reuses the memory."""
        if array.is_cuda:
            array.record_stream(stream)


def torch_device(device: Device) -> torch.device:
    """Returns PyTorch's name of a device; it has one host device for all of ours."""
    return torch.device("cpu") if device.is_host else torch.device(device.type, device.index)


@functools.cache
def _exists(device: Device) -> bool:
    if device.type == "meta":  # arrays without elements
        return False
    try:
        torch.empty(0, device=torch_device(device))
    except (RuntimeError, AssertionError):
        return False
    return True
