"""Ranks as threads of one process, for tests: everything but the processes is real."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.errors import OptionError
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.protocol import DeviceCollectives, Message
from crossdevice.values.launchers import Launch


class Mailboxes:
    """Messages and notes of the ranks of one thread group."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.mail: dict[tuple[int, int, int], deque[NDArray[np.uint8]]] = {}
        self.notes: dict[int, str] = {}


class ThreadEngine:
    """One rank. Bytes are copied, so that no rank sees another's memory change."""

    name = "threads"
    board_keeper: int | None = None
    largest_tag = (1 << 31) - 1
    awaited_ranks: Collection[int] = ()
    device_collectives: Mapping[str, DeviceCollectives] = MappingProxyType({})

    def __init__(self, boxes: Mailboxes, rank: int) -> None:
        self._boxes = boxes
        self.rank = rank
        self.size = boxes.size

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int, timeout_seconds: float
    ) -> None:
        """Leaves copies of what is sent, and waits for messages."""
        boxes, end = self._boxes, time.monotonic() + timeout_seconds
        with boxes.changed:
            for peer, memory in sends:
                left = boxes.mail.setdefault((self.rank, peer, tag), deque())
                left.append(memory.reshape(-1).view(np.uint8).copy())
            boxes.changed.notify_all()
            for peer, memory in receives:
                mail = boxes.mail.setdefault((peer, self.rank, tag), deque())
                while not mail:
                    if not boxes.changed.wait(end - time.monotonic()):
                        raise TimeoutError(f"nothing came from rank {peer}")
                memory.reshape(-1).view(np.uint8)[:] = mail.popleft()
            # Each exchange has a tag of its own, so a box that is empty now is never used again.
            for key in [key for key, mail in boxes.mail.items() if not mail]:
                if key[1] == self.rank:
                    del boxes.mail[key]

    def post(self, note: str) -> None:
        """Puts up this rank's note."""
        with self._boxes.changed:
            self._boxes.notes[self.rank] = note
            self._boxes.changed.notify_all()

    def notes(self) -> Mapping[int, str]:
        """Returns all current notes."""
        return dict(self._boxes.notes)

    def check_contact(self, silent: Collection[int]) -> None:
        """Does nothing: threads of one process end together."""

    def abandon(self) -> None:
        """Does nothing: waiting threads go on until their deadlines."""

    def close(self) -> None:
        """Does nothing: there are no resources."""


def form_in_cluster(cluster: Launch, *, name: str, timeout_seconds: float) -> ThreadEngine:  # noqa: ARG001
    """Returns the engine of a single process."""
    if cluster.size > 1:
        raise OptionError(f"threads reach no other processes; recognised {cluster.recognised}")
    return ThreadEngine(Mailboxes(1), 0)


def run_ranks(size: int, function: Callable[[ProcessGroup], Any], **options: Any) -> list[Any]:
    """Calls `function(group)` as each rank of a group of threads, and returns their results in order.

    Args:
        options: those of ProcessGroup.

    Raises:
        The exception of the lowest rank that raised one, once all have ended.

    >>> run_ranks(3, lambda group: group.rank)
    [0, 1, 2]
    """
    boxes = Mailboxes(size)
    results: list[Any] = [None] * size
    errors: dict[int, BaseException] = {}

    def be(rank: int) -> None:
        try:
            with ProcessGroup(ThreadEngine(boxes, rank), **options) as group:
                results[rank] = function(group)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=be, args=(rank,), name=f"rank {rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in sorted(errors):
        raise errors[rank]
    return results
