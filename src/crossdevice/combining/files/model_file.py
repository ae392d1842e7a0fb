"""What averaging asks of a file of tensors, whatever its format."""

from __future__ import annotations

import abc
import contextlib
import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from crossdevice.backends.protocol import dtype_named
from crossdevice.errors import FileError


class TensorSpec(NamedTuple):
    """What is known of a tensor without reading it."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """The product of the shape."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """In memory and, mostly, in the file."""
        return self.num_elements * dtype_named(self.dtype).itemsize


class FileState(NamedTuple):
    """What tells whether the same file has been written to."""

    identity: tuple[int, int]
    num_bytes: int
    written_at: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileState:
        """As the system has reported it."""
        return cls((found.st_dev, found.st_ino), found.st_size, found.st_mtime_ns)

    def check(self, path: Path) -> None:
        """Refuses a file that differs; another one in its place does not matter, nor that it is gone."""
        with contextlib.suppress(FileNotFoundError):
            now = FileState.of(path.stat())
            if now.identity == self.identity and now != self:
                raise unreadable(path, "it was written to meanwhile")


class ModelFile(abc.ABC):
    """A file of named tensors, open for reading."""

    path: Path
    tensors: dict[str, TensorSpec]
    """In the order of the file."""
    metadata: Any = None
    """What else is in the file, for a new file of the same format."""
    state: FileState | None = None
    """When it was opened."""

    @abc.abstractmethod
    def elements(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Some elements of a tensor, flat: a view of the file, else a copy; several threads may ask."""

    def read_ahead(self, name: str, start: int, stop: int) -> None:  # noqa: B027 - only where it helps
        """Says that these elements are needed soon."""

    def leave_behind(self, name: str, start: int, stop: int) -> None:  # noqa: B027 - only where it helps
        """Says that these elements are hardly needed any more."""

    def check_unchanged(self) -> None:
        """Refuses a file that was written to since it was opened: what was read may be of either version."""
        if self.state is not None:
            self.state.check(self.path)

    @abc.abstractmethod
    def close(self) -> None:
        """Nothing is read any more."""


def unreadable(path: Path, why: object) -> FileError:
    """The error for a file that is not what its name says."""
    return FileError(f"{path} cannot be read: {why}")


@contextlib.contextmanager
def opened(model: ModelFile) -> Iterator[ModelFile]:
    """Closes it in the end."""
    try:
        yield model
    finally:
        model.close()


class ModelWriter(NamedTuple):
    """What takes the elements of a new file."""

    write: Callable[[str, int, NDArray[Any]], None]
    """Called with the name of a tensor, the number of the first element, and elements."""
    in_any_order: bool = True
    """Else the next elements come next, in the order in which tensors were announced."""


Writing = AbstractContextManager[ModelWriter]
