"""The sums of a fingerprint in Triton: each program reads many blocks of 4 KiB, each once."""

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
def sum_blocks(words, keys, sums, first_block, num_blocks, BLOCKS: tl.constexpr, WIDTH: tl.constexpr):
    """Writes the sums of every n-th tile of `BLOCKS` whole blocks, for n programs, in a line of its own.

    `words` is the address of the first block, at a multiple of 16, and `first_block` its number; `keys` has
    32 bits for each key. A thread keeps sums of its own columns up to the end, since they are linear.
    """
    base = words.to(tl.pointer_type(tl.uint32))
    key = keys.to(tl.pointer_type(tl.uint32))
    columns = tl.arange(0, WIDTH)
    total0 = tl.zeros((BLOCKS, WIDTH), tl.uint64)
    total1 = tl.zeros((BLOCKS, WIDTH), tl.uint64)
    total2 = tl.zeros((BLOCKS, WIDTH), tl.uint64)
    total3 = tl.zeros((BLOCKS, WIDTH), tl.uint64)
    for tile in range(tl.program_id(0), tl.cdiv(num_blocks, BLOCKS), tl.num_programs(0)):
        rows = (tile * BLOCKS + tl.arange(0, BLOCKS)).to(tl.int64)
        first = tl.zeros((BLOCKS, WIDTH), tl.uint64)
        second = tl.zeros((BLOCKS, WIDTH), tl.uint64)
        for chunk in tl.static_range(_BLOCK_WORDS // WIDTH):
            place = columns + chunk * WIDTH
            places = base + (rows[:, None] * _BLOCK_WORDS + place[None, :])
            places = tl.max_contiguous(tl.multiple_of(places, (1, 16)), (1, WIDTH))
            read = tl.load(places, mask=(rows < num_blocks)[:, None], other=0).to(tl.uint64)
            first += read * tl.load(key + place).to(tl.uint64)[None, :]
            second += read * tl.load(key + place + _ROW_WORDS).to(tl.uint64)[None, :]
        number = (rows + first_block).to(tl.uint64) * _NUM_SUMS
        total0 += first * _key_of(number)[:, None]
        total1 += first * _key_of(number + 1)[:, None]
        total2 += second * _key_of(number + 2)[:, None]
        total3 += second * _key_of(number + 3)[:, None]
    line = sums.to(tl.pointer_type(tl.uint64)) + tl.program_id(0).to(tl.int64) * _NUM_SUMS
    tl.store(line, tl.sum(tl.sum(total0, axis=1), axis=0))
    tl.store(line + 1, tl.sum(tl.sum(total1, axis=1), axis=0))
    tl.store(line + 2, tl.sum(tl.sum(total2, axis=1), axis=0))
    tl.store(line + 3, tl.sum(tl.sum(total3, axis=1), axis=0))


@triton.jit
def _key_of(number):
    key = (number + 1) * _GOLDEN
    key = (key ^ (key >> _FIRST_SHIFT)) * _FIRST_FACTOR
    key = (key ^ (key >> _SECOND_SHIFT)) * _SECOND_FACTOR
    return (key ^ (key >> _THIRD_SHIFT)) | 1
