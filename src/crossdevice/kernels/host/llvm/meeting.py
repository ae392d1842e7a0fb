"""A compiled step of processes that share memory: a rank says that it has come, and looks for the others."""

# ruff: noqa: ARG001 - numba fixes the parameters of intrinsics and of the functions that emit them

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from crossdevice.kernels.host.llvm.code import call_on_x86, word_at
from crossdevice.kernels.host.llvm.lanes import INT64, Builder, Value
from crossdevice.kernels.host.llvm.numba_pass import compiled
from crossdevice.kernels.host.work_list import WORD_BYTES

SIGNATURE = f"int64({','.join(['int64'] * 7)})"

NOT_ALL, ALL, ALL_AND_SLEEPERS = 0, 1, 2


@functools.cache
def compiled_meeting() -> Callable[..., int]:
    """Called with (own block, pointers to others' blocks, how many, bytes from a block to its key, words of a
    key, number of the step, how often to look); returns who has come.

    The first words of a block are the step that its rank has come to, the step it has withdrawn from, and
    whether it sleeps. Only who is the last to come finds sleepers.
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
                    if word_at(block, 1) >= step:
                        return NOT_ALL
                    for word in range(key_words):
                        if word_at(block + key_bytes, word) != word_at(own + key_bytes, word):
                            return NOT_ALL
                    sleepers += shared_word(block + 2 * WORD_BYTES)
                return ALL_AND_SLEEPERS if sleepers and look == 0 else ALL
            pause()
        return NOT_ALL

    # The compiled function itself: numba's dispatcher would look at the type of every argument again.
    dispatcher: Any = compiled(meet, "meeting", SIGNATURE)
    entry: Callable[..., int] = dispatcher.get_overload(SIGNATURE)
    return entry


@intrinsic
def shared_word(typing_context: Any, address: Any) -> Any:
    """A word that another process may write at any moment; what is read afterwards is at least as new."""

    def emit(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        pointer = builder.inttoptr(arguments[0], INT64.as_pointer())
        return builder.load_atomic(pointer, "acquire", WORD_BYTES)

    return types.int64(address), emit


@intrinsic
def set_shared_word(typing_context: Any, address: Any, word: Any) -> Any:
    """Stores a word that others see after all that was stored before, and before anything is read here."""

    def emit(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        pointer = builder.inttoptr(arguments[0], INT64.as_pointer())
        builder.atomic_rmw("xchg", pointer, arguments[1], "seq_cst")
        return context.get_dummy_value()

    return types.void(address, word), emit


@intrinsic
def pause(typing_context: Any) -> Any:
    """Tells an x86 processor that it waits for memory."""

    def emit(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        call_on_x86(builder, "llvm.x86.sse2.pause")
        return context.get_dummy_value()

    return types.void(), emit
