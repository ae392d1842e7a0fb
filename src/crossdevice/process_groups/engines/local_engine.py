"""Groups of processes of one host on nothing but Unix sockets, in a folder that is theirs alone.

Notes lie in that folder, too: a rank that dies takes none of them with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.errors import OptionError
from crossdevice.process_groups.engines.local_meeting import (
    HEADER,
    Connection,
    Meeting,
    is_present,
    make_private,
)
from crossdevice.process_groups.group import TIMEOUT_SECONDS, Checks, ProcessGroup
from crossdevice.process_groups.protocol import DeviceCollectives, Message, RankLostError
from crossdevice.values.launchers import Launch

SPIN_SECONDS = 0.0001
"""Time that a wait polls before it sleeps: a wake-up takes some 50 us."""

MAX_PARTS = 64
"""Number of arrays that go into one system call."""


def form_group(
    rank: int,
    size: int,
    folder: str | Path,
    *,
    name: str = "",
    timeout_seconds: float = TIMEOUT_SECONDS,
    checks: Checks = "new",
    shared_memory: bool | None = None,
) -> ProcessGroup:
    """Forms a group of the processes of this host that use one folder and name, each with its rank.

    The n-th group that a rank forms is made with the n-th of the others, so a group that broke can be formed
    again.

    Args:
        folder: where they meet; it is made, and must be of this user alone.
        name: tells apart groups that are formed at the same time.
        timeout_seconds: for forming the group, and then for each of its calls.
        shared_memory: as of ProcessGroup.
    """
    engine = LocalEngine(Path(folder), rank, size, name=name, timeout_seconds=timeout_seconds)
    return ProcessGroup(engine, timeout_seconds=timeout_seconds, checks=checks, shared_memory=shared_memory)


def form_in_cluster(cluster: Launch, *, name: str, timeout_seconds: float) -> LocalEngine:
    """Returns the engine of this process of a launch, in its folder or one named by address and port."""
    # Ranks of `crossdevice run` are on one host: they meet, and hear there of another WORLD_SIZE.
    if cluster.folder is None and cluster.local_size not in (None, cluster.size):
        raise OptionError(
            f"Unix sockets reach processes of one host only; recognised {cluster.recognised}. "
            'Between hosts there are engine="torch" and engine="mpi"'
        )
    if cluster.folder is not None:
        folder = Path(cluster.folder)
    elif cluster.address is None or cluster.port is None:
        raise OptionError(
            "ranks meet in the folder of `crossdevice run`, or in one named after an address and port: set "
            f"MASTER_ADDR and MASTER_PORT; recognised {cluster.recognised}"
        )
    else:
        launch = f"{cluster.address}:{cluster.port} {cluster.restart}".encode()
        parent = Path(tempfile.gettempdir(), f"crossdevice-{os.geteuid()}")
        make_private(parent)
        folder = parent / hashlib.blake2b(launch, digest_size=8).hexdigest()
    return LocalEngine(
        folder,
        cluster.rank,
        cluster.size,
        name=name,
        timeout_seconds=timeout_seconds,
        keeps_folder=cluster.folder is not None,
    )


class LocalEngine:
    """One rank on Unix sockets, connected to all others; its notes are files."""

    name = "Unix sockets"
    board_keeper: int | None = None
    largest_tag = (1 << 31) - 1
    device_collectives: Mapping[str, DeviceCollectives] = MappingProxyType({})

    def __init__(
        self,
        folder: Path,
        rank: int,
        size: int,
        *,
        name: str = "",
        timeout_seconds: float = TIMEOUT_SECONDS,
        keeps_folder: bool = True,
    ) -> None:
        if not 0 <= rank < size:
            raise OptionError(f"a rank is a number from 0 to size - 1; got rank {rank} of {size}")
        self.rank, self.size = rank, size
        meeting = Meeting(folder, name, rank, size, timeout_seconds)
        self._connections = meeting.hold()
        self._folder = None if keeps_folder else folder
        self._note_of, self._presence_of = meeting.note_of, meeting.presence_of
        self._begun: _Messages | None = None

    @property
    def awaited_ranks(self) -> Collection[int]:
        """The ranks with messages still to come."""
        begun = self._begun
        return [] if begun is None else begun.awaited_ranks

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int, timeout_seconds: float
    ) -> None:
        """Exchanges all messages at once, as far as sockets are ready."""
        if not self.begin(sends, receives, tag).wait(timeout_seconds):
            raise TimeoutError(f"no answer in {timeout_seconds:g} seconds")

    def begin(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> _Messages:
        """Begins an exchange that the caller waits for."""
        self._begun = _Messages(self._connections, sends, receives, tag)
        return self._begun

    def post(self, note: str) -> None:
        """Writes a file that replaces the last one atomically."""
        path = self._note_of(self.rank)
        part = path.with_name(f"{path.name}.part")
        part.write_text(note)
        part.replace(path)

    def notes(self) -> Mapping[int, str]:
        """Returns the notes that exist."""
        found = {}
        for rank in range(self.size):
            with contextlib.suppress(FileNotFoundError):
                found[rank] = self._note_of(rank).read_text()
        return found

    def check_contact(self, silent: Collection[int]) -> None:
        """Does nothing: the exchange itself notices connections that have ended."""

    def gone_ranks(self) -> Collection[int]:
        """Returns the ranks with ended connections, whether or not a message is awaited."""
        return [rank for rank, connection in list(self._connections.items()) if connection.has_ended()]

    def abandon(self) -> None:
        """Hangs up: unfinished messages end with an error at the other end; those sent before arrive."""
        for connection in list(self._connections.values()):
            connection.shut()
        self._presence_of(self.rank).unlink(missing_ok=True)  # this process may form another group here

    def close(self) -> None:
        """Hangs up; the last rank removes the notes, which others may still read."""
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.shut()
        if not connections:
            return
        self._presence_of(self.rank).unlink(missing_ok=True)
        if not any(is_present(self._presence_of(rank)) for rank in range(self.size)):
            for rank in range(self.size):
                self._note_of(rank).unlink(missing_ok=True)
                self._presence_of(rank).unlink(missing_ok=True)
            if self._folder is not None:
                with contextlib.suppress(OSError):  # another group meets there
                    self._folder.rmdir()


class _Going:
    """The unsent part of messages to a rank."""

    def __init__(self) -> None:
        self.parts: list[memoryview] = []

    def send(self, connection: Connection) -> None:
        """Sends as much as the socket takes."""
        while self.parts:
            try:
                length = connection.socket.sendmsg(self.parts[:MAX_PARTS])
            except BlockingIOError:
                return
            while length:
                part = self.parts[0]
                if length < part.nbytes:
                    self.parts[0] = part[length:]
                    break
                length -= part.nbytes
                del self.parts[0]


class _Coming:
    """The missing part of messages from a rank."""

    def __init__(self) -> None:
        self.parts: list[memoryview] = []
        self.is_other = False
        """True if the rank's next message has another tag: it makes another call, described by its note."""
        self._is_inside = False

    def receive(self, connection: Connection, tag: int) -> None:
        """Receives what has come of messages of this tag."""
        while self.parts and not self.is_other:
            memory = self.parts[0]
            if not self._is_inside:
                found = connection.header()
                if found is None:
                    return
                if found[0] != tag:
                    self.is_other = True
                    return
                if found[1] != memory.nbytes:
                    raise RuntimeError(f"{found[1]} bytes came where {memory.nbytes} were to come")
                connection.skip_header()
                self._is_inside = True
            length = connection.read_into(memory)
            if not length:
                return
            if length < memory.nbytes:
                self.parts[0] = memory[length:]
            else:
                del self.parts[0]
                self._is_inside = False


class _Messages:
    """The messages of one exchange; waiting advances them."""

    def __init__(
        self,
        connections: Mapping[int, Connection],
        sends: Sequence[Message],
        receives: Sequence[Message],
        tag: int,
    ) -> None:
        self._connections = connections
        self._tag = tag
        self._going: dict[int, _Going] = {}
        self._coming: dict[int, _Coming] = {}
        for peer, memory in sends:
            flat = _bytes(memory)
            if flat.nbytes:
                parts = self._going.setdefault(peer, _Going()).parts
                parts += [memoryview(HEADER.pack(tag, flat.nbytes)), flat]
        for peer, memory in receives:
            flat = _bytes(memory)
            if flat.nbytes:
                self._coming.setdefault(peer, _Coming()).parts.append(flat)
        self._error: RankLostError | None = None
        with contextlib.suppress(RankLostError):  # raised where it is waited for
            self._go_on()

    @property
    def awaited_ranks(self) -> Collection[int]:
        """The ranks with messages still to come."""
        return list(self._coming)

    def wait(self, seconds: float) -> bool:
        """Waits for at most a number of seconds; returns whether all messages are sent and received."""
        if self._error is not None:
            raise self._error
        now = time.monotonic()
        end, spin_end = now + seconds, now + SPIN_SECONDS
        while self._going or self._coming:
            now = time.monotonic()
            if now >= end:
                return False
            if now >= spin_end:
                self._sleep(end - now)
            self._go_on()
        return True

    def result(self) -> None:
        """Returns when the exchange has ended; raises its error."""

    def _go_on(self) -> None:
        peer = -1
        try:
            for peer, going in list(self._going.items()):
                going.send(self._connections[peer])
                if not going.parts:
                    del self._going[peer]
            for peer, coming in list(self._coming.items()):
                coming.receive(self._connections[peer], self._tag)
                if not coming.parts:
                    del self._coming[peer]
        except (OSError, KeyError) as error:  # or the group was closed
            self._error = RankLostError(peer, str(error))
            raise self._error from None

    def _sleep(self, seconds: float) -> None:
        asked, others = select.poll(), {}
        for peer in {*self._going, *self._coming}:
            connection, coming = self._connections.get(peer), self._coming.get(peer)
            if connection is None:
                return
            is_other = coming is not None and coming.is_other
            events = select.POLLIN * (coming is not None and not is_other)
            asked.register(connection.socket, events | select.POLLOUT * (peer in self._going))
            if is_other:
                others[connection.socket.fileno()] = peer
        for descriptor, events in asked.poll(seconds * 1000):
            if events & select.POLLHUP and descriptor in others:
                raise RankLostError(others[descriptor], "it has closed its connection")


def _bytes(memory: NDArray[Any]) -> memoryview:
    flat: Any = memory.reshape(-1).view(np.uint8)
    return memoryview(flat)
