"""Memory for the results of a batch: a few blocks, cut into tensors by as few calls as possible."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from crossdevice.kernels.cuda.task import Place

SHARED_BYTES = 64 << 20
"""The most that one block has for several results: what one survivor among them keeps alive."""

ALIGNMENT_BYTES = 256

# Below automatic differentiation, so that results are no views of a block for it, and are cut faster.
_unrecorded = getattr(torch._C, "_AutoDispatchBelowADInplaceOrView", torch.no_grad)


class Wanted(NamedTuple):
    """So many results of one shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    num_results: int


def wanted(shape: tuple[int, ...], dtype: str, num_results: int) -> Wanted:
    """The same, from the name of a dtype."""
    return Wanted(shape, getattr(torch, dtype), num_results)


class _Stack(NamedTuple):
    """Results of one shape, one after the other in a block, from an element on."""

    block: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    numbers: list[int]
    """Which of what is wanted they are for, in order."""


class ResultBlocks:
    """Where each result goes, decided before there is memory.

    Results of one shape lie next to each other, whichever value they are of: one call of PyTorch's then
    makes tensors of all of them. What is too large for a block with others has memory of its own.
    """

    def __init__(self, wanted: Sequence[Wanted], device: torch.device) -> None:
        self._wanted = wanted
        self._device = device
        self._shapes: list[tuple[tuple[int, ...], torch.dtype]] = []
        self._stacks: list[_Stack] = []
        self._alone: dict[int, range] = {}
        self._places: dict[int, tuple[Place, ...]] = {}
        alike: dict[tuple[torch.dtype, tuple[int, ...]], list[int]] = {}
        for number, (shape, dtype, _) in enumerate(wanted):
            alike.setdefault((dtype, shape), []).append(number)
        for (dtype, shape), numbers in sorted(alike.items(), key=lambda item: str(item[0][0])):
            for number in numbers:
                self._add(number, shape, dtype, wanted[number].num_results)

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return len(self._shapes)

    def places_of(self, number: int) -> tuple[Place, ...]:
        """Where the results of one of the wanted go; positions count blocks."""
        return self._places[number]

    def blocks(self) -> list[torch.Tensor]:
        """New memory."""
        return [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._shapes]

    def cut(self, blocks: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        """The results of each of the wanted, as tensors."""
        results: list[tuple[torch.Tensor, ...]] = [()] * len(self._wanted)
        for number, own in self._alone.items():
            results[number] = tuple(blocks[own.start : own.stop])
        with _unrecorded():
            for block, shape, strides, start, numbers in self._stacks:
                tensors = blocks[block].as_strided(shape, strides, start).unbind()
                first = 0
                for number in numbers:
                    end = first + self._wanted[number].num_results
                    results[number] = tensors[first:end]
                    first = end
        return results

    def _add(self, number: int, shape: tuple[int, ...], dtype: torch.dtype, count: int) -> None:
        line = ALIGNMENT_BYTES // dtype.itemsize
        step = -(-math.prod(shape) // line) * line
        if count * step * dtype.itemsize > SHARED_BYTES:
            self._alone[number] = range(self.num_blocks, self.num_blocks + count)
            self._places[number] = tuple(Place(block) for block in self._alone[number])
            self._shapes += [(shape, dtype)] * count
            return
        start = self._room_for(count * step, dtype)
        block = self.num_blocks - 1
        self._places[number] = tuple(Place(block, (start + k * step) * dtype.itemsize) for k in range(count))
        last = self._stacks[-1] if self._stacks else None
        if last is not None and last.block == block and last.shape[1:] == shape and start:
            last.numbers.append(number)
            self._stacks[-1] = last._replace(shape=(last.shape[0] + count, *shape))
        else:
            strides = (step, *(math.prod(shape[axis + 1 :]) for axis in range(len(shape))))
            self._stacks.append(_Stack(block, (count, *shape), strides, start, [number]))

    def _room_for(self, num_elements: int, dtype: torch.dtype) -> int:
        """Where the last block has room for so many elements; a new one is begun if it has none."""
        if self._stacks and self._stacks[-1].block == self.num_blocks - 1:
            (used,), its_dtype = self._shapes[-1]
            if its_dtype == dtype and (used + num_elements) * dtype.itemsize <= SHARED_BYTES:
                self._shapes[-1] = ((used + num_elements,), dtype)
                return used
        self._shapes.append(((num_elements,), dtype))
        return 0
