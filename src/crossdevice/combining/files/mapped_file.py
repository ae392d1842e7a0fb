"""A file in memory, by ranges of its bytes."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import dtype_named
from crossdevice.combining.files.model_file import FileState, ModelFile, unreadable


class MappedFile(ModelFile):
    """Tensors that lie in the file as they do in memory; `places` says at which byte each starts."""

    places: dict[str, int]

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.state = FileState.of(os.fstat(file.fileno()))
                self.num_bytes = self.state.num_bytes
                # An empty file cannot be mapped.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.num_bytes else None
        except OSError as error:
            raise unreadable(path, error.strerror or error) from error

    def bytes_at(self, start: int, stop: int) -> bytes:
        """As many as there are."""
        return b"" if self._map is None else self._map[start:stop]

    def elements(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """A view of the file."""
        dtype = dtype_named(self.tensors[name].dtype)
        if self._map is None or stop == start:
            return np.empty(0, dtype)
        if self._map.size() < self.num_bytes:  # the system ends processes that read behind the end
            raise unreadable(self.path, "it was truncated meanwhile")
        return np.frombuffer(self._map, dtype, stop - start, self.places[name] + start * dtype.itemsize)

    def read_ahead(self, name: str, start: int, stop: int) -> None:
        """Starts reading from the disk what is not in memory yet."""
        first, length = self._pages(name, start, stop)
        if length > 0 and hasattr(os, "posix_fadvise"):
            # Opened again, as a large model may have many shards, and processes have few descriptors.
            with contextlib.suppress(OSError), open(self.path, "rb", buffering=0) as file:
                if not _is_in_memory(file.fileno(), first + length - 1):
                    os.posix_fadvise(file.fileno(), first, length, os.POSIX_FADV_WILLNEED)

    def leave_behind(self, name: str, start: int, stop: int) -> None:
        """The pages count as this process's no longer; the system keeps them for others."""
        first, length = self._pages(name, start, stop)
        if length > 0 and self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, length)

    def _pages(self, name: str, start: int, stop: int) -> tuple[int, int]:
        """Where the page starts in which the first element is, and how many bytes there are from it on."""
        if name not in self.places:
            return 0, 0
        item = dtype_named(self.tensors[name].dtype).itemsize
        first = (self.places[name] + start * item) // mmap.PAGESIZE * mmap.PAGESIZE
        return first, self.places[name] + stop * item - first

    def close(self) -> None:
        """Views that are left keep the file mapped."""
        if self._map is not None:
            try:
                self._map.close()
            except BufferError:
                self._map = None


def _is_in_memory(descriptor: int, place: int) -> bool:
    """Whether a byte of a file can be read without waiting: advice on what can takes time, for nothing."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    try:
        return os.preadv(descriptor, [bytearray(1)], place, os.RWF_NOWAIT) == 1
    except OSError:  # it cannot, or the file system does not say
        return False
