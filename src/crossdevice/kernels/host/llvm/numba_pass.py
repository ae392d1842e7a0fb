"""The fused pass compiled by numba: one kernel for each arithmetic, kept on disk for the next process."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import platform
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from numba import njit

from crossdevice.kernels.host.llvm.code import STREAMED_LINE_BYTES, combine_lanes, copy_past_cache
from crossdevice.kernels.host.llvm.families import arithmetic_named
from crossdevice.kernels.host.llvm.words import (
    data_of,
    finish_streaming,
    number_at,
    set_word,
    take_number,
    word_at,
)
from crossdevice.kernels.host.work_list import (
    BLOCK_INPUTS,
    HEADER_WORDS,
    LEFT_WORD,
    MANY_INPUTS,
    MAX_PIECES_LEFT,
    OBJECT_HEADER_BYTES,
    ROW_WORDS,
    SCRATCH_BYTES,
    TUPLE_HEADER_BYTES,
    WORD_BYTES,
)
from crossdevice.values.dtypes import ITEM_BYTES

SIGNATURE = "void(int64,int64,int64,int64,int64)"

Kernel = Callable[..., Any]

REFERENCE = ("long_accumulator", "rounding", "running", "sorting")
"""Files there with constants, or functions, that kernels are compiled from."""

COPIED_BYTES = 1 << 16
"""Bytes of a result that are copied to other outputs while a cache of its own core has them."""

SILENT_SECONDS = 0.5
"""Time after which a compilation is announced; one from scratch takes longer, a kernel on disk does not."""

logger = logging.getLogger("crossdevice")


@functools.cache
def _code_version() -> int:
    """Returns a digest of all code that is compiled in: numba itself checks only the kernel's own file."""
    version = 0
    for path in compiled_sources():
        version = zlib.crc32(path.read_bytes(), version)
    return version


def compiled_sources() -> list[Path]:
    """Lists the source files with code or constants of a kernel; none of them inside an archive."""
    folder = Path(__file__).parent
    constants = (
        "host/work_list",
        "families",
        "position_keys",
        "../values/dtypes",
        *map("host/reference/{}".format, REFERENCE),
    )
    paths = [(folder.parents[1] / f"{name}.py").resolve() for name in constants]
    return sorted(folder.glob("*.py")) + [path for path in paths if path.exists()]


def cache_folder() -> Path | None:
    """Returns the folder of numba's cache for later processes; None if none is writable."""
    try:
        return Path(njit(cache=True)(cache_folder).stats.cache_path)
    except RuntimeError:
        return None


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


@functools.cache
def _keeps_kernels() -> bool:
    """Returns whether compiled kernels are cached on disk; logs once where."""
    folder = cache_folder()
    if folder is None:
        logger.warning(
            "compiled kernels are not kept, and every process compiles them again: neither the installed "
            "package nor a home directory is writable; set NUMBA_CACHE_DIR to a folder that is"
        )
    else:
        logger.info("compiled kernels are kept in %s", folder)
    return folder is not None


@functools.cache
def can_run_here() -> bool:
    """Returns whether numba compiles and objects have the known layouts of CPython and NumPy."""
    if numba.config.DISABLE_JIT or sys.implementation.name != "cpython" or sys.maxsize < 1 << 32:
        return False
    array = np.empty(1)
    items = (array,)
    item = ctypes.c_void_p.from_address(id(items) + TUPLE_HEADER_BYTES).value
    fields = (ctypes.c_void_p * 6).from_address(id(array) + OBJECT_HEADER_BYTES)
    return item == id(array) and (fields[0], fields[5]) == (array.ctypes.data, id(array.dtype))


@functools.cache
def has_half_conversions() -> bool:
    """Returns whether kernels may convert float16; else LLVM would call functions not linked here."""
    if platform.machine().lower() in ("arm64", "aarch64"):
        return True
    return compiles_for("f16c")


def compiles_for(feature: str) -> bool:
    """Returns True if kernels may use this CPU feature: this CPU has it, or NUMBA_CPU_FEATURES names it."""
    chosen: str | None = numba.config.CPU_FEATURES
    if chosen is not None:
        return f"+{feature}" in chosen.split(",")
    return bool(llvmlite.binding.get_host_cpu_features().get(feature, False))


@functools.cache
def compiled_kernel(name: str) -> Kernel:
    """Returns the kernel of one arithmetic, such as "chain wide SUM float32", compiled or loaded from disk.

    A "chain" combines inputs from left to right, "onto" adds them to what the output holds, of float64, and
    a "tree" combines them as a program says.

    Called with the address of a header and rows (`as_words`), it takes rows until none is left. The next
    three addresses, or zeros, are added to what rows say: where pointers to inputs are, pointers to outputs,
    and leftovers (`LEFTOVER_WORDS`). Last comes the address of scratch memory (`SCRATCH_BYTES`), which may be
    0 if there are fewer inputs than `MANY_INPUTS`.
    """
    return compiled(_kernel_function(name), name, SIGNATURE)


def compiled(function: Kernel, name: str, signature: str, *, nogil: bool = True) -> Kernel:
    """Compiles a function made for this call alone through numba, or loads it from disk if cached."""
    # numba numbers the files of one name, and processes that compile different closures of one function
    # at once may take the same number for both. So every kernel gets a name, and files, of its own.
    function.__qualname__ = f"{name.replace(' ', '_')}_{_code_version():08x}"
    with announced_if_slow():
        if _keeps_kernels():
            try:
                return njit(signature, nogil=nogil, cache=True)(function)
            except OSError as error:  # the disk is full, or the files there belong to somebody else
                _warn_once(f"compiled kernels cannot be kept in {cache_folder()}: {error.strerror}")
        return njit(signature, nogil=nogil)(function)


@contextlib.contextmanager
def announced_if_slow(seconds: float = SILENT_SECONDS) -> Iterator[None]:
    """Tells a person at a terminal, once in a process, why nothing happens if the block takes long."""
    if not sys.stderr or not sys.stderr.isatty() or _announce.cache_info().currsize:
        yield
        return
    timer = threading.Timer(seconds, _announce)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@functools.cache
def _announce() -> None:
    sys.stderr.write("crossdevice: compiling kernels for this machine, once\n")


def entry_of(function: Kernel, name: str, signature: str, *, nogil: bool = True) -> Kernel:
    """Returns the compiled entry point: numba's dispatcher would check every argument's type again."""
    dispatcher: Any = compiled(function, name, signature, nogil=nogil)
    entry: Kernel = dispatcher.get_overload(signature)
    return entry


def lanes_of(name: str) -> int:
    """Chooses the number of elements per step: up to four lines of results, in at most half the registers.

    Four lines from one input and then four from the next measured best, and least sensitive to addresses
    that are nearly equal modulo 4096. Beyond 64 widened elements, conversions get in each other's way.
    """
    arithmetic = arithmetic_named(name.partition(" ")[2])
    line = STREAMED_LINE_BYTES // ITEM_BYTES[arithmetic.result_dtype]
    widened_bytes = arithmetic.bytes_per_lane
    lanes = 4 * line
    while lanes > line and (
        (widened_bytes and lanes > 64)
        or lanes * (widened_bytes or ITEM_BYTES[arithmetic.dtype]) > _register_bytes() // 2
    ):
        lanes //= 2
    return lanes


@functools.cache
def _register_bytes() -> int:
    """Counts the bytes of vector registers: 32 of 64 bytes, or 16 of 32 (which is also 32 of 16)."""
    return 2048 if compiles_for("avx512f") else 512


def _kernel_function(name: str) -> Kernel:
    lanes = lanes_of(name)
    arithmetic = arithmetic_named(name.partition(" ")[2])
    is_in_order, reads_outputs = not name.startswith("tree "), name.startswith("onto ")
    element_bytes = arithmetic.bytes_per_lane or ITEM_BYTES[arithmetic.dtype]
    tile = SCRATCH_BYTES // element_bytes - lanes
    result_bytes = ITEM_BYTES[arithmetic.result_dtype]

    def kernel(work: int, all_inputs: int, all_outputs: int, all_leftovers: int, scratch: int) -> None:
        num_rows, is_shared, divisor = word_at(work, 0), word_at(work, 2), number_at(work, 3)
        program, program_length = word_at(work, 4), word_at(work, 5)
        number = 0
        while True:
            if is_shared:
                number = take_number(work + WORD_BYTES)
            if number >= num_rows:
                break
            row = work + (HEADER_WORDS + number * ROW_WORDS) * WORD_BYTES
            number += 1
            inputs, outputs = all_inputs + word_at(row, 0), all_outputs + word_at(row, 2)
            leftovers = all_leftovers + word_at(row, 7)
            if leftovers:
                set_word(leftovers, 0, 0)
                set_word(leftovers, 1, -1)
            num_inputs, num_outputs = word_at(row, 1), word_at(row, 3)
            start, stop, is_nontemporal = word_at(row, 4), word_at(row, 5), word_at(row, 6)
            if reads_outputs:
                is_nontemporal = 0
            # Where the first whole line of the outputs starts, if they all have one there.
            head, is_copied = start, 0
            if is_nontemporal:
                first = data_of(outputs, 0)
                for index in range(num_outputs):
                    target = data_of(outputs, index)
                    if (target - first) % STREAMED_LINE_BYTES:
                        is_copied = 1
                    for other in range(num_inputs):
                        # In place, lines that were just read would have to leave the cache: half the speed.
                        if data_of(inputs, other) == target:
                            is_nontemporal = 0
                missing = -(first + start * result_bytes) % STREAMED_LINE_BYTES
                if missing % result_bytes:
                    is_nontemporal = 0
                if not is_nontemporal:
                    is_copied = 0
                elif is_copied:
                    # Lines start at different elements: the first output is written, and copied to the others
                    # a tile at a time, each along its own lines.
                    is_nontemporal = 0
                else:
                    head = min(start + missing // result_bytes, stop)
            num_written = 1 if is_copied else num_outputs
            columns = (inputs, num_inputs, outputs, num_written, divisor, program, program_length)
            # Many inputs are read in blocks of a few over tiles that stay in cache: more streams at once are
            # more than processors prefetch.
            block, tile_length, position = num_inputs, stop - start, start
            if is_in_order and num_inputs >= MANY_INPUTS:
                block, tile_length = -(-num_inputs // -(-num_inputs // BLOCK_INPUTS)), tile
            if is_copied:
                tile_length = min(tile_length, COPIED_BYTES // result_bytes)
            while position < stop:
                tile_start, first = position, 0
                tile_stop = min(tile_start + tile_length, stop)
                while first < num_inputs:
                    last, position = min(first + block, num_inputs), tile_start
                    while position < tile_stop:
                        part = first, last, scratch + (position - tile_start) * element_bytes
                        if position >= head and position + lanes <= stop:
                            length = lanes
                            doubt = combine_lanes(name, lanes, columns, position, is_nontemporal, part)
                        else:
                            length = 1
                            doubt = combine_lanes(name, 1, columns, position, 0, part)
                        if doubt:
                            set_word(work, LEFT_WORD, 1)
                            left = word_at(leftovers, 0)
                            if left == MAX_PIECES_LEFT:
                                set_word(leftovers, 1, position)
                                tile_stop = stop = position
                                break
                            set_word(leftovers, 2 + 2 * left, position)
                            set_word(leftovers, 3 + 2 * left, length)
                            set_word(leftovers, 0, left + 1)
                        position += length
                    first = last
                if is_copied:
                    source = data_of(outputs, 0) + tile_start * result_bytes
                    for index in range(1, num_outputs):
                        target = data_of(outputs, index) + tile_start * result_bytes
                        copy_past_cache(target, source, (position - tile_start) * result_bytes)
            if is_nontemporal or is_copied:
                finish_streaming()

    return kernel
