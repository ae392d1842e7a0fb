"""Whether the kernels of the GPU can be used in this process, and if not, why."""

from __future__ import annotations

import functools

OLDEST_TRITON = "3.6"
"""The oldest release that the kernels were tried with; before 3.3 Triton has no tuples."""


@functools.cache
def kernels_missing() -> str | None:
    """Why the kernels cannot be used; None if they can."""
    try:
        import torch  # noqa: F401
        import triton
    except Exception as error:
        return f"its kernels need PyTorch and Triton, which cannot be imported: {error}"
    found, needed = _version(triton.__version__), _version(OLDEST_TRITON)
    if found < needed:
        return f"its kernels need Triton {OLDEST_TRITON} or later, and this is {triton.__version__}"
    return None


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])
