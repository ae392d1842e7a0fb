"""Members of zip archives, which `.npz` and PyTorch's files are: written, and checked as they are read."""

from __future__ import annotations

import functools
import struct
import threading
import tokenize
import zipfile
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO

from crossdevice.values.quantities import counted

CRC_POLYNOMIAL = 0xEDB88320
"""Polynomial of the CRC in zip's bit order: the highest power is implied, and x**0 is the highest bit."""

MAX_END_BYTES = (1 << 16) + 200
"""Longest tail of an archive after its directory: the longest comment and the end record."""

LOCAL_HEADER_BYTES = 30
"""The fixed part of a member's header in an archive, before its name and extra fields."""

MOST_COMPRESSED = 1032
"""Deflate makes no more bytes than that of one."""

_ZIP64_EXTRA_BYTES = 20


BAD_ARCHIVE = (
    *(OSError, EOFError, ValueError, KeyError, TypeError, RuntimeError, NotImplementedError),
    *(RecursionError, MemoryError, OverflowError, SyntaxError, zipfile.BadZipFile, zlib.error),
    *(tokenize.TokenError, struct.error, IndexError, AttributeError),
)
"""Errors of NumPy, `zipfile` and decompressors for bytes that are not an archive of arrays."""


class Checksum:
    """The CRC-32 of a member that is read by ranges, in any order and by several threads."""

    def __init__(self, name: str, expected: int, num_bytes: int) -> None:
        self._name, self._expected, self._num_bytes = name, expected, num_bytes
        self._parts: dict[int, tuple[int, int]] = {}
        """End and CRC by start, of ranges that were read ahead of others."""
        self._at = self._crc = 0
        """Up to where all has been read, and the CRC of that."""
        self._lock = threading.Lock()

    def add(self, start: int, data: Any) -> None:
        """Counts the bytes from `start` on; ValueError if all have been read once with other contents."""
        with self._lock:
            at, crc = self._at, self._crc
        # Mostly the next bytes, which continue the CRC of those before.
        is_next = start == at
        end, found = start + len(data), zlib.crc32(data, crc if is_next else 0)
        with self._lock:
            if is_next and start == self._at:
                self._at, self._crc = end, found
            elif start >= self._at and len(data):
                self._parts[start] = end, found
            while self._at in self._parts:
                end, crc = self._parts.pop(self._at)
                self._crc, self._at = combined_crc(self._crc, crc, end - self._at), end
            at, crc = self._at, self._crc
        if at == self._num_bytes and crc != self._expected:
            raise ValueError(
                f"member {self._name!r} has CRC-32 {crc:08x}, and the archive says "
                f"{self._expected:08x}: its bytes have changed since it was written"
            )


def combined_crc(first: int, second: int, num_bytes: int) -> int:
    """Returns the CRC-32 of two pieces, from theirs and the length of the second.

    >>> combined_crc(zlib.crc32(b"ab"), zlib.crc32(b"cde"), 3) == zlib.crc32(b"abcde")
    True
    """
    return _times(_shift_of(num_bytes), first) ^ second if first else second


@functools.lru_cache(maxsize=1 << 10)
def _shift_of(num_bytes: int) -> int:
    """Returns the polynomial that moves a remainder past this many bytes."""
    product, square = 1 << 31, 1 << 23  # 1, and x**8
    while num_bytes:
        if num_bytes & 1:
            product = _times(square, product)
        square, num_bytes = _times(square, square), num_bytes >> 1
    return product


def _times(left: int, right: int) -> int:
    """Multiplies two polynomials modulo the CRC's."""
    product = 0
    for power in range(31, -1, -1):
        if left >> power & 1:
            product ^= right
        right = right >> 1 ^ (CRC_POLYNOMIAL if right & 1 else 0)
    return product


def check_members(
    members: list[zipfile.ZipInfo], num_bytes: int, bytes_at: Callable[[int, int], bytes]
) -> None:
    """Refuses archives with two members of one name, and sizes that cannot be, before anything is read.

    An entry with a changed length swallows others: their number counts, too.
    """
    number = _announced_members(num_bytes, bytes_at)
    if number != len(members):
        raise ValueError(
            f"its directory has {counted(len(members), 'entry', 'entries')}, and the archive says {number}"
        )
    names = set[str]()
    for member in members:
        if member.filename in names:
            raise ValueError(f"member {member.filename!r} is in it twice")
        names.add(member.filename)
        stored = member.compress_type == zipfile.ZIP_STORED
        most = member.compress_size if stored else MOST_COMPRESSED * (member.compress_size + 1)
        if member.compress_size > num_bytes or member.file_size > most:
            raise ValueError(
                f"member {member.filename!r} claims {member.file_size} bytes in {member.compress_size} of a "
                f"file of {num_bytes}"
            )
        if member.flag_bits & 1:
            raise ValueError(f"member {member.filename!r} is encrypted")


def _announced_members(num_bytes: int, bytes_at: Callable[[int, int], bytes]) -> int:
    """Returns the number of members announced at the end of an archive."""
    tail = bytes_at(max(num_bytes - MAX_END_BYTES, 0), num_bytes)
    at = tail.rfind(b"PK\5\6")
    number = int.from_bytes(tail[at + 10 : at + 12], "little")
    if at >= 20 and tail[at - 20 : at - 16] == b"PK\6\7":
        place = int.from_bytes(tail[at - 12 : at - 4], "little")
        end = bytes_at(place, place + 56)
        if end[:4] == b"PK\6\6":
            return int.from_bytes(end[32:40], "little")
    return number


def local_header_bytes(member: zipfile.ZipInfo, bytes_at: Callable[[int, int], bytes]) -> int:
    """Returns the length of a member's own header, which must have the name in the directory."""
    named = member.orig_filename.encode("utf-8" if member.flag_bits & 1 << 11 else "cp437")
    start = member.header_offset
    header = bytes_at(start, start + LOCAL_HEADER_BYTES + len(named))
    name_bytes, extra_bytes = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    if header[:4] != b"PK\3\4" or header[LOCAL_HEADER_BYTES:] != named or name_bytes != len(named):
        raise ValueError(f"member {member.filename!r} has another name where it starts")
    return LOCAL_HEADER_BYTES + name_bytes + extra_bytes


class StoredZip:
    """Writes an archive of members that are not compressed, one after another; their sizes are known.

    Unlike `zipfile`, it has nothing to finish where something goes wrong: an error, or an interrupt, stays
    what it is.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._rows: list[tuple[bytes, int, int, int]] = []
        """Name, CRC-32, size and place of each complete member."""

    def begin(self, name: str, num_bytes: int) -> None:
        """Starts a member of `num_bytes`."""
        self._name, self._left, self._crc = name.encode(), num_bytes, 0
        self._size, self._place = num_bytes, self._file.tell()
        self._file.write(self._local_header(0))

    def write(self, data: Any) -> None:
        """Writes the next bytes of the member that was started; the last ones complete it."""
        self._file.write(data)
        self._crc = zlib.crc32(data, self._crc)
        self._left -= len(data)
        if not self._left:
            end = self._file.tell()
            self._file.seek(self._place)
            self._file.write(self._local_header(self._crc))
            self._file.seek(end)
            self._rows.append((self._name, self._crc, self._size, self._place))

    def finish(self) -> None:
        """Writes the directory."""
        start = self._file.tell()
        for name, crc, size, place in self._rows:
            extra = struct.pack("<HHQQQ", 1, 24, size, size, place)
            sizes = (crc, 0xFFFFFFFF, 0xFFFFFFFF, len(name), len(extra))
            self._file.write(
                struct.pack("<4sHHHHHHLLLHHHHHLL", b"PK\1\2", 45, 45, *_FIXED, *sizes, 0, 0, 0, 0, 0xFFFFFFFF)
                + name
                + extra
            )
        end, number = self._file.tell(), len(self._rows)
        self._file.write(
            struct.pack("<4sQHHLLQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, number, number, end - start, start)
            + struct.pack("<4sLQL", b"PK\6\7", 0, end, 1)
            + struct.pack("<4sHHHHLLH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
        )

    def _local_header(self, crc: int) -> bytes:
        name = self._name
        head = struct.pack(
            "<4sHHHHHLLLHH",
            b"PK\3\4",
            45,
            *_FIXED,
            crc,
            0xFFFFFFFF,
            0xFFFFFFFF,
            len(name),
            _ZIP64_EXTRA_BYTES,
        )
        return head + name + struct.pack("<HHQQ", 1, 16, self._size, self._size)


_FIXED = 1 << 11, zipfile.ZIP_STORED, 0, 1 << 5 | 1
"""Flags (names are in UTF-8), how it is compressed, and the time: the first day of 1980, so that files of the
same tensors have the same bytes."""
