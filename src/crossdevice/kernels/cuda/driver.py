"""Functions of the CUDA driver, called without PyTorch where that has none, or takes long."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

INVALID_CONTEXT = 201
"""The status for a thread that has not called CUDA's runtime yet."""

BUFFER, BUFFER_BYTES, END = 1, 2, 0
"""CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE and CU_LAUNCH_PARAM_END."""


class DriverError(RuntimeError):
    """The CUDA driver refuses something."""


def call(name: str, *arguments: Any) -> None:
    """Calls a function by its name; raises DriverError unless it succeeds."""
    status = _function(name)(*arguments)
    if status == INVALID_CONTEXT:
        _take_context()
        status = _function(name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        _function("cuGetErrorName")(status, ctypes.byref(text))
        raise DriverError(f"{name}: {(text.value or b'unknown').decode()}")


def synchronize(stream: int) -> None:
    """Waits until all that was put on a stream is done."""
    call("cuStreamSynchronize", ctypes.c_void_p(stream))


def copy(target: int, source: int, num_bytes: int, stream: int) -> None:
    """Puts a copy between addresses, of the host or of GPUs, on a stream."""
    places = ctypes.c_uint64(target), ctypes.c_uint64(source)
    call("cuMemcpyAsync", *places, ctypes.c_size_t(num_bytes), ctypes.c_void_p(stream))


def prepared_launch(
    function: int, num_programs: int, num_threads: int, shared_bytes: int, arguments: Sequence[int]
) -> Callable[[int], None]:
    """Returns a function that launches a kernel with these 8-byte arguments on a given stream handle."""
    numbers = (ctypes.c_int64 * len(arguments))(*arguments)
    num_bytes = ctypes.c_size_t(ctypes.sizeof(numbers))
    places = ctypes.addressof(numbers), ctypes.addressof(num_bytes)
    buffer = (ctypes.c_void_p * 5)(BUFFER, places[0], BUFFER_BYTES, places[1], END)
    grid = map(ctypes.c_uint, (num_programs, 1, 1, num_threads, 1, 1, shared_bytes))
    fixed = (ctypes.c_void_p(function), *grid)
    launch = functools.partial(_function("cuLaunchKernel"), *fixed)

    def start(stream: int, _kept: object = (numbers, num_bytes)) -> None:
        if launch(ctypes.c_void_p(stream), None, buffer):  # `call` retries, or raises by name
            call("cuLaunchKernel", *fixed, ctypes.c_void_p(stream), None, buffer)

    return start


def _take_context() -> None:
    """Makes the context of PyTorch's current GPU that of this thread, as any call of CUDA's runtime does."""
    import torch

    torch.cuda.current_stream().query()


@functools.cache
def _function(name: str) -> Callable[..., int]:
    function: Callable[..., int] = getattr(_driver(), name)
    return function


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
