"""The tasks of the GPU kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from crossdevice.kernels.cuda.families import Arithmetic, block_elements

Start = Callable[[int], None]
"""Starts a kernel, whose arguments are known, on the stream of this handle."""

Launch = Callable[[Sequence[int]], Start]
"""Prepares a kernel with these arguments, constants left out."""


class AddressOffset(NamedTuple):
    """An array's start: an offset in bytes from the address at a position of a list of addresses."""

    position: int
    offset: int = 0

    def moved(self, num_bytes: int) -> AddressOffset:
        """The place so many bytes on."""
        return AddressOffset(self.position, self.offset + num_bytes)


class KernelTask(NamedTuple):
    """Elements in a row of every input, combined into those of every output."""

    arithmetic: Arithmetic
    inputs: tuple[AddressOffset, ...]
    outputs: tuple[AddressOffset, ...]
    num_elements: int


def rows_of(tasks: Sequence[KernelTask]) -> NDArray[np.int64]:
    """For each program of a launch the task, the block of it, and the task's number of elements."""
    block = block_elements(tasks[0].arithmetic)
    sizes = np.array([task.num_elements for task in tasks], np.int64)
    num_blocks = -(-sizes // block)
    task = np.repeat(np.arange(len(tasks)), num_blocks)
    firsts = np.cumsum(num_blocks) - num_blocks
    return np.stack([task, np.arange(len(task)) - firsts[task], sizes[task]], axis=1)
