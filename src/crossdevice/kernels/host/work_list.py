"""Tasks cut into rows of work, laid out in memory so that kernels take them without asking Python."""

from __future__ import annotations

import bisect
import itertools
import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from numpy.typing import NDArray

Arrays: TypeAlias = "tuple[NDArray[Any], ...]"
Task: TypeAlias = "tuple[Arrays, Arrays]"
"""Inputs and outputs."""

TUPLE_HEADER_BYTES = tuple.__basicsize__
"""Bytes before the item pointers of a tuple; kernels read them, as asking each array costs 1 us."""

OBJECT_HEADER_BYTES = object.__basicsize__
"""Bytes before the data pointer of an ndarray: its C struct is PyObject_HEAD and then `char *data`."""

WORD_BYTES = 8

HEADER_WORDS = 7
"""Number of rows, counter, whether threads share it, divisor, program, length of the program, and whether
anything was left."""

LEFT_WORD = 6
"""The word of a header that kernels set once a row has leftovers."""

ROW_WORDS = 8
"""Inputs, how many, outputs, how many, start, stop, whether results bypass the cache, leftovers."""

MAX_PIECES_LEFT = 128
LEFTOVER_WORDS = 2 + 2 * MAX_PIECES_LEFT
"""Number of pieces left, where the kernel ran out of space (-1: nowhere), starts and lengths."""

NO_LEFTOVERS = array("q", bytes(WORD_BYTES * LEFTOVER_WORDS))
"""Memory for the leftovers of a row; kernels clear it first."""

NO_PROGRAM: array[Any] = array("q")

MANY_INPUTS, BLOCK_INPUTS = 9, 8
"""Number of inputs that counts as many, and inputs per pass from there on."""

SCRATCH_BYTES = 1 << 18
"""Size of the accumulators of one pass: they stay in a second-level cache."""

Pieces: TypeAlias = "list[tuple[int, int]]"
"""Ranges of elements, from start to stop."""

SMALLEST_RANGE_BYTES, LARGEST_RANGE_BYTES = 1 << 17, 4 << 20
"""Traffic of one row of a large array: worth the taking, and at most 0.2 ms, so that threads end together."""

RANGE_ELEMENTS = 256
"""Rows are multiples of that many elements, which are whole lines of any dtype."""


def address_of(memory: NDArray[Any]) -> int:
    """Returns the address of the first element."""
    # `memory.ctypes.data` takes eight times as long.
    address: int = memory.__array_interface__["data"][0]
    return address


def traffic_bytes(inputs: Sequence[NDArray[Any]], outputs: Sequence[NDArray[Any]]) -> int:
    """Counts the bytes a pass reads and writes, an output of another dtype like an input."""
    return inputs[0].nbytes * (len(inputs) + len(outputs))


def as_words(
    rows: Sequence[Sequence[int]], divisor: float, program: array[Any], *, is_shared: bool
) -> array[int]:
    """Encodes a header and rows as a kernel reads them; the program must live as long as the result."""
    (divisor_word,) = struct.unpack("q", struct.pack("d", divisor))
    words = [len(rows), 0, is_shared, divisor_word, *program.buffer_info(), 0]
    for row in rows:
        words += row
    return array("q", words)


class WorkList:
    """Rows that several threads take one by one, by counting up one number.

    There may be two lists of rows, of about half of the elements each, with a number for each. It holds the
    tasks, so addresses stay valid for as long as the list lives.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        divisor: float = 1.0,
        program: array[Any] = NO_PROGRAM,
        *,
        range_bytes: int,
        is_shared: bool = False,
        is_streamed: bool = False,
        may_leave_pieces: bool = False,
        has_two_lists: bool = False,
    ) -> None:
        self._tasks, self._program, self._is_shared = tasks, program, is_shared
        range_bytes = limited_range_bytes(range_bytes)
        rows: list[list[int]] = []
        for inputs, outputs in tasks:
            places = (
                id(inputs) + TUPLE_HEADER_BYTES,
                len(inputs),
                id(outputs) + TUPLE_HEADER_BYTES,
                len(outputs),
            )
            for start, stop in ranges_of(inputs[0].size, traffic_bytes(inputs, outputs) // range_bytes):
                rows.append([*places, start, stop, is_streamed, 0])
        self.rows, self.num_rows = rows, len(rows)
        self._leftovers = NO_LEFTOVERS * (self.num_rows * may_leave_pieces)
        for number in range(self.num_rows * may_leave_pieces):
            rows[number][-1] = self._leftovers.buffer_info()[0] + number * LEFTOVER_WORDS * WORD_BYTES
        parts = halves(rows) if has_two_lists else (rows,)
        self._lists = [as_words(part, divisor, program, is_shared=is_shared) for part in parts]
        self.places = [words.buffer_info()[0] for words in self._lists]

    def restart(self) -> None:
        """Makes all rows available again."""
        for words in self._lists:
            words[1], words[2] = 0, self._is_shared

    def pieces_left(self) -> Sequence[tuple[Task, Pieces]]:
        """Returns the pieces a kernel left because it was uncertain; their inputs are unchanged."""
        if not any(words[LEFT_WORD] for words in self._lists):
            return ()
        for words in self._lists:
            words[LEFT_WORD] = 0
        return list(self._pieces())

    def _pieces(self) -> Iterator[tuple[Task, Pieces]]:
        tasks = {id(inputs) + TUPLE_HEADER_BYTES: (inputs, outputs) for inputs, outputs in self._tasks}
        for number, left in enumerate(self._leftovers[::LEFTOVER_WORDS]):
            if left:
                inputs_place, *_, stop, _, _ = self.rows[number]
                leftovers = self._leftovers[number * LEFTOVER_WORDS : (number + 1) * LEFTOVER_WORDS]
                yield tasks[inputs_place], pieces_in(leftovers, stop)


def limited_range_bytes(traffic: int) -> int:
    """Limits the traffic of a row to the useful bounds."""
    return min(max(traffic, SMALLEST_RANGE_BYTES), LARGEST_RANGE_BYTES)


def pieces_in(leftovers: array[int], stop: int) -> Pieces:
    """Returns what a kernel that stopped at `stop` left: some short pieces, and everything behind."""
    number, gave_up, *bounds = leftovers
    pieces = [(start, start + length) for start, length in zip(bounds[::2], bounds[1::2], strict=True)]
    return pieces[:number] + ([(gave_up, stop)] if gave_up >= 0 else [])


def ranges_of(size: int, number: int) -> Iterator[tuple[int, int]]:
    """Splits `size` elements into about `number` ranges, at least one unless there is nothing."""
    step = -(-size // (max(number, 1) * RANGE_ELEMENTS)) * RANGE_ELEMENTS
    return ((start, min(start + step, size)) for start in range(0, size, max(step, 1)))


def halves(rows: Sequence[list[int]]) -> tuple[Sequence[list[int]], Sequence[list[int]]]:
    """Splits rows at the middle of all their elements."""
    ends = list(itertools.accumulate(stop - start for *_, start, stop, _, _ in rows))
    middle = bisect.bisect(ends, ends[-1] // 2)
    return rows[:middle], rows[middle:]
