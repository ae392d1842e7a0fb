"""Running exact sums of arrays in the memory of one GPU, which nothing leaves until they are asked for."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from crossdevice.kernels.cuda.tensors import addresses_of, on_device, tensors_of
from crossdevice.kernels.host.reference.running import NUM_PARTS
from crossdevice.kernels.host.running_sum import RunningSum, sum_family

BLOCK = 512
"""Elements of a program; memory of each array begins at a multiple of it."""

NUM_WARPS = 4

MIN_CAPACITY, CAPACITY_SHARE = 1 << 12, 256
"""Capacity of the list of elements that the parts cannot hold: a minimum, and a share of all elements."""


NOTHING = -1
"""Marks a free entry of the list."""


class GpuSums:
    """Exact sums of several arrays of one float dtype, kept in GPU memory.

    All arrays are added in one launch. The parts have the bits of those of `RunningSum`. Elements that parts
    cannot hold are listed in the memory of the GPU; where the list is full, sums go on on the host.
    """

    def __init__(self, sizes: Sequence[int], dtype: np.dtype[Any], device: torch.device) -> None:
        self.sizes, self.dtype, self.device = list(sizes), dtype, device
        blocks = [-(-size // BLOCK) for size in sizes]
        self._firsts = np.concatenate([[0], np.cumsum(blocks)]).astype(np.int64)
        self._num_blocks = int(self._firsts[-1])
        owners = np.repeat(np.arange(len(blocks)), blocks)
        # Addresses, first blocks and sizes of arrays; then the array of each block.
        words = np.concatenate([np.zeros(len(blocks)), self._firsts[:-1], self.sizes, owners])
        self._capacity = max(MIN_CAPACITY, sum(self.sizes) // CAPACITY_SHARE)
        num_parts = NUM_PARTS[sum_family(dtype, "exact")]
        with on_device(device):
            self._table = torch.from_numpy(words.astype(np.int64)).to(device)
            self._parts = torch.empty(
                (num_parts, self._num_blocks * BLOCK), dtype=torch.float64, device=device
            )
            # Their number; elements, bits and weights of those that parts cannot hold; marks of blocks.
            self._leftovers = torch.empty(
                1 + 3 * self._capacity + self._num_blocks, dtype=torch.int64, device=device
            )
        is_cuda = device.type == "cuda"
        self._addresses = torch.zeros(len(blocks), dtype=torch.int64, pin_memory=is_cuda)
        self._count = torch.zeros(1, dtype=torch.int64, pin_memory=is_cuda)
        self._counted = torch.cuda.Event() if is_cuda else None
        self._last: tuple[Mapping[int, torch.Tensor], int] = ({}, 0)
        self.clear()

    @property
    def num_apart(self) -> int:
        """The number of elements that were listed; waits for the GPU."""
        return self._wait_for_count()

    @property
    def is_full(self) -> bool:
        """True if the last arrays had more to list than there was room; waits until they are added."""
        return self._wait_for_count() > self._capacity

    def clear(self) -> None:
        """Resets the sums and keeps the memory."""
        self._wait_for_count()  # or it would arrive after it was cleared
        self._parts[0] = -0.0  # adding to it leaves every number, and every zero, as it is
        self._parts[1:] = 0.0
        self._leftovers.zero_()
        self._leftovers[1 : 1 + self._capacity] = NOTHING
        self._last = ({}, 0)
        self._count.zero_()

    def add(self, arrays: Mapping[int, Any], weight: int) -> None:
        """Adds arrays, by the number of their sum, times a whole number; not to be called where `is_full`.

        They are kept until they are known to have been added.
        """
        from crossdevice.kernels.cuda.triton_sums import TYPES, add_arrays

        with on_device(self.device):
            tensors = dict(zip(arrays, tensors_of(list(arrays.values())), strict=True))
            self._wait_for_count()  # of the last ones, which were copied from the same memory
            addresses = self._addresses.numpy()
            addresses[:] = 0
            addresses[list(tensors)] = addresses_of(list(tensors.values()))
            self._table[: len(self.sizes)].copy_(self._addresses, non_blocking=True)
            memory = self._table.data_ptr(), self._parts.data_ptr(), self._leftovers.data_ptr()
            numbers = len(self.sizes), self._num_blocks, self._capacity, weight
            constants = TYPES[self.dtype.name], self.dtype.name == "bfloat16", len(self._parts), BLOCK
            # No fused multiply-adds: they would round once where the host rounds twice.
            options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
            with warnings.catch_warnings():
                # Triton 3.9 speaks of its default for what is said here.
                warnings.filterwarnings("ignore", "TRITON_DEFAULT_FP_FUSION", UserWarning)
                if self._num_blocks:
                    add_arrays[(self._num_blocks,)](*memory, *numbers, *constants, **options)
            self._count.copy_(self._leftovers[:1], non_blocking=True)
            if self._counted is not None:
                self._counted.record()
        self._last = (tensors, weight)

    def on_host(self) -> list[RunningSum]:
        """Copies all sums to the host, with all that was added."""
        is_full, (last, weight) = self.is_full, self._last
        parts = self._parts.cpu().numpy()
        leftovers = self._leftovers.cpu().numpy()
        elements, bits, factors = leftovers[1 : 1 + 3 * self._capacity].reshape(3, -1)
        (listed,) = np.nonzero(elements != NOTHING)
        marked = leftovers[1 + 3 * self._capacity :] if is_full else None
        sums = []
        for number, size in enumerate(self.sizes):
            start, stop = self._firsts[number : number + 2] * BLOCK
            running = RunningSum(size, self.dtype, "exact")
            running.load([part[start : start + size] for part in parts])
            for place in listed[(elements[listed] >= start) & (elements[listed] < stop)]:
                value = float(bits[place : place + 1].view(np.float64)[0])
                running.keep_apart(int(elements[place] - start), value, float(factors[place]))
            if marked is not None and size and number in last:
                is_left = np.repeat(marked[start // BLOCK : stop // BLOCK], BLOCK)[:size] != 0
                flat = last[number].reshape(-1).view(torch.uint8).cpu().numpy().view(self.dtype)
                # Elements that are absent must change nothing, not even the sign of a zero.
                running.add([np.where(is_left, flat, flat.dtype.type(-0.0))], [float(weight)])
            running.widen_if_crowded()
            sums.append(running)
        return sums

    def _wait_for_count(self) -> int:
        if self._counted is not None:
            self._counted.synchronize()
        return int(self._count[0])
