"""Memory of GPUs that other processes of this host read and write: exported by a handle, mapped by theirs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

HANDLE_BYTES = 64
TOKEN_BYTES = 16
LAZY_PEER_ACCESS = 1

MAX_MAPPED = 256
"""Allocations of one other process that stay mapped; whatever it frees stays allocated until then."""


class Exported(NamedTuple):
    """An address, as other processes can find it: the handle of its allocation, and how far into that."""

    handle: bytes
    offset: int


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * HANDLE_BYTES),)


class PeerMemoryError(RuntimeError):
    """The CUDA driver refuses to export or to map memory."""


def exported(address: int) -> Exported:
    """An address of PyTorch's memory on the current device, for another process."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return Exported(ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES), address - base.value)


class Mapped:
    """What one other process has exported, mapped into this one, the latest kept."""

    def __init__(self) -> None:
        self._bases: dict[bytes, int] = {}

    def address_of(self, place: Exported) -> int:
        """Where this process finds it, on the current device."""
        base = self._bases.pop(place.handle, None)
        if base is None:
            base = _opened(place.handle)
        self._bases[place.handle] = base  # last, so that the first is the one not used for longest
        return base + place.offset

    def forget_old(self) -> None:
        """Lets go of what has not been used for long; nothing may be at work on it."""
        while len(self._bases) > MAX_MAPPED:
            _closed(self._bases.pop(next(iter(self._bases))))

    def close(self) -> None:
        """Lets go of all of it, unless the driver is gone already."""
        with contextlib.suppress(PeerMemoryError):
            while self._bases:
                _closed(self._bases.popitem()[1])


class Probe:
    """A few bytes on the GPU by which processes find out whether they reach each other's memory."""

    def __init__(self, gpu: int) -> None:
        token = secrets.token_bytes(TOKEN_BYTES)
        with torch.cuda.device(gpu):
            self._tensor = torch.frombuffer(bytearray(token), dtype=torch.uint8).cuda()
            torch.cuda.current_stream().synchronize()
            handle, offset = exported(self._tensor.data_ptr())
        self.record = token + handle + offset.to_bytes(8, "little")

    @staticmethod
    def finds(record: bytes, mapped: Mapped) -> bool:
        """Whether another process's bytes are where its record says."""
        token, handle = record[:TOKEN_BYTES], record[TOKEN_BYTES : TOKEN_BYTES + HANDLE_BYTES]
        offset = int.from_bytes(record[TOKEN_BYTES + HANDLE_BYTES :], "little")
        found = ctypes.create_string_buffer(TOKEN_BYTES)
        address = mapped.address_of(Exported(handle, offset))
        _call("cuMemcpyDtoH_v2", found, ctypes.c_uint64(address), ctypes.c_size_t(TOKEN_BYTES))
        return found.raw == token


def wait_for_gpu(device: torch.device) -> None:
    """Until the current stream is done: other processes may read and write what it has worked on."""
    torch.cuda.current_stream(device).synchronize()


def empty(shape: tuple[int, ...], dtype: str, device: torch.device) -> torch.Tensor:
    """Memory for a result."""
    return torch.empty(shape, dtype=getattr(torch, dtype), device=device)


def _opened(handle: bytes) -> int:
    base = ctypes.c_uint64()
    given = _Handle.from_buffer_copy(handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(base), given, ctypes.c_uint(LAZY_PEER_ACCESS))
    return base.value


def _closed(base: int) -> None:
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(base))


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    function: Callable[..., int] = getattr(_driver(), name)
    status = function(*arguments)
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(text))
        raise PeerMemoryError(f"{name}: {(text.value or b'unknown').decode()}")
