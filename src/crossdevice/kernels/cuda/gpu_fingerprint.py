"""Fingerprint sums of arrays in GPU memory, computed on the GPU; only 32 bytes are copied back."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
import torch

from crossdevice.kernels.cuda.tensors import on_device, tensors_of
from crossdevice.kernels.position_keys import BLOCK_BYTES, NUM_SUMS, Words, word_keys

BLOCKS = 8
"""Blocks that a program reads at a time: one for each warp."""

WIDTH = 128
"""Words of a block that a warp loads at once, 16 bytes in each thread."""

MAX_PROGRAMS = 1024
"""Programs of a large array, several for each processor of a GPU; each has a line of sums."""

NUM_WARPS = 8

ALIGNMENT = 16


def sums_on_gpu(array: Any) -> Words:
    """Returns the four sums of an array in GPU memory, of any library; waits for pending work on it."""
    (tensor,) = tensors_of([array])
    memory = tensor.detach().reshape(-1).view(torch.uint8)
    if memory.data_ptr() % ALIGNMENT:
        memory = memory.clone()
    num_blocks, rest = divmod(memory.numel(), BLOCK_BYTES)
    with on_device(memory.device):
        keys = _keys(memory.device)
        total = torch.zeros(NUM_SUMS, dtype=torch.int64, device=memory.device)
        if num_blocks:
            total += _sums(memory, keys, 0, num_blocks)
        if rest:
            last = torch.zeros(BLOCK_BYTES, dtype=torch.uint8, device=memory.device)
            last[:rest] = memory[num_blocks * BLOCK_BYTES :]
            total += _sums(last, keys, num_blocks, 1)
        sums: Words = total.cpu().numpy().view(np.uint64)
    return sums


def _sums(memory: torch.Tensor, keys: torch.Tensor, first_block: int, num_blocks: int) -> torch.Tensor:
    from crossdevice.kernels.cuda.triton_fingerprint import sum_blocks

    num_programs = min(-(-num_blocks // BLOCKS), MAX_PROGRAMS)
    lines = torch.empty((num_programs, NUM_SUMS), dtype=torch.int64, device=memory.device)
    addresses = memory.data_ptr(), keys.data_ptr(), lines.data_ptr()
    with warnings.catch_warnings():
        # Triton 3.9 warns about its default for contractions; integer code has no contractions.
        warnings.filterwarnings("ignore", "TRITON_DEFAULT_FP_FUSION", UserWarning)
        sum_blocks[(num_programs,)](*addresses, first_block, num_blocks, BLOCKS, WIDTH, num_warps=NUM_WARPS)
    return lines.sum(dim=0)


@functools.cache
def _keys(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(word_keys().astype(np.uint32).view(np.int32)).to(device)
