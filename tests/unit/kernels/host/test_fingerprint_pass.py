"""Arrays that are not contiguous are copied in tiles, whatever the order of their axes."""

from __future__ import annotations

import numpy as np
import pytest

from crossdevice.kernels.host.fingerprint_pass import in_order


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
