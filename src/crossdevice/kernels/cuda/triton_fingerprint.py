"""The sums of a fingerprint in Triton: each program reads some blocks of 4 KiB once."""

# ruff: noqa: N803 - Triton: what is compiled in is in capitals
# mypy: disable-error-code="no-untyped-def, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from crossdevice.kernels import position_keys

_BLOCK_WORDS = tl.constexpr(position_keys.BLOCK_WORDS)
_ROW_WORDS = tl.constexpr(position_keys.ROW_WORDS)
_NUM_SUMS = tl.constexpr(position_keys.NUM_SUMS)
_GOLDEN = tl.constexpr(position_keys.GOLDEN)
_FIRST_FACTOR = tl.constexpr(position_keys.FACTORS[0])
_SECOND_FACTOR = tl.constexpr(position_keys.FACTORS[1])
_FIRST_SHIFT = tl.constexpr(position_keys.SHIFTS[0])
_SECOND_SHIFT = tl.constexpr(position_keys.SHIFTS[1])
_THIRD_SHIFT = tl.constexpr(position_keys.SHIFTS[2])


@triton.jit(do_not_specialize=["words", "keys", "sums", "first_block", "num_blocks"])
def sum_blocks(words, keys, sums, first_block, num_blocks, BLOCKS: tl.constexpr):
    """Writes the sums of up to `BLOCKS` whole blocks in a line of its own; the first has a number.

    `words` is the address of the first block, at a multiple of 16; `keys` has 32 bits for each key.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    columns = tl.arange(0, _BLOCK_WORDS)
    places = words.to(tl.pointer_type(tl.uint32)) + (rows[:, None] * _BLOCK_WORDS + columns[None, :])
    places = tl.max_contiguous(tl.multiple_of(places, (1, 16)), (1, _BLOCK_WORDS))
    read = tl.load(places, mask=(rows < num_blocks)[:, None], other=0).to(tl.uint64)
    key = keys.to(tl.pointer_type(tl.uint32)) + columns
    first = tl.sum(read * tl.load(key).to(tl.uint64)[None, :], axis=1)
    second = tl.sum(read * tl.load(key + _ROW_WORDS).to(tl.uint64)[None, :], axis=1)
    line = sums.to(tl.pointer_type(tl.uint64)) + tl.program_id(0).to(tl.int64) * _NUM_SUMS
    number = (rows + first_block).to(tl.uint64) * _NUM_SUMS
    tl.store(line, tl.sum(first * _key_of(number), axis=0))
    tl.store(line + 1, tl.sum(first * _key_of(number + 1), axis=0))
    tl.store(line + 2, tl.sum(second * _key_of(number + 2), axis=0))
    tl.store(line + 3, tl.sum(second * _key_of(number + 3), axis=0))


@triton.jit
def _key_of(number):
    key = (number + 1) * _GOLDEN
    key = (key ^ (key >> _FIRST_SHIFT)) * _FIRST_FACTOR
    key = (key ^ (key >> _SECOND_SHIFT)) * _SECOND_FACTOR
    return (key ^ (key >> _THIRD_SHIFT)) | 1
