"""Copies between a GPU and pinned host memory, in parallel with copies that the host makes."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from typing import Any

import torch

from crossdevice.kernels.cuda import driver

READ_WRITE = 0


class Staging:
    """Copies from and to a device, each on a stream of their own, so that both go on at a time.

    On the host itself, where tests have it, they are plain copies.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []
        self._handles = [stream.cuda_stream for stream in self._streams]

    def begin(self) -> None:
        """Orders later work after everything queued on the current stream."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(self._device))

    def fetch(self, host: int, source: int, num_bytes: int) -> None:
        """Starts to copy from an address of the device to one of the host."""
        if self._handles:
            driver.copy(host, source, num_bytes, self._handles[0])
        else:
            ctypes.memmove(host, source, num_bytes)

    def put(self, target: int, host: int, num_bytes: int) -> None:
        """Starts to copy from an address of the host to one of the device."""
        if self._handles:
            driver.copy(target, host, num_bytes, self._handles[1])
        else:
            ctypes.memmove(target, host, num_bytes)

    def wait(self) -> None:
        """Waits until all copies that were started are done."""
        for handle in self._handles:
            driver.synchronize(handle)


def pin(owner: Any, address: int, num_bytes: int) -> None:
    """Pins host memory, so that GPUs copy from and to it by themselves, for as long as its owner lives.

    Where the system does not allow it, copies are slower.
    """
    if address in _pinned:
        return
    with contextlib.suppress(driver.DriverError):
        driver.call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), READ_WRITE)
        _pinned.add(address)
        weakref.finalize(owner, _unpin, address)


_pinned: set[int] = set()


def _unpin(address: int) -> None:
    _pinned.discard(address)
    with contextlib.suppress(driver.DriverError):  # which may be gone already
        driver.call("cuMemHostUnregister", ctypes.c_void_p(address))
