"""Memory for the results of a batch: a few blocks, cut into tensors by as few calls as possible."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from crossdevice.kernels.cuda.families import BLOCK_BYTES, AddressOffset

SHARED_BYTES = 256 << 20
"""Maximum bytes of a block of several results. One result that is kept alive keeps the whole block."""

VECTOR_ACCESS_BYTES = 16
"""Alignment of results that are long enough to be written that much at a time."""

# Below automatic differentiation, so that results are no views of a block for it, and are cut faster.
_unrecorded = getattr(torch._C, "_AutoDispatchBelowADInplaceOrView", torch.no_grad)


class Wanted(NamedTuple):
    """A number of results of one shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    num_results: int

    @property
    def num_bytes(self) -> int:
        """Bytes of one result."""
        return math.prod(self.shape) * self.dtype.itemsize


def wanted(shape: tuple[int, ...], dtype: str, num_results: int) -> Wanted:
    """Makes the entry from the name of a dtype."""
    return Wanted(shape, getattr(torch, dtype), num_results)


class _Stack(NamedTuple):
    """Results one after the other in a block, from an element on, alike but for their first axis."""

    block: int
    start: int
    rest: tuple[int, ...] | None
    """The other axes; None for results without any axis."""
    num_results: int
    """Number of results of each of the wanted."""
    lengths: list[int]
    """The length of the first axis of each result."""
    numbers: list[int]
    """Positions of these results in the list of wanted ones, in order."""

    def layout(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns shape and strides of all of them as one array."""
        rest = self.rest or ()
        return (sum(self.lengths), *rest), tuple(math.prod(rest[axis:]) for axis in range(len(rest) + 1))


class ResultBlocks:
    """Places of results, decided before memory is allocated.

    Results that are alike but for their first axis lie next to each other, whichever value they are of: one
    call of PyTorch's then makes tensors of all of them. What is too large for a block with others has memory
    of its own, and so has what is long and would put others off their lines.
    """

    def __init__(self, wanted: Sequence[Wanted], device: torch.device) -> None:
        self._device = device
        self._shapes: list[tuple[tuple[int, ...], torch.dtype]] = []
        self._stacks: list[_Stack] = []
        self._alone: dict[int, range] = {}
        self._places: dict[int, tuple[AddressOffset, ...]] = {}
        alike: dict[tuple[torch.dtype, bool], dict[tuple[object, int], list[int]]] = {}
        for number, one in enumerate(wanted):
            is_odd = one.num_bytes % VECTOR_ACCESS_BYTES != 0
            if one.num_bytes * one.num_results > SHARED_BYTES or (is_odd and one.num_bytes >= BLOCK_BYTES):
                self._add_alone(number, one)
            else:
                kind = one.shape[1:] if one.shape else None, one.num_results
                alike.setdefault((one.dtype, is_odd), {}).setdefault(kind, []).append(number)
        for (dtype, _), stacks in alike.items():
            self._fill(
                dtype, [[(number, wanted[number]) for number in numbers] for numbers in stacks.values()]
            )
        # What fills a block needs not be looked for in it.
        blocks = [stack.block for stack in self._stacks]
        self._layouts = [
            None if blocks.count(stack.block) == 1 else (*stack.layout(), stack.start)
            for stack in self._stacks
        ]
        for stack, layout in zip(self._stacks, self._layouts, strict=True):
            if layout is None:
                self._shapes[stack.block] = (stack.layout()[0], self._shapes[stack.block][1])
        made = [*self._alone, *(number for stack in self._stacks for number in stack.numbers)]
        self._order = [made.index(number) for number in range(len(wanted))]

    def places_of(self, number: int) -> tuple[AddressOffset, ...]:
        """Returns the places of one wanted result; positions count blocks."""
        return self._places[number]

    def blocks(self) -> list[torch.Tensor]:
        """Allocates new memory."""
        return [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._shapes]

    def cut(self, blocks: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        """Cuts the blocks into one tensor per wanted result."""
        made = [tuple(blocks[own.start : own.stop]) for own in self._alone.values()]
        with _unrecorded():
            for stack, layout in zip(self._stacks, self._layouts, strict=True):
                whole = blocks[stack.block] if layout is None else blocks[stack.block].as_strided(*layout)
                parts = whole.unbind() if stack.rest is None else whole.split_with_sizes(stack.lengths)
                # Several results per call, without a Python step for each.
                made += zip(*[iter(parts)] * stack.num_results, strict=True)
        return self._in_order(made)

    def _in_order(self, made: Sequence[tuple[torch.Tensor, ...]]) -> list[tuple[torch.Tensor, ...]]:
        return list(map(made.__getitem__, self._order))

    def _add_alone(self, number: int, one: Wanted) -> None:
        self._alone[number] = range(len(self._shapes), len(self._shapes) + one.num_results)
        self._places[number] = tuple(AddressOffset(block) for block in self._alone[number])
        self._shapes += [(one.shape, one.dtype)] * one.num_results

    def _fill(self, dtype: torch.dtype, stacks: Iterable[Sequence[tuple[int, Wanted]]]) -> None:
        """Puts results of one dtype into as few blocks as possible; each of the stacks is alike in itself."""
        used: int | None = None
        for members in stacks:
            stack: _Stack | None = None
            for number, one in members:
                num_elements = math.prod(one.shape)
                if used is None or (used + num_elements * one.num_results) * dtype.itemsize > SHARED_BYTES:
                    self._shapes.append(((0,), dtype))
                    used, stack = 0, None
                if stack is None:
                    rest = one.shape[1:] if one.shape else None
                    stack = _Stack(len(self._shapes) - 1, used, rest, one.num_results, [], [])
                    self._stacks.append(stack)
                stack.lengths.extend([one.shape[0] if one.shape else 1] * one.num_results)
                stack.numbers.append(number)
                self._places[number] = tuple(
                    AddressOffset(stack.block, (used + k * num_elements) * dtype.itemsize)
                    for k in range(one.num_results)
                )
                used += num_elements * one.num_results
                self._shapes[-1] = ((used,), dtype)
