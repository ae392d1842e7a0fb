"""Files of fingerprints: events that are appended whole, so that a killed process leaves all but the last."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import struct
import weakref
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from crossdevice import runtime
from crossdevice.errors import FileError

MAGIC = b"crossdevice bits 1\n"

DIGEST_BYTES = 8
"""Bytes kept of each fingerprint: enough to tell apart the values of two runs at one place."""

_FRAME = struct.Struct("<II")
_NUMBER = struct.Struct("<I")

HEADER, DEFINITION, EVENT = b"H", b"D", b"E"

logger = logging.getLogger("crossdevice")


class Kind(NamedTuple):
    """Common part of events of one kind: written once, and named by its number from then on."""

    name: str
    rank: int
    is_call: bool
    inputs: tuple[tuple[str, int], ...]
    """The path to each leaf, and how many replicas have it."""
    results: tuple[tuple[str, int], ...]


class Event(NamedTuple):
    """One call or mark: a digest for each leaf and replica, inputs first."""

    kind: Kind
    digests: tuple[bytes, ...]


class Header(NamedTuple):
    """The process that wrote a file."""

    rank: int
    size: int


class BitsWriter:
    """Appends events to a new file; each is one `write`, which needs no closing to be there.

    Raises:
        FileError: the file cannot be written, or another process is writing it.
    """

    def __init__(self, path: str | os.PathLike[str], header: Header) -> None:
        self.path = Path(path)
        try:
            # Without waiting for the reader of a pipe, which cannot be recorded to.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
            self._descriptor: int | None = os.open(self.path, flags, 0o666)
        except OSError as error:
            raise FileError(f"{self.path} cannot be written: {error.strerror}") from None
        self._take()
        self._kinds: dict[Kind, int] = {}
        _open_writers.add(self)
        self._write(MAGIC + _framed(HEADER + json.dumps(header._asdict()).encode()))

    def append(self, event: Event) -> None:
        """Writes one event, and before it its kind if that is new."""
        text = b""
        number = self._kinds.get(event.kind)
        if number is None:
            number = self._kinds[event.kind] = len(self._kinds)
            text = _framed(DEFINITION + json.dumps(event.kind).encode())
        self._write(text + _framed(EVENT + _NUMBER.pack(number) + b"".join(event.digests)))

    def close(self) -> None:
        """Closes the file."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _take(self) -> None:
        """Locks the file for this process, and empties it."""
        assert self._descriptor is not None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise FileError(
                f"{self.path} is being written by another process; if these are ranks of one launch, begin "
                "to record after init_process_group, or give each a file of its own, such as "
                f"{path_of_rank(self.path, 0).name}"
            ) from None
        except OSError:  # a file system without locks
            pass
        try:
            os.ftruncate(self._descriptor, 0)
        except OSError as error:  # a device or a pipe
            self.close()
            raise FileError(f"{self.path} cannot be emptied and written anew: {error.strerror}") from None

    def _write(self, text: bytes) -> None:
        """Writes all of it; a failure ends the record and not the program."""
        if self._descriptor is None:
            return
        try:
            while text:
                text = text[os.write(self._descriptor, text) :]
        except OSError as error:
            logger.error("the record %s ends here, it cannot be written: %s", self.path, error.strerror)
            with contextlib.suppress(OSError):
                self.close()


_open_writers: weakref.WeakSet[BitsWriter] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Closes a file that a forked process has inherited, so that it does not prolong the parent's lock."""
    for writer in _open_writers:
        writer.close()


runtime.renew_after_fork(_leave_to_parent)


def path_of_rank(path: Path, rank: int | str) -> Path:
    """Returns the file of one of several processes: `run.rank3.bits` for `run.bits`; `*` stands for all."""
    return path.with_suffix(f".rank{rank}{path.suffix}")


class BitsFile(NamedTuple):
    """Contents of a file."""

    path: Path
    header: Header
    events: list[Event]
    is_cut: bool
    """True if its end is missing, as after a kill."""


def read_bits(path: str | os.PathLike[str]) -> BitsFile:
    """Reads all whole events of a file."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from None
    if not text.startswith(MAGIC):
        found = f"it begins with {text[:18]!r}" if text else "it is empty"
        raise FileError(f"{path} is not a file of crossdevice.record_bits: {found}")
    header, kinds, events, end = Header(0, 1), [], [], len(MAGIC)
    try:
        for payload in _frames(text, len(MAGIC)):
            end += _FRAME.size + len(payload)
            tag, rest = payload[:1], payload[1:]
            if tag == HEADER:
                header = Header(**json.loads(rest))
            elif tag == DEFINITION:
                kinds.append(_kind_of(json.loads(rest)))
            else:
                (number,) = _NUMBER.unpack_from(rest)
                body = rest[_NUMBER.size :]
                digests = [body[at : at + DIGEST_BYTES] for at in range(0, len(body), DIGEST_BYTES)]
                events.append(Event(kinds[number], tuple(digests)))
    except (ValueError, TypeError, LookupError, struct.error) as error:
        raise FileError(f"{path} is damaged after {end} of its {len(text)} bytes: {error}") from None
    return BitsFile(Path(path), header, events, end < len(text))


def _framed(payload: bytes) -> bytes:
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def _frames(text: bytes, start: int) -> Iterator[bytes]:
    """Yields each payload, up to the first that is cut off; a power failure may leave zeros at the end."""
    while start + _FRAME.size <= len(text):
        length, check = _FRAME.unpack_from(text, start)
        begin = start + _FRAME.size
        payload = text[begin : begin + length]
        if not length or len(payload) < length:
            return
        if zlib.crc32(payload) != check:
            raise ValueError("a checksum is wrong")
        start = begin + length
        yield payload


def _kind_of(fields: Sequence[Any]) -> Kind:
    name, rank, is_call, inputs, results = fields
    leaves = [tuple((str(path), int(count)) for path, count in group) for group in (inputs, results)]
    return Kind(str(name), int(rank), bool(is_call), *leaves)
