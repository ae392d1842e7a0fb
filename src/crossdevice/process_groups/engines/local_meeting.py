"""Rendezvous of processes of one host: a folder in which each of them listens at a Unix socket."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import select
import socket
import stat
import struct
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from crossdevice.errors import DeadlineError, OptionError
from crossdevice.process_groups.notes.board import GRACE_SECONDS
from crossdevice.process_groups.notes.introduction import own_name
from crossdevice.values.disagreement import numbered

logger = logging.getLogger("crossdevice")

BUFFER_BYTES = 64 << 10
"""What is read at once of a connection, if it is not known to be of one array."""

SILENT_SECONDS = 10.0
"""How long ranks are waited for before that is said."""

STALE_SECONDS = 0.1
"""For so long nobody listens at a socket whose process is gone; one that has just made it does before."""

SMALLEST_PAUSE_SECONDS, LARGEST_PAUSE_SECONDS = 0.0005, 0.02

HEADER = struct.Struct("<qq")
"""Of a frame: its tag, and how many bytes follow."""

_HELLO, _REFUSED = -1, -2
"""Tags of frames between ranks that meet; those of messages are not negative."""

_HUNG_UP = select.POLLHUP | getattr(select, "POLLRDHUP", 0)

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_turns: dict[str, int] = {}
_places: dict[str, threading.Lock] = {}


def _close_in_child() -> None:
    """Else a forked process would keep connections open whose rank has died."""
    for each in list(_sockets):
        each.close()
    _places.clear()


os.register_at_fork(after_in_child=_close_in_child)


class _Forgotten(socket.socket):
    """A socket that is closed once nobody knows it any more: another thread may be asking about it."""

    def __del__(self) -> None:
        self.close()


class Connection:
    """A socket that does not block, with what was read of it and not yet taken.

    What comes are frames: a tag, a length, and so many bytes.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.socket = _Forgotten(fileno=connected.detach())
        self.socket.setblocking(False)
        _sockets.add(self.socket)
        self._bytes = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._end = 0

    def header(self) -> tuple[int, int] | None:
        """Tag and length of the next frame, which stays; None if it has not come."""
        while self._end - self._start < HEADER.size:
            if not self._fill():
                return None
        tag, length = HEADER.unpack_from(self._bytes, self._start)
        return tag, length

    def skip_header(self) -> None:
        """Goes on to what the frame holds."""
        self._start += HEADER.size

    def read_into(self, memory: memoryview) -> int:
        """Fills in some of the memory; returns how much, 0 if nothing has come."""
        waiting = self._end - self._start
        if not waiting and memory.nbytes < BUFFER_BYTES:
            self._fill()
            waiting = self._end - self._start
        if waiting:
            length = min(waiting, memory.nbytes)
            memory[:length] = self._bytes[self._start : self._start + length]
            self._start += length
            return length
        return self._received(memory)

    def frame(self) -> tuple[int, bytes] | None:
        """The next frame, taken if all of it has come; one that fits the buffer."""
        found = self.header()
        if found is None:
            return None
        tag, length = found
        if length > BUFFER_BYTES - HEADER.size:
            raise ConnectionError(f"{length} bytes came from a stranger")
        while self._end - self._start < HEADER.size + length:
            if not self._fill():
                return None
        start = self._start + HEADER.size
        self._start = start + length
        return tag, bytes(self._bytes[start : self._start])

    def send_frame(self, tag: int, payload: bytes) -> None:
        """A small one, for which an empty socket has room."""
        self.socket.send(HEADER.pack(tag, len(payload)) + payload)

    def has_ended(self) -> bool:
        """True once the other side has hung up, though what it has sent may not have been read."""
        asked = select.poll()
        asked.register(self.socket, _HUNG_UP)
        return bool(asked.poll(0))

    def shut(self) -> None:
        """Nothing more is sent, or read either; whoever waits is woken."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def _fill(self) -> bool:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._bytes):
            left = bytes(self._bytes[self._start : self._end])
            self._bytes[: len(left)] = left
            self._start, self._end = 0, len(left)
        length = self._received(self._bytes[self._end :])
        self._end += length
        return length > 0

    def _received(self, memory: memoryview) -> int:
        try:
            length = self.socket.recv_into(memory)
        except BlockingIOError:
            return 0
        if not length:
            raise ConnectionError("it has closed its connection")
        return length


class _Hello(NamedTuple):
    """The greeting of ranks that meet."""

    rank: int
    size: int
    turn: int
    """How many groups it has formed here; the lower ones were given up."""
    who: str


class _RefusedError(Exception):
    """Reason ranks that have met cannot form a group."""


class Meeting:
    """The ranks that form one group: each listens, and connects to all lower ones."""

    def __init__(self, folder: Path, name: str, rank: int, size: int, seconds: float) -> None:
        self._folder, self._rank, self._size, self._seconds = folder, rank, size, seconds
        self._end = time.monotonic() + seconds
        self._key = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
        self._path = self._path_of(rank)
        self._turn = _turns.get(str(self._path), 0)
        self._peers: dict[int, Connection] = {}
        self._heard: list[Connection] = []  # from whom a hello has to come
        self._called: dict[int, Connection] = {}  # of these, the lower ranks

    def note_of(self, rank: int) -> Path:
        """Returns the file of a rank's notes for this group."""
        return self._folder / f"{self._key}.{self._turn}-{rank}"

    def presence_of(self, rank: int) -> Path:
        """Returns the file that exists while a rank is in this group, with the name of its process."""
        return self._folder / f"{self._key}.{self._turn}-{rank}.at"

    def hold(self) -> dict[int, Connection]:
        """Waits for all ranks, and returns the connections to the others."""
        make_private(self._folder)
        place = _places.setdefault(str(self._path), threading.Lock())
        if not place.acquire(timeout=min(max(self._end - time.monotonic(), 0.0), threading.TIMEOUT_MAX)):
            raise DeadlineError(
                f"this process forms another group of this name, and has not come to its end in "
                f"{self._seconds:.3g} seconds: give them different names"
            )
        try:
            with self._listening() as listening:
                self._meet(listening)
        except BaseException as error:
            self.presence_of(self._rank).unlink(missing_ok=True)
            if isinstance(error, _RefusedError):
                raise OptionError(str(error)) from None
            raise
        finally:
            for connection in self._heard:
                connection.socket.close()
            place.release()
        _turns[str(self._path)] = self._turn + 1
        return self._peers

    def _path_of(self, rank: int) -> Path:
        return self._folder / f"{self._key}.{rank}"

    @contextlib.contextmanager
    def _listening(self) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX) as listening:
            _sockets.add(listening)
            self._bind(listening)
            try:
                listening.listen(max(self._size, 16))
                listening.setblocking(False)
                yield listening
            finally:
                self._path.unlink(missing_ok=True)

    def _bind(self, listening: socket.socket) -> None:
        """Takes the place of this rank; of a process that is gone, but not of one that is there."""
        stale_since = time.monotonic()
        while True:
            try:
                listening.bind(str(self._path))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise OptionError(f"ranks cannot meet at {self._path}: {error}") from error
            else:
                return
            if (found := self._called_at(self._path)) is not None:
                stale_since = time.monotonic()
                self._refuse_double(found)
            elif time.monotonic() - stale_since > STALE_SECONDS:
                self._path.unlink(missing_ok=True)
            time.sleep(SMALLEST_PAUSE_SECONDS)

    def _refuse_double(self, found: Connection) -> None:
        """Another process listens as this rank; it may be about to leave."""
        end = min(self._end, time.monotonic() + GRACE_SECONDS)
        with contextlib.suppress(OSError), found.socket:
            while time.monotonic() < end:
                frame = found.frame()
                if frame is not None:
                    tag, payload = frame
                    if tag == _REFUSED:
                        raise _RefusedError(payload.decode())
                    raise _RefusedError(self._double(_Hello(*json.loads(payload)).who))
                time.sleep(SMALLEST_PAUSE_SECONDS)

    def _double(self, who: str) -> str:
        return (
            f"two processes call themselves rank {self._rank} of {self._size}: {who} and {own_name()}. "
            "Each process needs a rank of its own (RANK)"
        )

    def _meet(self, listening: socket.socket) -> None:
        self._take_turn(self._turn)
        pause, say_so = SMALLEST_PAUSE_SECONDS, time.monotonic() + SILENT_SECONDS
        try:
            while len(self._peers) < self._size - 1:
                self._call_lower()
                asked = select.poll()
                for each in (listening, *(connection.socket for connection in self._heard)):
                    asked.register(each, select.POLLIN)
                asked.poll(pause * 1000)
                self._answer(listening)
                for connection in list(self._heard):
                    self._hear(connection)
                self._look_after_peers()
                pause = min(2 * pause, LARGEST_PAUSE_SECONDS)
                missing = [r for r in range(self._size) if r != self._rank and r not in self._peers]
                if missing and time.monotonic() > self._end:
                    raise DeadlineError(self._not_formed(missing))
                if missing and time.monotonic() > say_so:
                    say_so = self._end + 1.0
                    logger.warning(
                        "waiting for %s to form a group of %d", numbered("rank", missing), self._size
                    )
        except _RefusedError as refused:
            self._tell(listening, str(refused).encode())
            raise
        except BaseException:
            self._drop_peers()
            raise

    def _take_turn(self, turn: int) -> None:
        """Before anybody is met, so that no note is read of a process that had this address before."""
        self.presence_of(self._rank).unlink(missing_ok=True)
        self._turn = turn
        self.note_of(self._rank).unlink(missing_ok=True)
        self.presence_of(self._rank).write_text(own_name())

    def _call_lower(self) -> None:
        for rank in range(self._rank):
            if rank not in self._peers and rank not in self._called:
                found = self._called_at(self._path_of(rank))
                if found is not None:
                    self._called[rank] = found
                    self._heard.append(found)

    def _called_at(self, path: Path) -> Connection | None:
        """A connection to who listens there, who has heard of this rank; None if nobody does."""
        calling = socket.socket(socket.AF_UNIX)
        calling.setblocking(False)
        try:
            calling.connect(str(path))
        except OSError:
            calling.close()
            return None
        connection = Connection(calling)
        return connection if self._has_told(connection) else None

    def _has_told(self, connection: Connection) -> bool:
        hello = _Hello(self._rank, self._size, self._turn, own_name())
        try:
            connection.send_frame(_HELLO, json.dumps(hello).encode())
        except OSError:
            connection.socket.close()
            return False
        return True

    def _answer(self, listening: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                connection = Connection(listening.accept()[0])
                if self._has_told(connection):
                    self._heard.append(connection)

    def _hear(self, connection: Connection) -> None:
        """Takes the other side's hello, if it has come."""
        try:
            frame = connection.frame()
        except OSError:
            self._forget(connection)
            return
        if frame is None:
            return
        tag, payload = frame
        if tag == _REFUSED:
            raise _RefusedError(payload.decode())
        hello = _Hello(*json.loads(payload))
        if hello.size != self._size:
            raise _RefusedError(
                f"ranks disagree about how many they are (WORLD_SIZE): rank {hello.rank} ({hello.who}) says "
                f"{hello.size}, and rank {self._rank} ({own_name()}) says {self._size}"
            )
        if hello.rank == self._rank:
            raise _RefusedError(self._double(hello.who))
        if hello.turn == self._turn:
            self._heard.remove(connection)
            self._called.pop(hello.rank, None)
            if hello.rank in self._peers:  # it has withdrawn meanwhile, and has come again
                self._peers[hello.rank].socket.close()
            self._peers[hello.rank] = connection
            return
        if hello.turn > self._turn and hello.rank not in self._peers:  # the others have formed without us
            self._drop_peers()
            self._take_turn(hello.turn)
        self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        connection.socket.close()
        self._heard.remove(connection)
        self._called = {rank: called for rank, called in self._called.items() if called is not connection}

    def _look_after_peers(self) -> None:
        """Those that have withdrawn come again; one that has refused says why."""
        for rank, connection in list(self._peers.items()):
            try:
                found = connection.header()
                frame = connection.frame() if found is not None and found[0] == _REFUSED else None
            except OSError:
                self._peers.pop(rank).socket.close()
                continue
            if frame is not None:
                raise _RefusedError(frame[1].decode())

    def _drop_peers(self) -> None:
        for connection in self._peers.values():
            connection.socket.close()
        self._peers = {}

    def _tell(self, listening: socket.socket, why: bytes) -> None:
        """Tells all that have come, and those that come soon, why there is no group."""
        told = [*self._heard, *self._peers.values()]
        end = min(self._end, time.monotonic() + GRACE_SECONDS)
        while True:
            for connection in told:
                with contextlib.suppress(OSError):
                    connection.send_frame(_REFUSED, why)
            told = []
            if time.monotonic() > end:
                break
            time.sleep(LARGEST_PAUSE_SECONDS)
            with contextlib.suppress(BlockingIOError):
                told.append(Connection(listening.accept()[0]))
        self._drop_peers()

    def _not_formed(self, missing: Sequence[int]) -> str:
        came = [rank for rank in range(self._size) if rank not in missing]
        found = [path.read_text() for path in self._folder.glob(f"{self._key}.*-{self._rank}.at")]
        before = next((who for who in found if who != own_name()), own_name())
        twice = (
            "" if before == own_name() else f"; another process, {before}, has been rank {self._rank} before"
        )
        return (
            f"the group of {self._size} was not formed in {self._seconds:.3g} seconds: "
            f"{numbered('rank', missing)} did not come; {numbered('rank', came)} came{twice}. Are all "
            "processes started, on this host, and do they agree on where they meet?"
        )


def is_present(presence: Path) -> bool:
    """True while the process named there is in the group and running."""
    try:
        os.kill(int(presence.read_text().rpartition(" ")[2]), 0)
    except (OSError, ValueError):
        return False
    return True


def make_private(folder: Path) -> None:
    """Makes a folder that nobody else can enter; refuses one that somebody can."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise OptionError(
            f"ranks meet in a folder that is their user's alone (mode 0700), and {folder} is not: "
            f"{stat.filemode(found.st_mode)}, of user {found.st_uid}"
        )
