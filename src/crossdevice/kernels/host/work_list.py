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
"""What precedes the pointers to a tuple's items; kernels read them, as asking each array costs 1 us."""

WORD_BYTES = 8

ROW_WORDS = 8
"""Inputs, how many, outputs, how many, start, stop, whether results bypass the cache, room for pieces."""

MAX_PIECES_LEFT = 128
ROOM_WORDS = 2 + 2 * MAX_PIECES_LEFT
"""How many pieces are left, where the kernel gave up for want of room (-1: nowhere), starts and lengths."""

EMPTY_ROOM = array("q", [0, -1, *([0] * 2 * MAX_PIECES_LEFT)])

MANY_INPUTS, BLOCK_INPUTS = 9, 8
"""From so many inputs on, kernels read so many at a time."""

SCRATCH_BYTES = 1 << 18
"""The accumulators of the elements over which they do: they stay in a second-level cache."""

Pieces: TypeAlias = "list[tuple[int, int]]"
"""Ranges of elements, from start to stop."""

SMALLEST_RANGE_BYTES, LARGEST_RANGE_BYTES = 1 << 19, 4 << 20
"""Traffic of one row of a large array: worth the taking, and at most 0.2 ms, so that threads end together."""

RANGE_ELEMENTS = 256
"""Rows are multiples of that many elements, which are whole lines of any dtype."""


def traffic_bytes(inputs: Arrays, outputs: Arrays) -> int:
    """What a pass reads and writes, an output of another dtype counted like an input."""
    return inputs[0].nbytes * (len(inputs) + len(outputs))


class WorkList:
    """Rows that several threads take one by one, by counting up one number.

    It holds the tasks, so addresses stay valid for as long as the list lives.
    """

    def __init__(
        self, tasks: Sequence[Task], *, range_bytes: int, is_streamed: bool, may_leave_pieces: bool
    ) -> None:
        self._tasks = tasks
        range_bytes = min(max(range_bytes, SMALLEST_RANGE_BYTES), LARGEST_RANGE_BYTES)
        words: list[int] = []
        for inputs, outputs in tasks:
            places = (
                id(inputs) + TUPLE_HEADER_BYTES,
                len(inputs),
                id(outputs) + TUPLE_HEADER_BYTES,
                len(outputs),
            )
            for start, stop in _ranges(inputs[0].size, traffic_bytes(inputs, outputs) // range_bytes):
                words += (*places, start, stop, is_streamed, 0)
        self.num_rows = len(words) // ROW_WORDS
        self._rooms = EMPTY_ROOM * (self.num_rows * may_leave_pieces)
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

    def restart(self) -> None:
        """All rows are there to be taken again."""
        self._counter[0] = 0
        if self._rooms:
            self._rooms[:] = EMPTY_ROOM * self.num_rows

    def pieces_left(self) -> Iterator[tuple[Task, Pieces]]:
        """What the kernel was not certain of, and did not write: inputs there are still what they were."""
        tasks = {id(inputs) + TUPLE_HEADER_BYTES: (inputs, outputs) for inputs, outputs in self._tasks}
        for row, number in enumerate(self._rooms[::ROOM_WORDS]):
            if number:
                inputs_place, *_, stop, _, _ = self._rows[row * ROW_WORDS : (row + 1) * ROW_WORDS]
                room = self._rooms[row * ROOM_WORDS : (row + 1) * ROOM_WORDS]
                yield tasks[inputs_place], pieces_in(room, stop)


def pieces_in(room: array[int], stop: int) -> Pieces:
    """What a kernel that worked up to `stop` has left: some short pieces, and all behind where it gave up."""
    number, gave_up, *bounds = room
    pieces = [(start, start + length) for start, length in zip(bounds[::2], bounds[1::2], strict=True)]
    return pieces[:number] + ([(gave_up, stop)] if gave_up >= 0 else [])


def _ranges(size: int, number: int) -> Iterator[tuple[int, int]]:
    """About `number` parts of `size` elements, at least one unless there is nothing."""
    step = -(-size // (max(number, 1) * RANGE_ELEMENTS)) * RANGE_ELEMENTS
    return ((start, min(start + step, size)) for start in range(0, size, max(step, 1)))
