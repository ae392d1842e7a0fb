"""The sums of a fingerprint in Triton: each warp reads a block of 4 KiB at a time, and each block once."""

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

_LANES = tl.constexpr(32)
_LOADED_WORDS = tl.constexpr(4)


@triton.jit(do_not_specialize=["words", "keys", "sums", "first_block", "num_blocks"])
def sum_blocks(words, keys, sums, first_block, num_blocks, BLOCKS: tl.constexpr, UNROLLED: tl.constexpr):
    """Adds the sums of every n-th tile of `BLOCKS` whole blocks, for n programs, to those at `sums`.

    `words` is the address of the first block, at a multiple of 16, and `first_block` its number; `keys` has
    32 bits for each key. A thread adds up the words that it loads at once before anything else: that
    leaves registers for all loads of a block, and for enough threads that wait for memory at a time.
    """
    base = words.to(tl.pointer_type(tl.uint32))
    key = keys.to(tl.pointer_type(tl.uint32))
    columns = tl.arange(0, _LANES)[None, :, None] * _LOADED_WORDS + tl.arange(0, _LOADED_WORDS)[None, None, :]
    # As many addresses of keys as of words: of a smaller tensor each thread would load other ones.
    columns += tl.zeros((BLOCKS, 1, 1), tl.int32)
    total0 = tl.zeros((BLOCKS, _LANES), tl.uint64)
    total1 = tl.zeros((BLOCKS, _LANES), tl.uint64)
    total2 = tl.zeros((BLOCKS, _LANES), tl.uint64)
    total3 = tl.zeros((BLOCKS, _LANES), tl.uint64)
    for tile in range(tl.program_id(0), tl.cdiv(num_blocks, BLOCKS), tl.num_programs(0)):
        rows = (tile * BLOCKS + tl.arange(0, BLOCKS)).to(tl.int64)
        start = base + (rows[:, None, None] * _BLOCK_WORDS + columns)
        is_there = (rows < num_blocks)[:, None, None]
        first = tl.zeros((BLOCKS, _LANES), tl.uint64)
        second = tl.zeros((BLOCKS, _LANES), tl.uint64)
        for chunk in tl.range(0, _BLOCK_WORDS // (_LANES * _LOADED_WORDS), loop_unroll_factor=UNROLLED):
            place = chunk * _LANES * _LOADED_WORDS
            # A thread may load four words at once; said here, since hints are lost in a function.
            places = tl.max_contiguous(tl.multiple_of(start + place, (1, 1, 16)), (1, 1, 4))
            place0 = tl.max_contiguous(tl.multiple_of(key + columns + place, (1, 1, 16)), (1, 1, 4))
            place1 = key + columns + (place + _ROW_WORDS)
            place1 = tl.max_contiguous(tl.multiple_of(place1, (1, 1, 16)), (1, 1, 4))
            read = tl.load(places, mask=is_there, other=0).to(tl.uint64)
            first += tl.sum(read * tl.load(place0).to(tl.uint64), axis=2)
            second += tl.sum(read * tl.load(place1).to(tl.uint64), axis=2)
        number = (rows + first_block).to(tl.uint64) * _NUM_SUMS
        total0 += first * _key_of(number)[:, None]
        total1 += first * _key_of(number + 1)[:, None]
        total2 += second * _key_of(number + 2)[:, None]
        total3 += second * _key_of(number + 3)[:, None]
    line = sums.to(tl.pointer_type(tl.uint64))
    tl.atomic_add(line, tl.sum(tl.sum(total0, axis=1), axis=0), sem="relaxed")
    tl.atomic_add(line + 1, tl.sum(tl.sum(total1, axis=1), axis=0), sem="relaxed")
    tl.atomic_add(line + 2, tl.sum(tl.sum(total2, axis=1), axis=0), sem="relaxed")
    tl.atomic_add(line + 3, tl.sum(tl.sum(total3, axis=1), axis=0), sem="relaxed")


@triton.jit
def _key_of(number):
    key = (number + 1) * _GOLDEN
    key = (key ^ (key >> _FIRST_SHIFT)) * _FIRST_FACTOR
    key = (key ^ (key >> _SECOND_SHIFT)) * _SECOND_FACTOR
    return (key ^ (key >> _THIRD_SHIFT)) | 1
