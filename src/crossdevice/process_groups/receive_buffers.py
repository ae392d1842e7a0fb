"""Memory for what other ranks say that they send; what cannot be is refused before anything is allocated."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from crossdevice.errors import ProcessGroupError


def receive_buffer(sender: str, shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
    """An array with no particular content for what a rank, named for people, has announced."""
    sizes = tuple(map(int, shape))
    num_bytes = math.prod(sizes) * np.dtype(dtype).itemsize
    if min(sizes, default=0) >= 0 and num_bytes <= _memory_bytes():
        try:
            return np.empty(sizes, dtype)
        except MemoryError:
            pass
    raise ProcessGroupError(
        f"{sender} says that it sends an array of shape {sizes}, {num_bytes} bytes, for which there is no "
        f"memory: this host has {_memory_bytes()} bytes. Unless it brings as much, its message was corrupted"
    )


@functools.cache
def _memory_bytes() -> int:
    """What the machine has; as much as anybody may want where it does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 1 << 62
