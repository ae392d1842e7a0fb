"""Fingerprint sums of arrays in GPU memory, computed on the GPU; only 32 bytes of each are copied back."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from crossdevice.kernels.cuda.tensors import bytes_of, on_device, tensors_of
from crossdevice.kernels.position_keys import BLOCK_BYTES, NUM_SUMS, Words, word_keys

BLOCKS = 4
"""Blocks that a program reads at a time: one for each warp."""

UNROLLED = 8
"""Loads of a block that a thread waits for at a time."""

NUM_WARPS = 4

PROGRAMS_PER_PROCESSOR = 4
"""Programs that fit a processor of a GPU at the same time, by the registers that they use."""

ALIGNMENT = 16


def sums_on_gpu(arrays: Sequence[Any]) -> Words:
    """Returns a row of four sums for each array in GPU memory, of any library; waits for work on them.

    All of a device are copied back at once.
    """
    totals: dict[torch.device, torch.Tensor] = {}
    devices = []
    for number, array in enumerate(arrays):
        (tensor,) = tensors_of([array])
        devices.append(tensor.device)
        with on_device(tensor.device):
            if tensor.device not in totals:
                shape = len(arrays), NUM_SUMS
                totals[tensor.device] = torch.zeros(shape, dtype=torch.int64, device=tensor.device)
            add_sums(bytes_of(tensor.detach()), totals[tensor.device][number])
    rows: dict[torch.device, Words] = {}
    for device, total in totals.items():
        with on_device(device):
            rows[device] = total.cpu().numpy().view(np.uint64)
    sums = np.empty((len(arrays), NUM_SUMS), np.uint64)
    for number, device in enumerate(devices):
        sums[number] = rows[device][number]
    return sums


def add_sums(memory: torch.Tensor, sums: torch.Tensor) -> None:
    """Enqueues what adds the four sums of bytes to others, all on the current device."""
    if memory.data_ptr() % ALIGNMENT:
        memory = memory.clone()
    num_blocks, rest = divmod(memory.numel(), BLOCK_BYTES)
    if num_blocks:
        _launch(memory, sums, 0, num_blocks)
    if rest:
        last = torch.zeros(BLOCK_BYTES, dtype=torch.uint8, device=memory.device)
        last[:rest] = memory[num_blocks * BLOCK_BYTES :]
        _launch(last, sums, num_blocks, 1)


def _launch(memory: torch.Tensor, sums: torch.Tensor, first_block: int, num_blocks: int) -> None:
    from crossdevice.kernels.cuda.triton_fingerprint import sum_blocks

    grid = (min(-(-num_blocks // BLOCKS), _max_programs(memory.device)),)
    addresses = memory.data_ptr(), _keys(memory.device).data_ptr(), sums.data_ptr()
    numbers = first_block, num_blocks, BLOCKS, UNROLLED
    with warnings.catch_warnings():
        # Triton 3.9 warns about its default for contractions; integer code has no contractions.
        warnings.filterwarnings("ignore", "TRITON_DEFAULT_FP_FUSION", UserWarning)
        sum_blocks[grid](*addresses, *numbers, num_warps=NUM_WARPS)


@functools.cache
def _max_programs(device: torch.device) -> int:
    """Returns the number of programs that run at the same time."""
    is_cuda = device.type == "cuda"
    processors = torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else 1
    return PROGRAMS_PER_PROCESSOR * processors


@functools.cache
def _keys(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(word_keys().astype(np.uint32).view(np.int32)).to(device)
