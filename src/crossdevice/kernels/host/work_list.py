"""Tasks cut into rows of work, laid out in memory so that kernels take them without asking Python."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from numpy.typing import NDArray

Arrays: TypeAlias = "tuple[NDArray[Any], ...]"
Task: TypeAlias = "tuple[Arrays, Arrays]"
"""Inputs and outputs."""

TUPLE_HEADER_BYTES = tuple.__basicsize__
"""What precedes the pointers to a tuple's items; kernels read them, as asking an array for its address takes 1 us."""

WORD_BYTES = 8

ROW_WORDS = 8
"""Inputs, how many, outputs, how many, first element, end, whether results bypass the cache, room for pieces left."""

MAX_PIECES_LEFT = 128
ROOM_WORDS = 2 + 2 * MAX_PIECES_LEFT
"""How many pieces are left, where the kernel gave up for want of room (-1: nowhere), start and length of each piece."""

RANGE_BYTES = 4 << 20
"""Traffic of one row of a large array: 0.2 ms, so that threads end together."""

RANGE_ELEMENTS = 256
"""Rows are multiples of that many elements, which are whole lines of any dtype."""


def traffic_bytes(inputs: Arrays, outputs: Arrays) -> int:
    """What a pass reads and writes, an output of another dtype counted like an input."""
    return inputs[0].nbytes * (len(inputs) + len(outputs))


class WorkList:
    """Rows that several threads take one by one, by counting up one number.

    It holds the tasks, so addresses stay valid for as long as the list lives.
    """

    def __init__(self, tasks: Sequence[Task], *, is_streamed: bool, may_leave_pieces: bool) -> None:
        self._tasks = tasks
        words: list[int] = []
        for inputs, outputs in tasks:
            places = id(inputs) + TUPLE_HEADER_BYTES, len(inputs), id(outputs) + TUPLE_HEADER_BYTES, len(outputs)
            for start, stop in _ranges(inputs[0].size, traffic_bytes(inputs, outputs)):
                words += (*places, start, stop, is_streamed, 0)
        self.num_rows = len(words) // ROW_WORDS
        self._rooms = array("q", [0, -1, *([0] * 2 * MAX_PIECES_LEFT)]) * (self.num_rows * may_leave_pieces)
        if may_leave_pieces:
            first = self._rooms.buffer_info()[0]
            step = ROOM_WORDS * WORD_BYTES
            words[ROW_WORDS - 1 :: ROW_WORDS] = range(first, first + self.num_rows * step, step)
        self._rows = array("q", words)
        self._counter = array("q", [0])

    @property
    def place(self) -> tuple[int, int, int]:
        """The address of the rows, their number, and the address of the counter."""
        return self._rows.buffer_info()[0], self.num_rows, self._counter.buffer_info()[0]

    def pieces_left(self) -> Iterator[tuple[Task, list[tuple[int, int]]]]:
        """What the kernel was not certain of, and did not write: the inputs there are still what they were.

        Each is a task and ranges of its elements: some short ones together, or a long one alone.
        """
        tasks = {id(inputs) + TUPLE_HEADER_BYTES: (inputs, outputs) for inputs, outputs in self._tasks}
        for row, number in enumerate(self._rooms[::ROOM_WORDS]):
            if number == 0:
                continue
            _, gave_up, *bounds = self._rooms[row * ROOM_WORDS : (row + 1) * ROOM_WORDS]
            inputs_place, *_, stop, _, _ = self._rows[row * ROW_WORDS : (row + 1) * ROW_WORDS]
            pieces = [(start, start + length) for start, length in zip(bounds[::2], bounds[1::2], strict=True)]
            yield tasks[inputs_place], pieces[:number]
            if gave_up >= 0:
                yield tasks[inputs_place], [(gave_up, stop)]


def _ranges(size: int, traffic: int) -> Iterator[tuple[int, int]]:
    num_ranges = max(1, traffic // RANGE_BYTES)
    step = -(-size // (num_ranges * RANGE_ELEMENTS)) * RANGE_ELEMENTS
    return ((start, min(start + step, size)) for start in range(0, size, max(step, 1)))
