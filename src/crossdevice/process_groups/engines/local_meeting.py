"""Rendezvous of processes of one host: a folder in which each of them listens at a Unix socket."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import math
import os
import secrets
import select
import socket
import stat
import struct
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from crossdevice import runtime
from crossdevice.errors import DeadlineError, OptionError
from crossdevice.process_groups.notes.board import GRACE_SECONDS
from crossdevice.process_groups.notes.introduction import own_name
from crossdevice.process_groups.shared.shared_steps import start_time_of
from crossdevice.values.disagreement import numbered

logger = logging.getLogger("crossdevice")

BUFFER_BYTES = 64 << 10
"""Bytes read at once from a connection, if they are not known to be of one array."""

SILENT_SECONDS = 10.0
"""Wait for ranks before that is said."""

SMALLEST_PAUSE_SECONDS, LARGEST_PAUSE_SECONDS = 0.0005, 0.02

CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Clock that all processes of a host share."""

HEADER = struct.Struct("<qq")
"""Header of a frame: its tag and its length in bytes."""

_HELLO, _READY = -1, -2
"""Tags of frames while ranks meet; message tags are not negative."""

_HUNG_UP = select.POLLHUP | getattr(select, "POLLRDHUP", 0)

_LOADED_SECONDS = time.clock_gettime(CLOCK)
"""Stands for the start of this process where the system does not tell."""

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_turns: dict[str, int] = {}
_places: dict[str, threading.Lock] = {}


def _close_in_child() -> None:
    """Closes inherited sockets: a forked process would keep connections of a dead rank open."""
    for each in list(_sockets):
        each.close()
    _places.clear()


runtime.renew_after_fork(_close_in_child)


class _Forgotten(socket.socket):
    """A socket that closes with its last reference: another thread may be polling it."""

    def __del__(self) -> None:
        self.close()


class Connection:
    """A non-blocking socket with a buffer of unread bytes.

    The stream consists of frames: a tag, a length, and that many bytes.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.socket = _Forgotten(fileno=connected.detach())
        self.socket.setblocking(False)
        _sockets.add(self.socket)
        self._bytes = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._end = 0

    def header(self) -> tuple[int, int] | None:
        """Returns tag and length of the next frame without consuming it; None if it has not come."""
        while self._end - self._start < HEADER.size:
            if not self._fill():
                return None
        tag, length = HEADER.unpack_from(self._bytes, self._start)
        return tag, length

    def skip_header(self) -> None:
        """Consumes the header, up to the frame's contents."""
        self._start += HEADER.size

    def read_into(self, memory: memoryview) -> int:
        """Reads into a part of the memory; returns how much, 0 if nothing has come."""
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
        """Consumes and returns the next frame, which must fit the buffer; None if it is incomplete."""
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
        """Sends a small frame, for which an empty socket has room."""
        self.socket.send(HEADER.pack(tag, len(payload)) + payload)

    def has_ended(self) -> bool:
        """Returns True once the other side has hung up; data it sent may still be unread."""
        asked = select.poll()
        asked.register(self.socket, _HUNG_UP)
        return bool(asked.poll(0))

    def shut(self) -> None:
        """Ends both directions of the connection, and wakes waiting threads."""
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
    """Number of groups it has formed here; the lower ones were given up."""
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
        self._is_here = False
        self._compare = math.inf
        self._peers: dict[int, Connection] = {}
        self._ready: set[Connection] = set()  # the peers that have met all ranks
        self._told_ready: set[Connection] = set()
        self._heard: list[Connection] = []  # from whom a hello has to come
        self._called: dict[int, Connection] = {}  # of these, the lower ranks

    def note_of(self, rank: int) -> Path:
        """Returns the file of a rank's notes for this group."""
        return self._folder / f"{self._key}.{self._turn}-{rank}"

    def presence_of(self, rank: int) -> Path:
        """Returns the file that exists while a rank is in this group, with its size and its process."""
        return self._folder / f"{self._key}.{self._turn}-{rank}.at"

    @property
    def _refusal(self) -> Path:
        """The file with the reason there is no group, and the time of it, for ranks that come later."""
        return self._folder / f"{self._key}.{self._turn}.refused"

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
            self._drop_peers()
            if self._is_here:
                self.presence_of(self._rank).unlink(missing_ok=True)
            if isinstance(error, _RefusedError):
                _turns[str(self._path)] = self._turn + 1
                raise OptionError(str(error)) from None
            raise
        finally:
            for connection in self._heard:
                connection.socket.close()
            place.release()
        _turns[str(self._path)] = self._turn + 1
        if self._rank == 0 and self._refused_before() is not None:
            self._refusal.unlink(missing_ok=True)
        return self._peers

    def _path_of(self, rank: int) -> Path:
        return self._folder / f"{self._key}.{rank}"

    @contextlib.contextmanager
    def _listening(self) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX) as listening:
            _sockets.add(listening)
            self._take_place(listening)
            try:
                yield listening
            finally:
                self._path.unlink(missing_ok=True)

    def _take_place(self, listening: socket.socket) -> None:
        """Listens under this rank's name; the socket gets that name once it listens."""
        made = self._folder / f"{secrets.token_hex(4)}.{self._rank}"
        try:
            listening.bind(str(made))
            listening.listen(max(self._size, 16))
            listening.setblocking(False)
            while not self._has_place(made):
                if (found := self._called_at(self._path)) is not None:
                    self._refuse_double(found)
                if time.monotonic() > self._end:
                    raise DeadlineError(self._not_formed([self._rank]))
                time.sleep(SMALLEST_PAUSE_SECONDS)
        except OSError as error:
            raise OptionError(f"ranks cannot meet at {self._path}: {error}") from error
        finally:
            with contextlib.suppress(OSError):
                made.unlink()

    def _has_place(self, made: Path) -> bool:
        """Gives a socket the name of this rank; takes it away from a process that is gone, one at a time."""
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            with contextlib.suppress(FileExistsError):
                os.link(made, self._path)
                return True
            with socket.socket(socket.AF_UNIX) as calling:
                calling.setblocking(False)
                try:
                    calling.connect(str(self._path))
                except (ConnectionRefusedError, FileNotFoundError):
                    self._path.unlink(missing_ok=True)
                    os.link(made, self._path)
                    return True
                except BlockingIOError:
                    pass
            return False
        finally:
            os.close(folder)

    def _refuse_double(self, found: Connection) -> None:
        """Refuses a second process with this rank, unless it leaves soon."""
        end = min(self._end, time.monotonic() + GRACE_SECONDS)
        with contextlib.suppress(OSError), found.socket:
            while time.monotonic() < end:
                self._check_refused()
                frame = found.frame()
                if frame is not None:
                    self._refuse(self._double(_Hello(*json.loads(frame[1])).who))
                time.sleep(SMALLEST_PAUSE_SECONDS)

    def _refuse(self, why: str) -> NoReturn:
        """Leaves the reason for all ranks, those that come later included."""
        made = self._folder / f"{secrets.token_hex(4)}.made"
        made.write_text(json.dumps([time.clock_gettime(CLOCK), why]))
        made.rename(self._refusal)
        raise _RefusedError(why)

    def _check_refused(self) -> None:
        """Raises the refusal of another rank of this meeting."""
        found = self._found_refusal()
        if found is not None and found[0] >= _start_seconds():
            raise _RefusedError(found[1])

    def _refused_before(self) -> str | None:
        """Returns the reason of a refusal older than this process, mostly that of another launch."""
        found = self._found_refusal()
        return None if found is None or found[0] >= _start_seconds() else found[1]

    def _found_refusal(self) -> tuple[float, str] | None:
        try:
            seconds, why = json.loads(self._refusal.read_text())
        except FileNotFoundError:
            return None
        return seconds, why

    def _double(self, who: str) -> str:
        return (
            f"two processes call themselves rank {self._rank} of {self._size}: {who} and {own_name()}. "
            "Each process needs a rank of its own (RANK)"
        )

    def _meet(self, listening: socket.socket) -> None:
        self._take_turn(self._turn)
        pause, say_so = SMALLEST_PAUSE_SECONDS, time.monotonic() + SILENT_SECONDS
        while not len(self._told_ready) == len(self._ready) == self._size - 1:
            self._check_refused()
            if time.monotonic() > self._compare:
                self._check_those_present()
            self._call_lower()
            asked = select.poll()
            asked.register(listening, select.POLLIN)
            for connection in (*self._heard, *self._peers.values()):
                if connection not in self._ready:
                    asked.register(connection.socket, select.POLLIN)
            asked.poll(pause * 1000)
            self._answer(listening)
            for connection in list(self._heard):
                self._hear(connection)
            self._look_after_peers()
            pause = min(2 * pause, LARGEST_PAUSE_SECONDS)
            missing = [r for r in range(self._size) if r != self._rank and r not in self._peers]
            if not missing:
                self._say_ready()
            if time.monotonic() > self._end:
                raise DeadlineError(self._not_formed(missing))
            if missing and time.monotonic() > say_so:
                say_so = self._end + 1.0
                logger.warning("waiting for %s to form a group of %d", numbered("rank", missing), self._size)

    def _say_ready(self) -> None:
        """Tells the others that all are here. A rank is in the group only after hearing this from all.

        So no rank is in the group while another one may still find a reason against it.
        """
        for connection in self._peers.values():
            if connection not in self._told_ready:
                with contextlib.suppress(OSError):  # then it has ended, which is noticed where it is read
                    connection.send_frame(_READY, b"")
                self._told_ready.add(connection)

    def _take_turn(self, turn: int) -> None:
        """Registers this rank before it meets others, and removes an old note under its name."""
        if self._is_here:
            self.presence_of(self._rank).unlink(missing_ok=True)
        self._turn, self._is_here = turn, False
        self._compare = time.monotonic() + GRACE_SECONDS
        while (found := _read_presence(self.presence_of(self._rank))) is not None and found.who != own_name():
            self._check_refused()
            if time.monotonic() > min(self._end, self._compare):  # before, it may be about to leave its group
                self._refuse(self._double(found.who))
            time.sleep(LARGEST_PAUSE_SECONDS)
        self._is_here = True
        self.note_of(self._rank).unlink(missing_ok=True)
        self.presence_of(self._rank).write_text(f"{_own_start()} {self._size} {own_name()}")

    def _check_those_present(self) -> None:
        """Refuses sizes that differ from those of ranks already in a group, which do not listen."""
        self._compare = math.inf
        for path in sorted(self._folder.glob(f"{self._key}.{self._turn}-*.at")):
            found = _read_presence(path)
            if found is not None and found.size != self._size:
                rank = int(path.stem.rpartition("-")[2])
                self._refuse(self._sizes_differ(rank, found.who, found.size))

    def _call_lower(self) -> None:
        for rank in range(self._rank):
            if rank not in self._peers and rank not in self._called:
                found = self._called_at(self._path_of(rank))
                if found is not None:
                    self._called[rank] = found
                    self._heard.append(found)

    def _called_at(self, path: Path) -> Connection | None:
        """Connects to the listener at this path and greets it; None if there is none."""
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
        """Reads the other side's hello, if it has come."""
        try:
            frame = connection.frame()
        except OSError:
            self._forget(connection)
            return
        if frame is None:
            return
        hello = _Hello(*json.loads(frame[1]))
        if hello.size != self._size:
            self._refuse(self._sizes_differ(hello.rank, hello.who, hello.size))
        if hello.rank == self._rank:
            self._refuse(self._double(hello.who))
        if hello.turn == self._turn:
            self._heard.remove(connection)
            self._called.pop(hello.rank, None)
            if hello.rank in self._peers:  # it has withdrawn meanwhile, and has come again
                self._drop(hello.rank)
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
        """Drops peers that have withdrawn, so that they can come again."""
        is_lacking = len(self._peers) < self._size - 1
        for rank, connection in list(self._peers.items()):
            if connection in self._ready:  # what comes next is of the group
                if is_lacking and connection.has_ended():
                    self._drop(rank)
                continue
            try:
                if connection.frame() is not None:
                    self._ready.add(connection)
            except OSError:
                self._drop(rank)

    def _drop(self, rank: int) -> None:
        connection = self._peers.pop(rank)
        connection.socket.close()
        self._ready.discard(connection)
        self._told_ready.discard(connection)

    def _drop_peers(self) -> None:
        for rank in list(self._peers):
            self._drop(rank)

    def _not_formed(self, missing: Sequence[int]) -> str:
        came = [rank for rank in range(self._size) if rank not in missing]
        at = self._folder.glob(f"{self._key}.*-{self._rank}.at")
        names = [presence.who for path in at if (presence := _read_presence(path)) is not None]
        before = next((who for who in names if who != own_name()), None)
        earlier = self._refused_before()
        twice = "" if before is None else f"; another process, {before}, has been rank {self._rank} before"
        refused = "" if earlier is None else f"; before this process was started, others were told: {earlier}"
        return (
            f"the group of {self._size} was not formed in {self._seconds:.3g} seconds: "
            f"{numbered('rank', missing or came)} did not {'come' if missing else 'answer'}; "
            f"{numbered('rank', came)} came{twice}{refused}. Are all processes started, on this host, and do "
            "they agree on where they meet?"
        )

    def _sizes_differ(self, rank: int, who: str, size: int) -> str:
        return (
            f"ranks disagree about how many they are (WORLD_SIZE): rank {rank} ({who}) says {size}, and rank "
            f"{self._rank} ({own_name()}) says {self._size}"
        )


class _Presence(NamedTuple):
    """A running process that is in a group."""

    size: int
    who: str


def _read_presence(path: Path) -> _Presence | None:
    """Reads the process named in a file of presence; None if that process has ended."""
    try:
        start, size, who = path.read_text().split(" ", 2)
        process = int(who.rpartition(" ")[2])
        os.kill(process, 0)
    except (OSError, ValueError):
        return None
    is_same = str(start_time_of(process)) == start
    return _Presence(int(size), who) if is_same else None


def _own_start() -> str:
    """Returns the start of this process, as `start_time_of` has it; it may not be known."""
    return str(start_time_of(os.getpid()))


def _start_seconds() -> float:
    """Returns the start of this process in seconds of CLOCK."""
    ticks = start_time_of(os.getpid())
    return _LOADED_SECONDS if ticks is None else ticks / os.sysconf("SC_CLK_TCK")


def is_present(presence: Path) -> bool:
    """Returns True while the process named there is in the group and running."""
    return _read_presence(presence) is not None


def make_private(folder: Path) -> None:
    """Makes a folder that only its user can enter; refuses one that others can enter."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise OptionError(
            f"ranks meet in a folder that is their user's alone (mode 0700), and {folder} is not: "
            f"{stat.filemode(found.st_mode)}, of user {found.st_uid}"
        )
