"""A compiled step of processes that share memory: a rank announces itself and looks for the others."""

from __future__ import annotations

import functools
from collections.abc import Callable

from crossdevice.kernels.host.llvm.numba_pass import entry_of
from crossdevice.kernels.host.llvm.words import pause, set_shared_word, shared_word, word_at
from crossdevice.kernels.host.work_list import WORD_BYTES

SIGNATURE = f"int64({','.join(['int64'] * 7)})"

NOT_ALL, ALL, ALL_AND_SLEEPERS = 0, 1, 2


@functools.cache
def compiled_meeting() -> Callable[..., int]:
    """Compiles the function that comes to a step and returns whether all ranks have come.

    Its arguments: own block, pointers to the others' blocks, their number, bytes from a block to its key,
    words of a key, number of the step, number of looks.

    The first words of a block are the step that its rank has come to, the step it has withdrawn from, and
    whether it sleeps. Only the last rank to come finds sleepers.
    """

    def meet(
        own: int, others: int, num_others: int, key_bytes: int, key_words: int, step: int, num_looks: int
    ) -> int:
        set_shared_word(own, step)
        for look in range(num_looks):
            num_come = 0
            while num_come < num_others and shared_word(word_at(others, num_come)) >= step:
                num_come += 1
            if num_come == num_others:
                sleepers = 0
                for index in range(num_others):
                    block = word_at(others, index)
                    if word_at(block, 1) == step:
                        return NOT_ALL
                    for word in range(key_words):
                        if word_at(block + key_bytes, word) != word_at(own + key_bytes, word):
                            return NOT_ALL
                    sleepers += shared_word(block + 2 * WORD_BYTES)
                return ALL_AND_SLEEPERS if sleepers and look == 0 else ALL
            pause()
        return NOT_ALL

    return entry_of(meet, "meeting", SIGNATURE)
