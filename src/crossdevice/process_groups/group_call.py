"""One call that all ranks of a group make together: exchanges of bytes, each with tags of its own."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from crossdevice.errors import ProcessGroupError
from crossdevice.process_groups.protocol import Begin, Message, Started, Waited
from crossdevice.process_groups.shared.shared_exchange import SharedExchange

if TYPE_CHECKING:
    from crossdevice.process_groups.group import ProcessGroup


POLLED_BYTES = 64 << 10
"""Up to here the calling thread asks a polled engine itself: to switch threads would take longer."""


class Hops(Protocol):
    """An observer of the messages of a call."""

    def note_sent(self, messages: Sequence[Message]) -> None:
        """Reports messages before they are handed over."""

    def note_received(self, messages: Sequence[Message]) -> None:
        """Reports messages that have arrived."""


class GroupCall:
    """One call that all ranks make together: exchanges of bytes, each with tags of its own."""

    num_exchanges = 0
    has_heard = False
    """True if a message has come from another rank, which then makes the same call."""
    _waited: Waited | None = None
    hops: Hops | None = None
    """Told of all messages, if the call is verified."""
    _awaited: Sequence[Message] = ()

    def __init__(
        self, group: ProcessGroup, number: int, what: str, signature: bytes, timeout_seconds: float
    ) -> None:
        self.group = group
        self.number = number
        self.what = what
        self.signature = signature
        self.timeout_seconds = timeout_seconds
        self.began = time.monotonic()

    def seconds_left(self) -> float:
        """Returns the seconds until the deadline."""
        return self.began + self.timeout_seconds - time.monotonic()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Sends and receives all at once.

        Ranks with calls of another number or signature use other tags: they wait for each other until one
        of them says so, and never take each other's bytes.
        """
        self.start_exchange(sends, receives)
        self.wait()

    def start_exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Begins an exchange: its memory must not change until `wait`, which is the next call."""
        self.num_exchanges += 1
        self._begin(sends, receives)

    def _begin(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        if self.hops is not None:
            self.hops.note_sent(sends)
            self._awaited = receives
        shared, place = self.group.shared, (self.number, self.num_exchanges, self.signature)
        if shared is not None:
            # All ranks take part in every step, so all have heard of all.
            self.has_heard = True
            self.group._check_whole(self)
            self._waited = SharedExchange(shared, self.group.size, place, sends, receives)
            return
        # Not by what goes which way: all ranks must come to the same, wherever they are.
        self.has_heard |= any(message.memory.size for message in receives)
        hosts = self.group.hosts
        if hosts is None:
            self._waited = self._over_engine(sends, receives)
            return
        waited = self._over_engine(hosts.beyond(sends), hosts.beyond(receives))
        self._waited = hosts.exchange(place, sends, receives, self.group._engine, waited)

    def _over_engine(self, sends: Sequence[Message], receives: Sequence[Message]) -> Waited | None:
        """Begins the engine's part, if there is one."""
        key = b"%d %d " % (self.number, self.num_exchanges) + self.signature
        digest = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little")
        tag = digest % (self.group._engine.largest_tag + 1)
        # Both sides know which are empty: these are not sent.
        going = [each for each in sends if each.memory.size]
        coming = [each for each in receives if each.memory.size]
        if not going and not coming:
            return None
        begin: Begin | None = getattr(self.group._engine, "begin", None)
        if begin is not None and sum([each.memory.nbytes for each in (*going, *coming)]) <= POLLED_BYTES:
            self.group._check_whole(self)
            return begin(going, coming, tag)
        exchange = self.group._engine.exchange
        return self.group._carry(self, lambda seconds: exchange(going, coming, tag, seconds))

    def wait(self) -> None:
        """Waits for the exchange in progress, if any."""
        if self._waited is not None:
            self.group._wait(self, self._waited)
            self._waited = None
        if self.hops is not None:
            self.hops.note_received(self._awaited)
            self._awaited = ()

    def step(self, numbers: Sequence[int] = ()) -> None:
        """Waits until all ranks are here, and can see the others' writes to shared memory."""
        group, shared = self.group, self.group.shared
        assert shared is not None
        self.num_exchanges += 1
        self.has_heard = True
        if group._broken is not None:
            group._check_whole(self)
        steps = shared.steps
        if not steps.come(self.number, self.num_exchanges, self.signature, numbers):
            group._wait(self, steps)

    def all_reduce(self, array: Any, device_type: str, op: str) -> None:
        """Runs the engine's all-reduce of an array in place, on a device it `reduces_on`."""
        self._run(self.group._engine.device_collectives[device_type].all_reduce_of(array, op))

    def all_to_all(self, output: Any, array: Any, device_type: str) -> None:
        """Runs the engine's all-to-all of equal parts, in the same places."""
        self._run(self.group._engine.device_collectives[device_type].all_to_all_of(output, array))

    def all_gather_arrays(self, output: Any, array: Any, device_type: str) -> None:
        """Runs the engine's all-gather of arrays of one length, in the same places."""
        self._run(self.group._engine.device_collectives[device_type].all_gather_of(output, array))

    def _run(self, collective: Started) -> None:
        self.num_exchanges += 1
        self.has_heard = True
        self._waited = self.group._carry(self, collective)
        self.wait()

    def all_gather(self, record: bytes) -> list[bytes]:
        """Gathers every rank's record, all of one length."""
        return self.all_gather_of(record, [len(record)] * self.group.size)

    def all_gather_of(self, record: bytes, lengths: Sequence[int]) -> list[bytes]:
        """Gathers every rank's record, of lengths that all ranks know."""
        return self._gathered(record, [np.empty(length, np.uint8) for length in lengths])

    def all_gather_uneven(self, record: bytes) -> list[bytes]:
        """Gathers every rank's record, of any lengths."""
        lengths = self.all_gather(len(record).to_bytes(8, "little"))
        buffers = [
            receive_buffer(member, [int.from_bytes(length, "little")], np.uint8)
            for member, length in zip(self.group.members, lengths, strict=True)
        ]
        return self._gathered(record, buffers)

    def _gathered(self, record: bytes, buffers: list[NDArray[np.uint8]]) -> list[bytes]:
        buffers[self.group.rank] = np.frombuffer(record, np.uint8)
        self.all_gather_into([[buffer] for buffer in buffers])
        return [buffer.tobytes() for buffer in buffers]

    def all_gather_into(self, parts: Sequence[Sequence[NDArray[Any]]]) -> None:
        """Fills in the arrays of all other ranks; `parts` has those of every rank, and this one's are full.

        What is for several ranks of another host is sent to one of them, who passes it on.
        """
        rank, hosts = self.group.rank, self.group.hosts
        if hosts is None:
            others = self.others()
            self.exchange(
                [Message(peer, array) for peer in others for array in parts[rank]],
                [Message(peer, array) for peer in others for array in parts[peer]],
            )
            return
        self.num_exchanges += 1  # of both rounds: ranks that are in different ones are at the same exchange
        for sends, receives in hosts.all_gather_rounds:
            self._begin(
                [Message(peer, array) for peer, whose in sends for array in parts[whose]],
                [Message(peer, array) for peer, whose in receives for array in parts[whose]],
            )
            self.wait()

    def meet(self) -> None:
        """Ends a call without messages from others, which may be making another one.

        It is in its first exchange once more, where the others would be, so that their notes are compared.
        """
        self.num_exchanges = 0
        self.all_gather(b"!")

    def others(self) -> list[int]:
        """Lists the other ranks, the next one first, so that not all of them start with the same."""
        rank, size = self.group.rank, self.group.size
        return [(rank + step) % size for step in range(1, size)]


def receive_buffer(sender: str, shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
    """Allocates an array for data that a rank, named in errors, has announced."""
    check_announced(sender, shape, np.dtype(dtype).itemsize)
    try:
        return np.empty(tuple(shape), dtype)
    except MemoryError:
        raise _implausible(sender, shape, np.dtype(dtype).itemsize) from None


def check_announced(sender: str, shape: Sequence[int], item_bytes: int) -> None:
    """Rejects implausible sizes that a rank has announced, before anything is allocated."""
    if min(shape, default=0) < 0 or math.prod(map(int, shape)) * item_bytes > _memory_bytes():
        raise _implausible(sender, shape, item_bytes)


def _implausible(sender: str, shape: Sequence[int], item_bytes: int) -> ProcessGroupError:
    sizes = tuple(map(int, shape))
    return ProcessGroupError(
        f"{sender} says that it sends an array of shape {sizes}, {math.prod(sizes) * item_bytes} bytes, for "
        f"which there is no memory: this host has {_memory_bytes()} bytes. Unless it brings as much, its "
        "message was corrupted"
    )


@functools.cache
def _memory_bytes() -> int:
    """Returns the machine's memory, or a very large number where it is unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 1 << 62
