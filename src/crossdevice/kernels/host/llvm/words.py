"""Words of memory, shared with other threads and processes or not, as numba intrinsics."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from crossdevice.kernels.host.llvm.lanes import DOUBLE, INT64, Builder, Value
from crossdevice.kernels.host.work_list import OBJECT_HEADER_BYTES, WORD_BYTES


def emitted(result: Any = types.void) -> Callable[[Callable[..., Value | None]], Any]:
    """Makes an intrinsic of a function that emits code with a builder, for values of its other arguments."""

    def made(function: Callable[..., Value | None]) -> Any:
        @functools.wraps(function)
        def typed(_typing_context: Any, *arguments: Any) -> Any:
            def emit(context: Any, builder: Builder, _signature: Any, values: Any) -> Value:
                answer = function(builder, *values)
                return context.get_dummy_value() if answer is None else answer

            return result(*arguments), emit

        return intrinsic(typed)

    return made


def loaded_word(build: Builder, address: Value, index: Value) -> Value:
    """Emits the load of `word_at`."""
    return build.load(_pointer(build, address, index))


def loaded_address(build: Builder, arrays: Value, index: Value) -> Value:
    """Emits the load of `data_of`."""
    fields = build.add(loaded_word(build, arrays, index), ir.Constant(INT64, OBJECT_HEADER_BYTES))
    return loaded_word(build, fields, ir.Constant(INT64, 0))


def _pointer(build: Builder, address: Value, index: Value | None = None) -> Value:
    if index is not None:
        address = build.add(address, build.mul(index, ir.Constant(INT64, WORD_BYTES)))
    return build.inttoptr(address, INT64.as_pointer())


@emitted(types.int64)
def data_of(build: Builder, arrays: Value, index: Value) -> Value:
    """Returns the address of the elements of the array `index` pointers after `arrays`."""
    return loaded_address(build, arrays, index)


@emitted(types.int64)
def word_at(build: Builder, address: Value, index: Value) -> Value:
    """Reads the 64-bit word `index` words after `address`."""
    return loaded_word(build, address, index)


@emitted(types.float64)
def number_at(build: Builder, address: Value, index: Value) -> Value:
    """Reads the float64 `index` words after `address`."""
    return build.bitcast(loaded_word(build, address, index), DOUBLE)


@emitted()
def set_word(build: Builder, address: Value, index: Value, word: Value) -> None:
    """Stores `word` `index` words after `address`."""
    build.store(word, _pointer(build, address, index))


@emitted(types.int64)
def take_number(build: Builder, counter: Value) -> Value:
    """Takes the next number of a counter that several threads share."""
    return build.atomic_rmw("add", _pointer(build, counter), ir.Constant(INT64, 1), "monotonic")


@emitted(types.int64)
def shared_word(build: Builder, address: Value) -> Value:
    """Reads a word that another process may write; later reads are at least as new."""
    return build.load_atomic(_pointer(build, address), "acquire", WORD_BYTES)


@emitted()
def set_shared_word(build: Builder, address: Value, word: Value) -> None:
    """Stores a word; others see it after all earlier stores, and before this thread's later reads."""
    build.atomic_rmw("xchg", _pointer(build, address), word, "seq_cst")


@emitted(types.int64)
def swapped(build: Builder, address: Value, old: Value, new: Value) -> Value:
    """Compares a shared word with `old` and sets it to `new` if equal; returns whether it was."""
    found = build.cmpxchg(_pointer(build, address), old, new, "seq_cst", "seq_cst")
    return build.zext(build.extract_value(found, 1), INT64)


@emitted()
def finish_streaming(build: Builder) -> None:
    """Makes non-temporal stores visible before whatever this thread does next; only x86 must be told."""
    _call_on_x86(build, "llvm.x86.sse.sfence")


@emitted()
def pause(build: Builder) -> None:
    """Tells an x86 processor that it waits for memory."""
    _call_on_x86(build, "llvm.x86.sse2.pause")


def _call_on_x86(build: Builder, instruction: str) -> None:
    """Emits an instruction without operands that other processors do not have."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        function_type = ir.FunctionType(ir.VoidType(), [])
        build.call(cgutils.get_or_insert_function(build.module, function_type, instruction), [])
