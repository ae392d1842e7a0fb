"""Availability of the GPU kernels in this process, with the reason if they cannot be used."""

from __future__ import annotations

import functools
import sys

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
