"""The sums that fingerprints are made of: each 32-bit word times a key of its position, modulo 2**64.

Bytes are read as little-endian 32-bit words, sixteen in a row of 64 bytes, 64 rows in a block of 4 KiB; what
lacks at the end counts as zero. A block has two sums of its words, each times a key of its place:

    first[b]  = sum of word[b, j] * key[j]          second[b] = sum of word[b, j] * key[j + 16]

and the four sums of all blocks are those of `first[b] * odd` and `second[b] * odd`, with two odd keys of b
for each. Words meet in additions only. So ranges that start and end with rows can be summed in any order, by
any number of threads or devices, and sums of disjoint ranges add up to those of the whole.

Keys are fixed and look random. Had they been drawn after the two arrays, any difference confined to one
32-bit word would always show, and any other would be missed with a chance of about 2**-64: that both
`first` and `second` of every block agree takes two coincidences among keys of 32 bits each.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROW_BYTES = 64
ROW_WORDS = ROW_BYTES // 4
BLOCK_ROWS = 64
BLOCK_WORDS = BLOCK_ROWS * ROW_WORDS
BLOCK_BYTES = BLOCK_ROWS * ROW_BYTES

COLUMN_ROWS = 128
"""Rows that columns of check sums have room for."""

TURN_SHIFT = 64 - 7
"""Shift that leaves the number of one of these rows."""

NUM_SUMS = 4
"""Number of sums of an array: first and second of `first`, then those of `second`."""

GOLDEN, FACTORS, SHIFTS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB), (30, 27, 31)
"""The constants of splitmix64, which makes the n-th key of n."""

WORD_KEYS_START = 1 << 63
"""Number of the first key of words; keys of blocks start at 0."""

Words = NDArray[np.uint64]


def splitmix64(numbers: Words) -> Words:
    """Returns one well-mixed word for each number.

    >>> hex(splitmix64(np.zeros(1, np.uint64))[0])
    '0xe220a8397b1dcdaf'
    """
    state = (numbers + np.uint64(1)) * np.uint64(GOLDEN)
    for shift, factor in zip(SHIFTS, FACTORS, strict=False):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    mixed: Words = state ^ (state >> np.uint64(SHIFTS[2]))
    return mixed


@functools.cache
def word_keys() -> Words:
    """Returns the 32-bit keys, none of them 0, of the words of a block plus one row."""
    numbers = np.uint64(WORD_KEYS_START) + np.arange(BLOCK_WORDS + ROW_WORDS, dtype=np.uint64)
    keys = splitmix64(numbers) >> np.uint64(32)
    keys[keys == 0] = 1
    keys.flags.writeable = False
    return keys


def block_keys(first: int, count: int) -> Words:
    """Returns the odd keys of blocks from `first` on, one row of `NUM_SUMS` per block."""
    start = np.uint64(first * NUM_SUMS)
    numbers = start + np.arange(count * NUM_SUMS, dtype=np.uint64)
    return (splitmix64(numbers) | np.uint64(1)).reshape(count, NUM_SUMS)


def sums_of_blocks(words: NDArray[Any], first_block: int) -> Words:
    """Returns the sums of whole blocks: the reference for the kernels.

    >>> sums_of_blocks(np.zeros(BLOCK_WORDS, np.uint32), 0).tolist()
    [0, 0, 0, 0]
    """
    blocks = words.reshape(-1, BLOCK_WORDS).astype(np.uint64)
    keys = word_keys()
    pair = np.stack([keys[:BLOCK_WORDS], keys[ROW_WORDS:]], axis=1)
    sums = np.repeat(blocks @ pair, 2, axis=1) * block_keys(first_block, len(blocks))
    total: Words = sums.sum(axis=0, dtype=np.uint64)
    return total
