"""Fingerprints by Triton's interpreter: the sums of the host, whatever the dtype, length and address.

Collected only by test_triton_kernels.py, in a process in which TRITON_INTERPRET is set.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from crossdevice.kernels.cuda import gpu_fingerprint
from crossdevice.kernels.cuda.gpu_fingerprint import BLOCKS, sums_on_gpu
from crossdevice.kernels.host.fingerprint_pass import pieces_of, sums_of
from crossdevice.kernels.position_keys import BLOCK_BYTES

# The interpreter computes in NumPy, which has something to say about numbers that wrap.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SIZES = (
    0,
    1,
    3,
    63,
    BLOCK_BYTES - 1,
    BLOCK_BYTES,
    BLOCK_BYTES + 1,
    BLOCKS * BLOCK_BYTES,
    5 * BLOCK_BYTES + 7,
)


def host_sums(memory):
    return sums_of(pieces_of(0, memory), 1)[0].tolist()


@pytest.mark.parametrize("size", SIZES)
def test_sums_are_those_of_the_host(size):
    memory = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    assert sums_on_gpu([torch.from_numpy(memory)]).tolist() == [host_sums(memory)]


@pytest.mark.parametrize("blocks", [BLOCKS, 5 * BLOCKS, 6 * BLOCKS - 1])
def test_programs_that_read_several_tiles_add_them_up(monkeypatch, blocks):
    monkeypatch.setattr(gpu_fingerprint, "_max_programs", lambda device: 2)
    memory = np.random.default_rng(blocks).integers(0, 256, blocks * BLOCK_BYTES + 9, dtype=np.uint8)
    assert sums_on_gpu([torch.from_numpy(memory)]).tolist() == [host_sums(memory)]


def test_an_address_that_cannot_be_read_at_once_is_copied_first():
    memory = np.random.default_rng(1).integers(0, 256, 9000, dtype=np.uint8)
    assert sums_on_gpu([torch.from_numpy(memory)[3:]]).tolist() == [host_sums(memory[3:])]


def test_transposed_tensors_are_read_in_the_order_of_their_indices():
    tensor = torch.arange(2400, dtype=torch.float32).reshape(40, 60)
    assert sums_on_gpu([tensor.T]).tolist() == [host_sums(np.ascontiguousarray(tensor.T.numpy()))]


def test_several_arrays_have_a_row_of_sums_each():
    tensors = [torch.arange(size, dtype=torch.int16) for size in (5000, 0, 3)]
    assert sums_on_gpu(tensors).tolist() == [host_sums(tensor.numpy()) for tensor in tensors]
