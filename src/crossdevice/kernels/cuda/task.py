"""One piece of work for the kernels of the GPU."""

from __future__ import annotations

from typing import NamedTuple

from crossdevice.kernels.cuda.families import Arithmetic


class Place(NamedTuple):
    """Where an array starts: so many bytes after the address at this position of a list of addresses."""

    position: int
    offset: int = 0

    def moved(self, num_bytes: int) -> Place:
        """The place so many bytes on."""
        return Place(self.position, self.offset + num_bytes)


class KernelTask(NamedTuple):
    """Elements in a row of every input, combined into those of every output."""

    arithmetic: Arithmetic
    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]
    num_elements: int
