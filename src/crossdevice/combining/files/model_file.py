"""Files of tensors as averaging sees them, whatever their format; new ones appear when complete."""

from __future__ import annotations

import abc
import contextlib
import hashlib
import math
import mmap
import os
import secrets
import stat
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import dtype_named
from crossdevice.combining.files.zip_members import local_header_bytes
from crossdevice.errors import FileError
from crossdevice.execution.reading.values import few
from crossdevice.kernels.host.resources.pool import result_pool


@contextlib.contextmanager
def replaced(file: str | PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a new file beside the one that is named, which takes its place at the end; an error removes it.

    It has no name until then where the system has such files: a process that is killed leaves nothing behind.
    A user who may not read the old file may not read the new one either.
    """
    try:
        # A link stays one: what it leads to is replaced.
        path = Path(os.path.realpath(file))
    except ValueError as error:  # no name has a zero in it
        raise FileError(f"{os.fspath(file)!r} cannot be written: {error}") from error
    check_replaceable(path)
    beside = path.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        with _without_name(path.parent) or open(beside, "x+b") as opened:
            with contextlib.suppress(FileNotFoundError):
                os.chmod(opened.fileno(), stat.S_IMODE(os.stat(path).st_mode))
            yield opened
            opened.flush()
            if not beside.exists():
                # Given a folder, Python follows the link, which names the file.
                os.link(_link_to(opened), beside, src_dir_fd=opened.fileno())
        os.replace(beside, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        if isinstance(error, OSError) and not isinstance(error, FileError):
            raise FileError(f"{path} cannot be written: {error.strerror or error}") from error
        raise


def check_replaceable(path: Path) -> None:
    """Refuses devices and pipes, which a new file would take away from everybody."""
    try:
        is_special = path.exists() and not path.is_file()
    except OSError as error:  # as of a name that is too long
        raise FileError(f"{path} cannot be written: {error.strerror or error}") from error
    if is_special:
        raise FileError(f"{path} cannot be written: it is not a regular file, whose place another could take")


def _without_name(folder: Path) -> BinaryIO | None:
    """Opens a file without a name, which vanishes on close unless linked; None where there are none."""
    if not hasattr(os, "O_TMPFILE"):
        return None
    try:
        opened = os.fdopen(os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o666), "w+b")
    except OSError:  # the file system has none, or the folder cannot be written to: a name says which
        return None
    if os.path.exists(_link_to(opened)):
        return opened
    opened.close()
    return None


def _link_to(opened: BinaryIO) -> str:
    return f"/proc/self/fd/{opened.fileno()}"


def write_at(file: BinaryIO, place: int, elements: NDArray[Any]) -> None:
    """Writes to any byte of a file; several threads may, at once."""
    left = elements.view(np.uint8).data
    while left:
        number = os.pwrite(file.fileno(), left, place)
        left, place = left[number:], place + number


MAX_AXES, MAX_BYTES = 64, 1 << 62
"""Bounds of a tensor's shape: as many axes as NumPy has, and fewer bytes than can be addressed."""

MAX_HEADER_BYTES = 100_000_000
"""Longest header or index that is read: the limit of the safetensors library."""


class TensorSpec(NamedTuple):
    """Name, dtype, shape and place of a tensor that has not been read."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def checked(cls, name: str, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
        """Checks and returns a spec from a file; ValueError for a shape that no array can have."""
        if not all(type(length) is int and length >= 0 for length in shape):
            raise ValueError(
                f"tensor {name!r} has shape {_text_of(shape)}; expected whole numbers, 0 or more"
            )
        if len(shape) > MAX_AXES:
            raise ValueError(f"tensor {name!r} has {len(shape)} axes; expected at most {MAX_AXES}")
        # Bounded before they are multiplied: of lengths that are 0 the others count too, as in NumPy.
        size = dtype_named(dtype).itemsize
        for length in shape:
            size *= max(length, 1)
            if size >= MAX_BYTES:
                raise ValueError(f"tensor {name!r} has shape {_text_of(shape)}, which no memory holds")
        return cls(dtype, shape)

    @property
    def num_elements(self) -> int:
        """The product of the shape."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes in memory and, in most files, on disk."""
        return self.num_elements * dtype_named(self.dtype).itemsize


def _text_of(shape: Sequence[Any]) -> str:
    return f"[{few([f'{length:.6g}' if isinstance(length, int) else repr(length)[:20] for length in shape])}]"


class FileState(NamedTuple):
    """State of a file; it changes when the file is written to."""

    identity: tuple[int, int]
    num_bytes: int
    written_at: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileState:
        """Takes the state from the system's report."""
        return cls((found.st_dev, found.st_ino), found.st_size, found.st_mtime_ns)

    def check(self, path: Path) -> None:
        """Refuses a file that was written to; ignores one that was replaced or removed."""
        with contextlib.suppress(FileNotFoundError):
            now = FileState.of(path.stat())
            if now.identity == self.identity and now != self:
                raise unreadable(path, "it was written to meanwhile")


class ModelFile(abc.ABC):
    """A file of named tensors, open for reading."""

    path: Path
    tensors: dict[str, TensorSpec]
    """Specs of tensors by name, in the order of the file."""
    metadata: Any = None
    """Other contents of the file, for a new file of the same format."""
    layout: object = None
    """Equal only for files with the same tensors in the same places; None if that is not known."""
    state: FileState | None = None
    """State in which it was opened."""

    @abc.abstractmethod
    def elements(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Reads some elements of a tensor, flat; several threads may ask."""

    def read_ahead(self, name: str, start: int, stop: int) -> None:  # noqa: B027 - only where it helps
        """Says that these elements are needed soon."""

    def is_before(self, name: str, other: str) -> bool:  # noqa: ARG002 - only where it is known
        """Returns True if the other tensor's elements follow directly in the file, in the same dtype."""
        return False

    @abc.abstractmethod
    def check_digest(self) -> None:
        """Compares the file with the SHA-256 beside it, in a file of the same name and `.sha256`."""

    def check_unchanged(self) -> None:
        """Refuses a file written to since it was opened: the data read may be of either version."""
        if self.state is not None:
            self.state.check(self.path)

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the file."""


def compare_digest(path: Path, found: str) -> None:
    """Compares the SHA-256 of a file with the one beside it, as `sha256sum` writes it."""
    beside = path.with_name(f"{path.name}.sha256")
    try:
        with beside.open("rb") as file:
            expected = file.read(64).decode("ascii", "replace").lower()
    except OSError as error:
        missing = f"there is no {beside.name} beside it ({error.strerror})"
        why = f"{missing}; make it with sha256sum from a copy that is intact"
        raise unreadable(path, why) from error
    if found != expected:
        raise unreadable(path, f"its SHA-256 is {found}, and {beside.name} says {expected}")


def unreadable(path: Path, why: object) -> FileError:
    """Returns the error for a file that does not match its name."""
    return FileError(f"{path} cannot be read: {why}")


AnyModel = TypeVar("AnyModel", bound=ModelFile)


@contextlib.contextmanager
def opened(model: AnyModel) -> Iterator[AnyModel]:
    """Closes it in the end."""
    try:
        yield model
    finally:
        model.close()


class ModelWriter(NamedTuple):
    """A file that takes the elements of a new model."""

    write: Callable[[str, int, NDArray[Any]], None]
    """Called with the name of a tensor, the number of the first element, and elements."""
    in_any_order: bool = True
    """False if elements must come in the order in which tensors were announced."""
    is_before: Callable[[str, str], bool] = lambda _name, _other: False
    """Returns True if elements past the end of a tensor may be written as those of the next."""


Writing = AbstractContextManager[ModelWriter]


DIGESTED_BYTES = 1 << 20
"""Bytes read at a time for a digest."""


ASKED_BYTES = 1 << 20
"""Least number of bytes for which a disk is asked ahead."""


class StoredFile(ModelFile):
    """Tensors as they are in memory; `places` says at which byte each starts.

    They are read and not mapped: a read behind the end of a file that was truncated meanwhile is an error,
    where the system would end a process that looks at mapped memory there.
    """

    places: dict[str, int]
    _descriptor = -1
    _asked = range(0)
    """The bytes that were asked for last."""

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
        """Returns the byte at which the data of a member starts, if the file is an archive."""
        return member.header_offset + local_header_bytes(member, self.bytes_at)

    def bytes_at(self, start: int, stop: int) -> bytes:
        """Reads bytes; fewer at the end of the file."""
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
        end = self.places[name] + stop * item
        if first >= end or (self._asked.start <= first and end <= self._asked.stop):
            return
        # Of many small tensors those that follow are asked for, too.
        length = min(max(end - first, ASKED_BYTES), self.num_bytes - first)
        self._asked = range(first, first + length)
        if length > 0 and not _is_in_memory(self._descriptor, first + length - 1):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._descriptor, first, length, os.POSIX_FADV_WILLNEED)

    def check_digest(self) -> None:
        """Compares the file with the SHA-256 beside it."""
        digest, room = hashlib.sha256(), np.empty(DIGESTED_BYTES, np.uint8)
        for place in range(0, self.num_bytes, DIGESTED_BYTES):
            part = room[: min(DIGESTED_BYTES, self.num_bytes - place)]
            self.read_into(part, place)
            digest.update(part.data)
        compare_digest(self.path, digest.hexdigest())

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
