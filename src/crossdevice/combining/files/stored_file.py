"""Files in which tensors lie as they do in memory, read by ranges of their bytes."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import stat
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import dtype_named
from crossdevice.combining.files.model_file import FileState, ModelFile, unreadable
from crossdevice.combining.files.zip_members import local_header_bytes
from crossdevice.kernels.host.resources.pool import result_pool

DIGESTED_BYTES = 1 << 20
"""How much is read at a time for a digest."""


class StoredFile(ModelFile):
    """Tensors as they are in memory; `places` says at which byte each starts.

    They are read and not mapped: a read behind the end of a file that was truncated meanwhile is an error,
    where the system would end a process that looks at mapped memory there.
    """

    places: dict[str, int]
    _descriptor = -1

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(
                path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
            )  # or a pipe would wait
            found = os.fstat(self._descriptor)
            self.state = FileState.of(found)
        except OSError as error:
            raise unreadable(path, error.strerror or error) from error
        self.num_bytes = self.state.num_bytes
        if not stat.S_ISREG(found.st_mode):
            raise unreadable(path, "it is not a regular file; expected one that can be read at any place")

    def start_of(self, member: zipfile.ZipInfo) -> int:
        """The byte at which the data of a member starts, if the file is an archive."""
        return member.header_offset + local_header_bytes(member, self.bytes_at)

    def bytes_at(self, start: int, stop: int) -> bytes:
        """Reads bytes, as many as there are."""
        return os.pread(self._descriptor, max(min(stop, self.num_bytes) - start, 0), start)

    def elements(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Reads elements into new memory."""
        dtype = dtype_named(self.tensors[name].dtype)
        into = result_pool.empty(stop - start, dtype)
        self.read_into(into, self.places[name] + start * dtype.itemsize)
        return into

    def read_into(self, into: NDArray[Any], place: int) -> None:
        """Fills an array with the bytes from a place on."""
        left = into.view(np.uint8).data
        while left:
            try:
                number = os.preadv(self._descriptor, [left], place)
            except OSError as error:
                raise unreadable(self.path, error.strerror or error) from error
            if not number:
                raise unreadable(self.path, "it was truncated meanwhile")
            left, place = left[number:], place + number

    def read_ahead(self, name: str, start: int, stop: int) -> None:
        """Starts reading from the disk what is not in memory yet."""
        if name not in self.places or not hasattr(os, "posix_fadvise"):
            return
        item = dtype_named(self.tensors[name].dtype).itemsize
        first = (self.places[name] + start * item) // mmap.PAGESIZE * mmap.PAGESIZE
        length = self.places[name] + stop * item - first
        if length > 0 and not _is_in_memory(self._descriptor, first + length - 1):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._descriptor, first, length, os.POSIX_FADV_WILLNEED)

    def check_digest(self) -> None:
        """Compares the file with the SHA-256 beside it, as `sha256sum` writes it."""
        beside = self.path.with_name(f"{self.path.name}.sha256")
        try:
            with beside.open("rb") as file:
                expected = file.read(64).decode("ascii", "replace").lower()
        except OSError as error:
            why = f"there is no {beside.name} beside it ({error.strerror}); sha256sum of a right one makes it"
            raise unreadable(self.path, why) from error
        digest, room = hashlib.sha256(), np.empty(DIGESTED_BYTES, np.uint8)
        for place in range(0, self.num_bytes, DIGESTED_BYTES):
            part = room[: min(DIGESTED_BYTES, self.num_bytes - place)]
            self.read_into(part, place)
            digest.update(part.data)
        if digest.hexdigest() != expected:
            raise unreadable(
                self.path, f"its SHA-256 is {digest.hexdigest()}, and {beside.name} says {expected}"
            )

    def close(self) -> None:
        """Closes the file."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()  # also of one that could not be read


def _is_in_memory(descriptor: int, place: int) -> bool:
    """Returns True if a byte of a file can be read without waiting: advice is of no use then."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    try:
        return os.preadv(descriptor, [bytearray(1)], place, os.RWF_NOWAIT) == 1
    except OSError:  # it cannot, or the file system does not say
        return False
