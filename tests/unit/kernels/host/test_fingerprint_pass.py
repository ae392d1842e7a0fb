"""Arrays that are not contiguous are copied in tiles, whatever the order of their axes."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest

from crossdevice.kernels.host import fingerprint_pass
from crossdevice.kernels.host.fingerprint_pass import FINGERPRINT, in_order, is_compiled, pieces_of, sums_of
from crossdevice.kernels.position_keys import NUM_SUMS


@pytest.mark.parametrize(
    "turned",
    [
        lambda array: array.T,
        lambda array: array[::-1, ::2].T,
        lambda array: array.reshape(60, 30, 50).transpose(0, 2, 1)[3:50, :, ::-3],
        lambda array: array.reshape(60, 30, 50).transpose(2, 1, 0),
        lambda array: array.T[:0],
        lambda array: np.broadcast_to(array[:, :1], (300, 300)).T,
        lambda array: array[:, 0],
    ],
)
def test_parts_of_any_memory_order_are_copied_in_theirs(turned):
    part = turned(np.arange(90_000, dtype=np.float32).reshape(300, 300))
    copy = in_order(part)
    assert copy.flags.c_contiguous
    assert np.array_equal(copy, part)


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "float64", "complex128"])
@pytest.mark.parametrize("shape", [(1, 1), (700, 3), (65, 130), (64, 1024), (1030, 64)])
def test_matrices_whose_columns_are_contiguous_are_turned(dtype, shape):
    whole = np.random.default_rng(0).integers(0, 256, shape[::-1]).astype(dtype)
    for turned in (whole.T, whole[::-1].T, whole[:, 1:].T):
        assert np.array_equal(in_order(turned), turned)


@pytest.mark.skipif(not is_compiled(), reason="kernels are not compiled here")
def test_threads_that_load_the_kernel_at_the_same_time_get_the_same_sums():
    from crossdevice.kernels.host.llvm import fingerprinting

    memory = np.arange(64, dtype=np.float32)
    expected = np.zeros(NUM_SUMS, np.uint64)
    FINGERPRINT.reference(memory.view(np.uint8), 0, expected)
    found, interval = [], sys.getswitchinterval()

    def add():
        start.wait()
        found.append(sums_of(pieces_of(0, memory), 1)[0].tolist())

    sys.setswitchinterval(1e-6)
    try:
        for _ in range(4):
            fingerprint_pass._load.cache_clear()
            fingerprinting.compiled_sums.cache_clear()
            start = threading.Barrier(4)
            threads = [threading.Thread(target=add) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert found == [expected.tolist()] * 16
