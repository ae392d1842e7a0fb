"""numba intrinsics that read one vector from each input, combine them in registers and write every output.

numba does not vectorise a loop over many pointers, since it cannot rule out that they overlap; these
emit the vector instructions themselves, through llvmlite. The numbers of inputs and outputs are known
only when the code runs, so one kernel serves all of them.
"""

# ruff: noqa: ARG001 - numba fixes the parameters of intrinsics and of the functions that emit them

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from crossdevice.kernels.families import MAX_DEPTH, START, WITH_LEVEL
from crossdevice.kernels.host.llvm.arithmetic import Arithmetic
from crossdevice.kernels.host.llvm.conversions import in_widened_order
from crossdevice.kernels.host.llvm.families import arithmetic_named
from crossdevice.kernels.host.llvm.lanes import (
    DOUBLE,
    INT32,
    INT64,
    STORED,
    Builder,
    Lanes,
    State,
    Value,
    Vector,
)
from crossdevice.kernels.host.llvm.words import emitted, loaded_address, loaded_word
from crossdevice.kernels.host.work_list import BLOCK_INPUTS
from crossdevice.values.dtypes import ITEM_BYTES

STREAMED_LINE_BYTES = 64
"""Bytes that a store past the cache writes at once; anything less is read from memory first."""


@intrinsic(prefer_literal=True)
def combine_lanes(
    typing_context: Any, name: Any, lanes: Any, columns: Any, position: Any, streams: Any, part: Any
) -> Any:
    """Combines `lanes` elements of all inputs from `position` on and writes them to all outputs.

    `columns` has addresses of pointers to ndarrays, the inputs and how many, the outputs and how many; the
    divisor; and a program (0: none) and its length, which says in which order the inputs combine, if not from
    left to right; for a weighted arithmetic it has the weights. `streams` says whether results bypass the
    cache.

    Of inputs from left to right it is given one `part`, from the first to the last, of at most
    `BLOCK_INPUTS`: what they have come to is kept at its third number, an address, and written when the
    last ones have been added.

    0 is returned if all is well; 1 if the arithmetic is not certain of its results: then nothing is written.
    """
    signature = types.int64(name, lanes, columns, position, streams, part)
    shape, _, arithmetic_name = name.literal_value.partition(" ")
    count = lanes.literal_value

    def emit(context: Any, builder: Builder, signature: Any, arguments: Any) -> Value:
        arithmetic = arithmetic_named(arithmetic_name)
        _, _, columns, position, streams, part = arguments
        arrays, parts = cgutils.unpack_tuple(builder, columns), cgutils.unpack_tuple(builder, part)
        work = _Work._make([*arrays, position, streams, *parts])
        column = _Column(Lanes(builder, count), arithmetic.dtype, work)
        if shape == "tree":
            return _finish(column, arithmetic, column.combined_by_program(arithmetic))
        column.adds_to_output = shape == "onto"
        doubt = cgutils.alloca_once_value(builder, ir.Constant(INT64, 0))
        state = column.combined_in_order(arithmetic, work.first, work.last)
        is_last = builder.icmp_signed("==", work.last, work.num_inputs)
        with builder.if_else(is_last, likely=True) as (ends, goes_on):
            with ends:
                builder.store(_finish(column, arithmetic, state), doubt)
            with goes_on:
                column.keep(state)
        return builder.load(doubt)

    return signature, emit


@emitted()
def copy_past_cache(build: Builder, target: Value, source: Value, num_bytes: Value) -> None:
    """Copies memory, with stores past the cache for all whole lines of the target."""
    line = ir.Constant(INT64, STREAMED_LINE_BYTES)
    missing = build.and_(build.neg(target), ir.Constant(INT64, STREAMED_LINE_BYTES - 1))
    head = build.select(build.icmp_signed("<", missing, num_bytes), missing, num_bytes)
    num_lines = build.sdiv(build.sub(num_bytes, head), line)
    kind = ir.VectorType(INT64, STREAMED_LINE_BYTES // 8)

    def place(address: Value, offset: Value, kind: Any) -> Value:
        return build.inttoptr(build.add(address, offset), kind.as_pointer())

    def copy_some(offset: Value, count: Value) -> None:
        byte = ir.IntType(8)
        cgutils.raw_memcpy(build, place(target, offset, byte), place(source, offset, byte), count, 1)

    copy_some(ir.Constant(INT64, 0), head)
    with cgutils.for_range(build, num_lines) as loop:
        offset = build.add(head, build.mul(loop.index, line))
        _store_past_cache(
            build, build.load(place(source, offset, kind), align=1), place(target, offset, kind)
        )
    tail = build.add(head, build.mul(num_lines, line))
    copy_some(tail, build.sub(num_bytes, tail))


def _store_past_cache(build: Builder, value: Value, place: Value) -> None:
    stored = build.store(value, place)
    stored.align = STREAMED_LINE_BYTES
    stored.set_metadata("nontemporal", build.module.add_metadata([ir.Constant(INT32, 1)]))


class _Work(NamedTuple):
    """Arguments of `combine_lanes`, as values of the emitted code."""

    inputs: Value
    num_inputs: Value
    outputs: Value
    num_outputs: Value
    divisor: Value
    program: Value
    program_length: Value
    position: Value
    is_nontemporal: Value
    first: Value
    last: Value
    scratch: Value


def _finish(column: _Column, arithmetic: Arithmetic, state: State) -> Value:
    """Writes results unless they are in doubt; 1 if they are."""
    builder = column.lanes.build
    result, doubt = _settled(column, arithmetic, state)
    if doubt is None:
        _write(arithmetic, result, column.work)
        return ir.Constant(INT64, 0)
    with builder.if_then(builder.not_(doubt), likely=True):
        _write(arithmetic, result, column.work)
    return builder.zext(doubt, INT64)


def _settled(column: _Column, arithmetic: Arithmetic, state: State) -> tuple[Vector, Value | None]:
    """Returns the results, from a fallback where they are in doubt, and whether any is still in doubt."""
    lanes, work = column.lanes, column.work
    builder = lanes.build
    state = column.with_divisor(arithmetic, state)
    result, doubted = arithmetic.settled(state, work.divisor, work.num_inputs)
    if doubted is None:
        return result, None
    doubt, second = doubted.is_any(), arithmetic.fallback()
    if second is None:
        return result, doubt
    place, is_open = (cgutils.alloca_once_value(builder, value) for value in (result.value, doubt))
    with builder.if_then(doubt, likely=False):
        settled, left = _settled(column, second, column.combined_in_loop(second))
        builder.store(settled.value, place)
        builder.store(ir.Constant(ir.IntType(1), 0) if left is None else left, is_open)
    return Vector(lanes, builder.load(place)), builder.load(is_open)


class _Column:
    """Reads vectors at one position of all inputs, and combines them."""

    def __init__(self, lanes: Lanes, dtype: str, work: _Work) -> None:
        self.lanes, self.work = lanes, work
        self._dtype = dtype
        self._offset = byte_offset(lanes.build, work.position, dtype)
        self.adds_to_output = False
        """True if inputs are added to what the only output, of float64, already holds."""

    def combined_in_order(self, arithmetic: Arithmetic, first: Value, last: Value) -> State:
        """Combines up to `BLOCK_INPUTS` inputs from `first` to `last`.

        A `first` other than 0 continues from the kept accumulator.
        """
        # Every input has instructions of its own: processors tell the streams that they prefetch apart by the
        # address of the instruction that reads. In a loop over inputs, one instruction reads all in turn.
        build = self.lanes.build
        is_new = build.icmp_signed("==", first, ir.Constant(INT64, 0))
        with build.if_else(is_new, likely=True) as (begins, resumes):
            with begins:
                places = self._placed(self._started(arithmetic))
                if self.adds_to_output:
                    self._grow(arithmetic, places, first)
            with resumes:
                for place, kept in zip(places, self._kept([p.type.pointee for p in places]), strict=True):
                    build.store(build.load(kept, align=1), place)
                self._grow(arithmetic, places, first)
        with contextlib.ExitStack() as stack:
            for number in range(1, BLOCK_INPUTS):
                index = build.add(first, ir.Constant(INT64, number))
                stack.enter_context(build.if_then(build.icmp_signed("<", index, last)))
                self._grow(arithmetic, places, index)
        return self._held(places)

    def combined_in_loop(self, arithmetic: Arithmetic) -> State:
        """Combines all inputs, however many."""
        build = self.lanes.build
        places = self._placed(self._started(arithmetic))
        start = ir.Constant(INT64, 0 if self.adds_to_output else 1)
        with cgutils.for_range(build, self.work.num_inputs, start=start) as loop:
            self._grow(arithmetic, places, loop.index)
        return self._held(places)

    def keep(self, state: State) -> None:
        """Stores the accumulator where `combined_in_order` finds it."""
        for part, kept in zip(state, self._kept([part.value.type for part in state]), strict=True):
            self.lanes.build.store(part.value, kept, align=1)

    def with_divisor(self, arithmetic: Arithmetic, state: State) -> State:
        """Appends the sum of exact weights' missing rest and its error bound to the accumulator."""
        if not arithmetic.uses_divisor_rest:
            return state
        behind = self.lanes.build.add(self.work.num_inputs, ir.Constant(INT64, 1))
        return *state, self._weight(self.work.num_inputs), self._weight(behind)

    def _started(self, arithmetic: Arithmetic) -> State:
        zero = ir.Constant(INT64, 0)
        if not self.adds_to_output:
            return self._grown(arithmetic, None, zero)
        build = self.lanes.build
        offset = byte_offset(build, self.work.position, arithmetic.result_dtype)
        held = self.lanes.load(build.add(loaded_address(build, self.work.outputs, zero), offset), DOUBLE)
        return (in_widened_order(held, arithmetic.dtype),)

    def _grow(self, arithmetic: Arithmetic, places: Sequence[Value], index: Value) -> None:
        grown = self._grown(arithmetic, self._held(places), index)
        for part, place in zip(grown, places, strict=True):
            self.lanes.build.store(part.value, place)

    def _grown(self, arithmetic: Arithmetic, state: State | None, index: Value) -> State:
        element = self._element(arithmetic, index)
        if arithmetic.is_weighted:
            return arithmetic.with_term(state, element, self._weight(index))
        return arithmetic.started(element) if state is None else arithmetic.combined(state, element)

    def _weight(self, index: Value) -> Vector:
        build = self.lanes.build
        return self.lanes.spread(build.bitcast(loaded_word(build, self.work.program, index), DOUBLE))

    def _placed(self, state: State) -> list[Value]:
        return [cgutils.alloca_once_value(self.lanes.build, part.value) for part in state]

    def _held(self, places: Sequence[Value]) -> State:
        return tuple(Vector(self.lanes, self.lanes.build.load(place)) for place in places)

    def _kept(self, kinds: Sequence[Any]) -> Iterator[Value]:
        """Yields pointers into the scratch memory, one part of the accumulator after the other."""
        build, address = self.lanes.build, self.work.scratch
        for kind in kinds:
            place = build.inttoptr(address, kind.as_pointer())
            yield place
            address = build.ptrtoint(build.gep(place, [ir.Constant(INT64, 1)]), INT64)

    def combined_by_program(self, arithmetic: Arithmetic) -> State:
        """Combines the inputs by the program of a tree."""
        build = self.lanes.build
        program, length = self.work.program, self.work.program_length
        first = self._element(arithmetic, ir.Constant(INT64, 0))
        with build.goto_entry_block():
            levels = build.alloca(first.value.type, MAX_DEPTH + 1)
        with cgutils.for_range(build, length) as loop:
            word = loaded_word(build, program, loop.index)
            kind = build.and_(word, ir.Constant(INT64, 0xFF))
            level = build.and_(build.lshr(word, ir.Constant(INT64, 8)), ir.Constant(INT64, 0xFF))
            here = build.gep(levels, [level])
            joins_levels = build.icmp_signed("==", kind, ir.Constant(INT64, WITH_LEVEL))
            with build.if_else(joins_levels) as (joins, reads):
                with joins:
                    above = build.gep(levels, [build.add(level, ir.Constant(INT64, 1))])
                    right, left = self._held([above, here])
                    build.store(arithmetic.of_two(left, right).value, here)
                with reads:
                    element = self._element(arithmetic, build.lshr(word, ir.Constant(INT64, 16)))
                    starts = build.icmp_signed("==", kind, ir.Constant(INT64, START))
                    with build.if_else(starts) as (start, go_on):
                        with start:
                            build.store(element.value, here)
                        with go_on:
                            (held,) = self._held([here])
                            build.store(arithmetic.of_two(held, element).value, here)
        return self._held([levels])

    def _element(self, arithmetic: Arithmetic, index: Value) -> Vector:
        address = self.lanes.build.add(
            loaded_address(self.lanes.build, self.work.inputs, index), self._offset
        )
        if arithmetic.bytes_ahead:
            num_bytes = self.lanes.count * ITEM_BYTES[self._dtype]
            for line in range(0, num_bytes - STREAMED_LINE_BYTES + 1, STREAMED_LINE_BYTES):
                self.lanes.prefetch(address, arithmetic.bytes_ahead + line)
        return arithmetic.widened(self.lanes.load(address, STORED[self._dtype]))


def _write(arithmetic: Arithmetic, result: Vector, work: _Work) -> None:
    build = result.lanes.build
    item_bytes = ITEM_BYTES[arithmetic.result_dtype]
    offset = byte_offset(build, work.position, arithmetic.result_dtype)

    def write_all(*, past_cache: bool) -> None:
        with cgutils.for_range(build, work.num_outputs) as loop:
            address = build.add(loaded_address(build, work.outputs, loop.index), offset)
            place = build.inttoptr(address, result.value.type.as_pointer())
            if past_cache:
                _store_past_cache(build, result.value, place)
            else:
                build.store(result.value, place, align=1)

    if result.lanes.count * item_bytes % STREAMED_LINE_BYTES:
        write_all(past_cache=False)
        return
    streams_results = build.icmp_signed("!=", work.is_nontemporal, ir.Constant(INT64, 0))
    with build.if_else(streams_results) as (streams, caches):
        with streams:
            write_all(past_cache=True)
        with caches:
            write_all(past_cache=False)


def byte_offset(build: Builder, position: Value, dtype: str) -> Value:
    """Computes the byte offset of an element."""
    return build.mul(position, ir.Constant(INT64, ITEM_BYTES[dtype]))
