"""The reason GPU kernels are unavailable, if any; functions of the CUDA driver.

Functions are called without PyTorch where that has none, or takes long.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

OLDEST_TRITON = "3.6"
"""The oldest release that the kernels were tried with."""

OLDEST_CAPABILITY = (8, 0)
"""The compute capability that Triton needs."""


@functools.cache
def kernels_unavailable() -> str | None:
    """Returns the reason the kernels cannot be used; None if they can."""
    if "tensorflow" in sys.modules and "triton" not in sys.modules:
        # Both bring an LLVM; loaded in this order, the second one ends the process.
        return "its kernels need Triton, which must be imported before TensorFlow"
    try:
        import torch  # noqa: F401
        import triton
    except Exception as error:
        return f"its kernels need PyTorch and Triton, which cannot be imported: {error}"
    found, needed = _version(triton.__version__), _version(OLDEST_TRITON)
    if found < needed:
        return f"its kernels need Triton {OLDEST_TRITON} or later, and this is {triton.__version__}"
    return None


@functools.cache
def gpu_unavailable(index: int) -> str | None:
    """Returns the reason this GPU cannot run the kernels; None if it can. Needs PyTorch."""
    import torch

    if torch.version.hip is not None:
        return "its kernels were never tried on GPUs of AMD"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(index) < OLDEST_CAPABILITY:
        major, minor = torch.cuda.get_device_capability(index)
        needed = ".".join(map(str, OLDEST_CAPABILITY))
        return f"its kernels need compute capability {needed} or later, and this GPU has {major}.{minor}"
    return None


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


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
