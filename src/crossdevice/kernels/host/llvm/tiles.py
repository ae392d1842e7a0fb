"""The walk over the tiles of a pass: each is reduced, then sums of its memory are added up in cache."""

from __future__ import annotations

import functools

from llvmlite import ir

from crossdevice.kernels.host.llvm.fingerprinting import ROW_ARGUMENTS
from crossdevice.kernels.host.llvm.lanes import INT64, Builder, Value
from crossdevice.kernels.host.llvm.numba_pass import Kernel, entry_of
from crossdevice.kernels.host.llvm.standby import run_kernel
from crossdevice.kernels.host.llvm.words import data_of, emitted, set_word, take_number, word_at
from crossdevice.kernels.host.work_list import HEADER_WORDS, ROW_WORDS, WORD_BYTES
from crossdevice.kernels.position_keys import ROW_BYTES

NOTE_WORDS = 4
"""What adds rows to sums, bytes for each element of the task, the row of the memory's first byte, keys."""

NOTES_WORD, STEP_WORD = ROW_WORDS - 2, ROW_WORDS - 1
"""The words of a row with the place of its notes and the elements of a tile: the kernel reads zeros there.

In front of notes are their number and that of the first array."""


@functools.cache
def compiled_walk() -> Kernel:
    """Compiles the function that does rows tile by tile, until none is left.

    Its arguments: the address of the kernel (0: tasks without outputs), a header and one row for it, after
    which come those to be done; how many, the counter from which threads take them (0: one thread), notes;
    arrays, where each is copied to (itself: nowhere) and sums, in the order of notes; scratch memory of the
    kernel.
    """

    def walk(
        kernel: int,
        tile: int,
        num_rows: int,
        counter: int,
        notes: int,
        arrays: int,
        targets: int,
        sums: int,
        scratch: int,
    ) -> None:
        number, own = 0, tile + HEADER_WORDS * WORD_BYTES
        while True:
            if counter:
                number = take_number(counter)
            if number >= num_rows:
                break
            number += 1
            row = own + number * ROW_WORDS * WORD_BYTES
            for index in range(NOTES_WORD):
                set_word(own, index, word_at(row, index))
            stop, first_note, step = word_at(row, 5), word_at(row, NOTES_WORD), word_at(row, STEP_WORD)
            num_notes = word_at(notes, first_note)
            for start in range(word_at(row, 4), stop, step):
                end = min(start + step, stop)
                set_word(own, 4, start)
                set_word(own, 5, end)
                if kernel:
                    run_kernel(kernel, tile, scratch)
                for index in range(num_notes):
                    note = notes + (first_note + 2 + index * NOTE_WORDS) * WORD_BYTES
                    place = word_at(notes, first_note + 1) + index
                    item_bytes = word_at(note, 1)
                    begin = start * item_bytes
                    memory, target = data_of(arrays, place), data_of(targets, place)
                    add_rows(
                        word_at(note, 0),
                        memory + begin,
                        word_at(note, 2) + begin // ROW_BYTES,
                        (end * item_bytes - begin) // ROW_BYTES,
                        word_at(note, 3),
                        data_of(sums, place),
                        target + begin if target != memory else 0,
                    )

    return entry_of(walk, "walk", f"void({','.join(['int64'] * 9)})")


@emitted()
def add_rows(
    build: Builder,
    function: Value,
    address: Value,
    first: Value,
    count: Value,
    keys: Value,
    sums: Value,
    target: Value,
) -> None:
    """Calls what adds rows to sums, by its address."""
    kind = ir.FunctionType(ir.VoidType(), [INT64] * ROW_ARGUMENTS)
    arguments = [address, first, count, keys, sums, target]
    build.call(build.inttoptr(function, kind.as_pointer()), arguments)
