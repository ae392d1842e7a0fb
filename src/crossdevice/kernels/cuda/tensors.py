"""Arrays of any library as PyTorch's tensors, with its work in the right order before and after."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from crossdevice.kernels.cuda import driver

_held: dict[int, tuple[torch.cuda.Event, Sequence[torch.Tensor]]] = {}
"""Memory of other libraries that kernels may still read, with what to do once they have finished."""

_keys = itertools.count()


def device_named(kind: str, index: int) -> torch.device:
    """Returns PyTorch's name of a device."""
    return torch.device(kind, index)


def tensors_of(arrays: Sequence[Any]) -> list[torch.Tensor]:
    """Returns the same memory as flat, contiguous tensors; copies tensors that are not.

    PyTorch's current stream waits for whatever computes arrays of other libraries (DLPack).
    """
    tensors = [array if isinstance(array, torch.Tensor) else torch.from_dlpack(array) for array in arrays]
    return tensors if are_plain(tensors) else list(map(_plain, tensors))


def are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Returns True if the elements are contiguous, without lazy conjugation or negation."""
    # By maps of PyTorch's own methods: hundreds of tensors are asked in every call.
    kind = torch.Tensor
    return (
        all(map(kind.is_contiguous, tensors))
        and not any(map(kind.is_neg, tensors))
        and not any(map(kind.is_conj, tensors))
    )


def writable_tensors(arrays: Sequence[Any]) -> list[torch.Tensor] | None:
    """Returns the same memory as tensors; None if kernels cannot write to it in place."""
    tensors = [array if isinstance(array, torch.Tensor) else torch.from_dlpack(array) for array in arrays]
    return tensors if are_plain(tensors) else None


def addresses_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns the addresses of their first elements."""
    return list(map(torch.Tensor.data_ptr, tensors))


def empty(shape: tuple[int, ...], dtype: str, device: torch.device) -> torch.Tensor:
    """Allocates memory for a result."""
    return torch.empty(shape, dtype=getattr(torch, dtype), device=device)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same contiguous memory as bytes."""
    return tensor.reshape(-1).view(torch.uint8)


def copy(target: torch.Tensor, source: int, stream: int) -> None:
    """Enqueues a copy from an address on a stream; on the host, as in tests, copies at once."""
    if target.is_cuda and target.nbytes:
        driver.copy(target.data_ptr(), source, target.nbytes, stream)
    else:
        ctypes.memmove(target.data_ptr(), source, target.nbytes)


def wait_for(device: torch.device) -> None:
    """Waits for the current stream, so that other processes may read and write its memory."""
    if device.type == "cuda":
        driver.synchronize(stream_of(device))


def stream_of(device: torch.device) -> int:
    """Returns the handle of PyTorch's current stream; 0 on the host, where kernels are interpreted."""
    return _raw_stream(device.index) if device.type == "cuda" else 0


def is_current(device: torch.device) -> bool:
    """Returns True if this is PyTorch's current device."""
    return device.type != "cuda" or _current_device() == device.index


def on_device(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Makes this device the current one inside the block."""
    return contextlib.nullcontext() if is_current(device) else working_on(device, None)


@contextlib.contextmanager
def working_on(device: torch.device, handle: int | None) -> Iterator[None]:
    """Makes this device current inside the block, and the stream with that handle; None keeps the stream."""
    with torch.cuda.device(device):
        if handle is None:
            yield
        else:
            with torch.cuda.stream(torch.cuda.ExternalStream(handle, device)):
                yield


def hold_until_done(tensors: Sequence[torch.Tensor]) -> None:
    """Keeps memory of libraries that know nothing of PyTorch's streams until the current one gets here."""
    event = torch.cuda.Event()
    event.record()
    # By key, and without a lock: other threads and signal handlers may be here at the same time.
    for key, (earlier, _) in list(_held.items()):
        if not earlier.query():
            break
        _held.pop(key, None)
    _held[next(_keys)] = (event, tensors)


def _slow_raw_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


# Fast private API of PyTorch: creates no objects and skips the check that CUDA is initialized.
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _slow_raw_stream)
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()
