"""An exchange of messages between ranks of one host, through their windows of shared memory."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from crossdevice.process_groups.protocol import Message
from crossdevice.process_groups.shared.shared_arrays import Bytes
from crossdevice.process_groups.shared.shared_memory import WINDOW_BYTES, SharedMemory

LINE_BYTES = 64


class SharedExchange:
    """All messages of one exchange, in as many steps as the rank with most to send needs.

    In each step a rank puts the next part of what it sends into its window, once if several ranks get the
    same, and says where in it each of them finds its part.
    """

    def __init__(
        self,
        shared: SharedMemory,
        size: int,
        key: tuple[int, int, bytes],
        sends: Sequence[Message],
        receives: Sequence[Message],
    ) -> None:
        """`key` has the numbers of the call and the exchange, and the signature."""
        self._shared, self._size, self._key = shared, size, key
        streams: dict[tuple[tuple[int, int], ...], _Stream] = {}
        self._going = {
            peer: streams.setdefault(tuple(map(_place, parts)), _Stream(parts))
            for peer, parts in _by_peer(sends).items()
        }
        self._streams = list(streams.values())
        self._coming = {peer: _Stream(parts) for peer, parts in _by_peer(receives).items()}
        self._is_done = False
        self._post()

    def wait(self, seconds: float) -> bool:
        """Waits for at most a number of seconds; returns whether everything has come."""
        end = time.monotonic() + seconds
        while not self._is_done:
            steps = self._shared.steps
            if not steps.have_soon_come() and not steps.wait(max(end - time.monotonic(), 0.0)):
                return False
            self._take()
        return True

    def result(self) -> None:
        """Does nothing: a shared exchange has no errors."""

    @property
    def awaited_ranks(self) -> Collection[int]:
        """The ranks that have not come to the current step."""
        return self._shared.steps.awaited_ranks

    def check_contact(self, silent: Collection[int]) -> None:
        """Raises RankLostError if a rank that is waited for is gone."""
        self._shared.steps.check_contact(silent)

    def _post(self) -> None:
        steps = self._shared.steps
        window = self._shared.brought[steps.parity][self._shared.rank]
        share = WINDOW_BYTES // max(len(self._streams), 1) // LINE_BYTES * LINE_BYTES
        places: dict[int, tuple[int, int]] = {}
        for number, stream in enumerate(self._streams):
            start = number * share
            length = stream.copy_to(window[start : start + share])
            places[id(stream)] = (start, length)
            if self._shared.on_shown is not None:
                self._shared.on_shown(window[start : start + length])
        table = [0, 0] * self._size
        for peer, stream in self._going.items():
            table[2 * peer : 2 * peer + 2] = places[id(stream)]
        has_more = any(stream.num_left for stream in self._streams)
        steps.post(*self._key, [int(has_more), *table])

    def _take(self) -> None:
        """Copies what has come in a step, and begins the next one if any rank has more to send."""
        steps = self._shared.steps
        windows = self._shared.brought[steps.number & 1]
        for peer, stream in self._coming.items():
            start, length = steps.numbers_of(peer, 1 + 2 * self._shared.rank, 2)
            stream.copy_from(windows[peer][start : start + length])
        if any(steps.numbers_of(rank, 0, 1)[0] for rank in range(self._size)):
            self._post()
            return
        for peer, stream in self._coming.items():
            if stream.num_left:
                raise RuntimeError(f"{stream.num_left} bytes of rank {peer} were to come, and did not")
        self._is_done = True


class _Stream:
    """Pieces of memory, one after the other, that are read or written bit by bit."""

    def __init__(self, parts: Sequence[Bytes]) -> None:
        self._parts = [part for part in parts if part.size]
        self.num_left = sum(part.size for part in self._parts)

    def copy_to(self, buffer: Bytes) -> int:
        """Copies the next bytes into the buffer, as many as fit; returns their number."""
        position = 0
        for part in self._next(buffer.size):
            buffer[position : position + part.size] = part
            position += part.size
        return position

    def copy_from(self, found: Bytes) -> None:
        """Copies from the buffer to the next memory."""
        if found.size > self.num_left:
            raise RuntimeError(f"{found.size} bytes came where {self.num_left} were left to come")
        position = 0
        for part in self._next(found.size):
            part[:] = found[position : position + part.size]
            position += part.size

    def _next(self, length: int) -> Iterator[Bytes]:
        while length and self._parts:
            part = self._parts[0][:length]
            rest = self._parts[0][length:]
            self._parts[:1] = [rest] if rest.size else []
            length -= part.size
            self.num_left -= part.size
            yield part


def _by_peer(messages: Sequence[Message]) -> dict[int, list[Bytes]]:
    found: dict[int, list[Bytes]] = {}
    for peer, memory in messages:
        found.setdefault(peer, []).append(memory.reshape(-1).view(np.uint8))
    return found


def _place(part: Bytes) -> tuple[int, int]:
    return part.__array_interface__["data"][0], part.size
