"""Files in memory, mapped without keeping a descriptor."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections.abc import Callable

import numpy as np

_FIXED = 0x10  # of Linux on every processor: the place is given


def mapped_file(descriptor: int, num_bytes: int) -> mmap.mmap:
    """The file's memory, which other processes share; the descriptor may be closed.

    Python's own mapping of a file keeps a copy of the descriptor as long as any array is in it. So it maps
    nothing here, and the file takes the place.
    """
    memory = mmap.mmap(-1, num_bytes)
    address = int(np.frombuffer(memory, np.uint8, 1).__array_interface__["data"][0])
    if (
        _map()(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, descriptor, 0)
        != address
    ):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return memory


@functools.cache
def _map() -> Callable[..., int]:
    call = ctypes.CDLL(None, use_errno=True).mmap
    number = ctypes.c_int
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_long]
    call.restype = ctypes.c_void_p
    return call
