"""Handing part of a pass to a worker thread that is awake, in less time than waking one takes."""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir

from crossdevice.kernels.host.llvm.lanes import INT64, Builder, Value
from crossdevice.kernels.host.llvm.numba_pass import Kernel, entry_of
from crossdevice.kernels.host.llvm.words import (
    emitted,
    pause,
    set_shared_word,
    set_word,
    shared_word,
    swapped,
    word_at,
)
from crossdevice.kernels.host.work_list import WORD_BYTES

STATE, AWAKE, KERNEL, FIRST, SECOND, SCRATCH = range(6)
"""The words of a mailbox, in which a caller leaves a pass for the worker.

Whether one is there; whether a worker is awake, and may stay so; the kernel's address, the rows of the
caller and of the worker, and the worker's scratch memory.
"""

FREE, CLAIMED, GIVEN, TAKEN, ENDED = range(5)


@functools.cache
def compiled_sharing() -> Kernel:
    """Compiles the function that does a pass and returns whether a worker took part.

    Its arguments: mailbox, address of the kernel, two lists of rows, scratch memory, whether to ask a worker.
    The caller and the worker each begin with their own list: its arrays are still cached if the pass is
    repeated. Then they take the rest of the other list.
    """

    def share(mailbox: int, kernel: int, first: int, second: int, scratch: int, is_offered: int) -> bool:
        if is_offered:
            is_offered = swapped(mailbox, FREE, CLAIMED)
        for rows in (first, second):
            set_word(rows, 1, 0)
            set_word(rows, 2, is_offered)
        if is_offered:
            set_word(mailbox, KERNEL, kernel)
            set_word(mailbox, FIRST, first)
            set_word(mailbox, SECOND, second)
            set_shared_word(mailbox, GIVEN)
        run_kernel(kernel, first, scratch)
        run_kernel(kernel, second, scratch)
        # A worker that has not begun is not waited for: another process may have its processor.
        if not is_offered or swapped(mailbox, GIVEN, FREE):
            return False
        while shared_word(mailbox) != ENDED:
            pause()
        set_shared_word(mailbox, FREE)
        return True

    return entry_of(share, "share", f"boolean({','.join(['int64'] * 6)})")


@functools.cache
def compiled_standby() -> Kernel:
    """Compiles the function of (mailbox, number of looks) that joins passes until that many looks fail."""

    def stand_by(mailbox: int, num_looks: int) -> None:
        set_shared_word(mailbox + AWAKE * WORD_BYTES, 1)
        looks = 0
        while looks < num_looks and shared_word(mailbox + AWAKE * WORD_BYTES):
            looks += 1
            if shared_word(mailbox) == GIVEN and swapped(mailbox, GIVEN, TAKEN):
                kernel, scratch = word_at(mailbox, KERNEL), word_at(mailbox, SCRATCH)
                run_kernel(kernel, word_at(mailbox, SECOND), scratch)
                run_kernel(kernel, word_at(mailbox, FIRST), scratch)
                set_shared_word(mailbox, ENDED)
                looks = 0
            pause()
        set_shared_word(mailbox + AWAKE * WORD_BYTES, 0)

    return entry_of(stand_by, "stand_by", "void(int64,int64)")


def address_of(kernel: Any) -> int:
    """Returns the address of a compiled kernel."""
    (result,) = kernel.overloads.values()
    address: int = result.library.get_pointer_to_function(result.fndesc.llvm_cfunc_wrapper_name)
    return address


@emitted()
def run_kernel(build: Builder, kernel: Value, rows: Value, scratch: Value) -> None:
    """Calls a kernel by its address, as `compiled_kernel` describes."""
    zero = ir.Constant(INT64, 0)
    function_type = ir.FunctionType(ir.VoidType(), [INT64] * 5)
    build.call(build.inttoptr(kernel, function_type.as_pointer()), [rows, zero, zero, zero, scratch])
