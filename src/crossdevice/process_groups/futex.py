"""Sleeping until another process changes a word of shared memory: the futex of Linux."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

_SYSTEM_CALL = 202  # of x86-64
_WAIT, _WAKE = 0, 1
_EVERYBODY = (1 << 31) - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@functools.cache
def _call() -> Callable[..., int]:
    """The system call, which lets go of the GIL, and which a signal ends."""
    assert sys.platform == "linux"
    call = ctypes.CDLL(None).syscall
    call.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    call.restype = ctypes.c_long
    return call


def sleep_while(address: int, value: int, seconds: float) -> None:
    """Until somebody is woken at this word of 32 bits; not at all if it has another value than that.

    May come back early, as after a signal: whoever waits for something looks again.
    """
    time = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    _call()(_SYSTEM_CALL, address, _WAIT, value, ctypes.addressof(time))


def wake_all(address: int) -> None:
    """Wakes all that sleep at this word, in any process."""
    _call()(_SYSTEM_CALL, address, _WAKE, _EVERYBODY, None)
