"""Results of a batch lie in few blocks, on lines where that matters, and nowhere twice."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from crossdevice.kernels.cuda import result_blocks  # noqa: E402
from crossdevice.kernels.cuda.families import BLOCK_BYTES  # noqa: E402
from crossdevice.kernels.cuda.result_blocks import VECTOR_ACCESS_BYTES, ResultBlocks, wanted  # noqa: E402

HOST = torch.device("cpu")
SHAPES = [(64,), (), (3, 4), (0,), (2, 0), (64,), (16, 8, 3), (32, 8, 3), (5,), (2001,), (4096,), (), (7, 5)]


def laid_out(shapes, count=3, dtypes=("float32",)):
    batch = [wanted(shape, dtype, count) for shape, dtype in itertools.product(shapes, dtypes)]
    return batch, ResultBlocks(batch, HOST)


def test_results_are_where_their_places_say():
    batch, layout = laid_out(SHAPES, dtypes=("float32", "bfloat16", "int8", "complex128"))
    blocks = layout.blocks()
    results = layout.cut(blocks)
    for number, (one, tensors) in enumerate(zip(batch, results, strict=True)):
        assert len(tensors) == one.num_results
        for tensor, (block, offset) in zip(tensors, layout.places_of(number), strict=True):
            assert (tuple(tensor.shape), tensor.dtype) == (one.shape, one.dtype)
            assert tensor.is_contiguous()
            if tensor.numel():
                assert tensor.data_ptr() == blocks[block].data_ptr() + offset


def test_no_two_results_share_a_byte():
    batch, layout = laid_out(SHAPES, dtypes=("float32", "float16"))
    results = [tensor for tensors in layout.cut(layout.blocks()) for tensor in tensors]
    for number, tensor in enumerate(results):
        tensor.fill_(number % 1000)
    assert all((tensor == number % 1000).all() for number, tensor in enumerate(results))
    assert len(results) == 3 * len(batch)


def test_long_results_start_on_lines():
    batch, layout = laid_out(SHAPES, dtypes=("float32", "int8", "float64"))
    blocks = layout.blocks()
    for number, one in enumerate(batch):
        if one.num_bytes >= BLOCK_BYTES:
            for block, offset in layout.places_of(number):
                assert (blocks[block].data_ptr() + offset) % VECTOR_ACCESS_BYTES == 0


def test_few_blocks_serve_many_values():
    _, layout = laid_out([(64,), (128,), (256, 64, 3, 3), (64,)] * 40, count=8)
    assert len(layout.blocks()) == 4 * 40 * 8 * 256 * 64 * 9 * 4 // (4 * result_blocks.SHARED_BYTES) + 1


def test_what_is_too_large_to_share_has_memory_of_its_own(monkeypatch):
    monkeypatch.setattr(result_blocks, "SHARED_BYTES", 4096)
    _, layout = laid_out([(100,), (1000,), (100,), (300,), (40,)], count=2)
    blocks = layout.blocks()
    assert all(block.nbytes <= 4096 or block.shape == (1000,) for block in blocks)
    large = layout.cut(blocks)[1]
    assert len({tensor.untyped_storage().data_ptr() for tensor in large}) == 2
    assert all(tensor.untyped_storage().nbytes() == 4000 for tensor in large)


def test_an_empty_batch_needs_no_memory():
    _, layout = laid_out([])
    assert layout.blocks() == layout.cut([]) == []
