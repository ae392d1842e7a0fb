"""Memory of GPUs that other processes of this host read and write: exported by a handle, mapped by theirs."""

from __future__ import annotations

import contextlib
import ctypes
import secrets
import struct
from typing import NamedTuple

from crossdevice.kernels.cuda.driver import DriverError, call

DRIVER_BYTES = 64
HANDLE_BYTES = DRIVER_BYTES + 8
TOKEN_BYTES = 16
GPU_BYTES = 16
LAZY_PEER_ACCESS = 1
BUFFER_ID = 7
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS and CU_POINTER_ATTRIBUTE_BUFFER_ID."""

MAX_EXPORTED = 1024
"""Maximum number of allocations of this process that stay exported."""

MAX_MAPPED = 256
"""Allocations of one other process that stay mapped; whatever it frees stays allocated until then."""


class Exported(NamedTuple):
    """An address, as other processes can find it: the handle of its allocation, and how far into that."""

    handle: bytes
    """The driver's, and the number of the allocation: a new one may look like one that was freed."""
    offset: int


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * DRIVER_BYTES),)


_exports: dict[int, tuple[bytes, int]] = {}
"""The handle of an allocation and where it starts, by the number of the allocation."""


def allocation_of(address: int) -> int:
    """Returns the unique number of the allocation that contains an address; it is never reused."""
    number = ctypes.c_uint64()
    call("cuPointerGetAttribute", ctypes.byref(number), BUFFER_ID, ctypes.c_uint64(address))
    return number.value


def exported(address: int) -> Exported:
    """Exports an address of PyTorch's memory on the current device to other processes."""
    number = allocation_of(address)
    found = _exports.get(number)
    if found is None:
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        handle = _Handle()
        call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        if len(_exports) >= MAX_EXPORTED:
            _exports.clear()
        text = ctypes.string_at(ctypes.byref(handle), DRIVER_BYTES) + number.to_bytes(8, "little")
        found = _exports[number] = text, base.value
    return Exported(found[0], address - found[1])


class Mapped:
    """Memory exported by one other process and mapped into this one; the latest is kept."""

    def __init__(self) -> None:
        self._bases: dict[bytes, int] = {}

    def address_of(self, place: Exported) -> int:
        """Returns its address in this process, on the current device."""
        base = self._bases.pop(place.handle, None)
        if base is None:
            base = _opened(place.handle)
        self._bases[place.handle] = base  # last, so that the first is the one not used for longest
        return base + place.offset

    def forget_old(self) -> bool:
        """Unmaps idle memory that was not used for long; returns whether there was any."""
        is_full = len(self._bases) > MAX_MAPPED
        while len(self._bases) > MAX_MAPPED:
            _closed(self._bases.pop(next(iter(self._bases))))
        return is_full

    def close(self) -> None:
        """Lets go of all of it, unless the driver is gone already."""
        with contextlib.suppress(DriverError):
            while self._bases:
                _closed(self._bases.popitem()[1])


class Found(NamedTuple):
    """The record of another process's probe."""

    token: bytes
    place: Exported
    gpu: bytes
    """Equal for processes on one GPU."""

    @classmethod
    def read(cls, record: bytes) -> Found:
        """Reads the record of another process's probe."""
        token, handle, gpu, offset = _RECORD.unpack(record)
        return cls(token, Exported(handle, offset), gpu)


class Probe:
    """A few bytes on the GPU by which processes find out whether they reach each other's memory."""

    def __init__(self, gpu: int, *, is_alone: bool) -> None:
        """`is_alone` tells other processes that only this one uses the GPU."""
        import torch

        token = secrets.token_bytes(TOKEN_BYTES)
        with torch.cuda.device(gpu):
            self._tensor = torch.frombuffer(bytearray(token), dtype=torch.uint8).cuda()
            torch.cuda.current_stream().synchronize()
            handle, offset = exported(self._tensor.data_ptr())
        self.record = _RECORD.pack(token, handle, token if is_alone else _identity(gpu), offset)

    @staticmethod
    def finds(found: Found, mapped: Mapped) -> bool:
        """Returns True if another process's bytes are at the recorded place."""
        read = ctypes.create_string_buffer(TOKEN_BYTES)
        address = mapped.address_of(found.place)
        call("cuMemcpyDtoH_v2", read, ctypes.c_uint64(address), ctypes.c_size_t(TOKEN_BYTES))
        return read.raw == found.token


_RECORD = struct.Struct(f"<{TOKEN_BYTES}s{HANDLE_BYTES}s{GPU_BYTES}sq")


def _identity(gpu: int) -> bytes:
    """Identifies the GPU the same way in all processes, whatever its index there."""
    device, uuid = ctypes.c_int(), ctypes.create_string_buffer(GPU_BYTES)
    call("cuDeviceGet", ctypes.byref(device), gpu)
    call("cuDeviceGetUuid_v2", uuid, device)
    return uuid.raw


def _opened(handle: bytes) -> int:
    base = ctypes.c_uint64()
    given = _Handle.from_buffer_copy(handle[:DRIVER_BYTES])
    call("cuIpcOpenMemHandle_v2", ctypes.byref(base), given, ctypes.c_uint(LAZY_PEER_ACCESS))
    return base.value


def _closed(base: int) -> None:
    call("cuIpcCloseMemHandle", ctypes.c_uint64(base))
