"""Copies between a GPU and memory of the host that it reads and writes itself, while the host does others."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class Staging:
    """Copies to and from the host on two streams of one device, in either direction at a time.

    On the host itself, where tests have it, they are plain copies.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: Sequence[torch.cuda.Stream] = ()
        if device.type == "cuda":
            self._streams = [torch.cuda.Stream(device) for _ in range(2)]

    def begin(self) -> None:
        """What follows comes after all that was put on the current stream."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(self._device))

    def fetch(self, room: Bytes, source: torch.Tensor) -> None:
        """Starts to copy the bytes of a tensor to the host."""
        self._copy(torch.from_numpy(room), source, 0)

    def put(self, target: torch.Tensor, room: Bytes) -> None:
        """Starts to copy bytes of the host to a tensor."""
        self._copy(target, torch.from_numpy(room), 1)

    def wait(self) -> None:
        """Until all that was started is there."""
        for stream in self._streams:
            stream.synchronize()

    def _copy(self, target: torch.Tensor, source: torch.Tensor, number: int) -> None:
        if not self._streams:
            target.copy_(source)
            return
        with torch.cuda.stream(self._streams[number]):
            target.copy_(source, non_blocking=True)


def pin(owner: Any, memory: Bytes) -> None:
    """Has GPUs copy to and from an owner's memory of the host by themselves, as long as the owner is there.

    Where the system does not allow it, copies are slower.
    """
    address = memory.__array_interface__["data"][0]
    if address in _pinned or torch.cuda.cudart().cudaHostRegister(address, memory.nbytes, 0) != 0:
        return
    _pinned.add(address)
    weakref.finalize(owner, _unpin, address)


_pinned: set[int] = set()


def _unpin(address: int) -> None:
    _pinned.discard(address)
    torch.cuda.cudart().cudaHostUnregister(address)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, flat."""
    return tensor.detach().reshape(-1).view(torch.uint8)
