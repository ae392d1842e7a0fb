"""A file in memory, by ranges of its bytes."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import dtype_named
from crossdevice.combining.files.model_file import ModelFile, unreadable


class MappedFile(ModelFile):
    """Tensors that lie in the file as they do in memory; `places` says at which byte each starts."""

    places: dict[str, int]

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.num_bytes = path.stat().st_size
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
        return np.frombuffer(self._map, dtype, stop - start, self.places[name] + start * dtype.itemsize)

    def read_ahead(self, name: str, start: int, stop: int) -> None:
        """Starts reading from the disk."""
        self._advise("MADV_WILLNEED", name, start, stop)

    def leave_behind(self, name: str, start: int, stop: int) -> None:
        """The pages count as this process's no longer; the system keeps them for others."""
        self._advise("MADV_DONTNEED", name, start, stop)

    def _advise(self, advice: str, name: str, start: int, stop: int) -> None:
        number = getattr(mmap, advice, None)  # not everywhere
        if number is None or self._map is None:
            return
        item = dtype_named(self.tensors[name].dtype).itemsize
        first = (self.places[name] + start * item) // mmap.PAGESIZE * mmap.PAGESIZE
        length = self.places[name] + stop * item - first
        if length > 0:
            self._map.madvise(number, first, length)

    def close(self) -> None:
        """Views that are left keep the file mapped."""
        if self._map is not None:
            try:
                self._map.close()
            except BufferError:
                self._map = None
