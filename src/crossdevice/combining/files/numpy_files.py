"""NumPy's files: one array (.npy), or several by name (.npz)."""

from __future__ import annotations

import contextlib
import functools
import io
import threading
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import dtype_named, native
from crossdevice.combining.files.model_file import (
    ModelFile,
    ModelWriter,
    StoredFile,
    TensorSpec,
    replaced,
    unreadable,
    write_at,
)
from crossdevice.combining.files.zip_members import BAD_ARCHIVE, Checksum, StoredZip, check_members
from crossdevice.errors import FileError
from crossdevice.values.dtypes import ITEM_BYTES
from crossdevice.values.quantities import counted

HEADER_BYTES = 1 << 14
"""More than any header of an array of numbers."""

ONLY = "array"
"""Name of the one array of a .npy."""


class NumpyFile(StoredFile):
    """Arrays in a .npy or .npz, read by ranges where they are stored as they are in memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.tensors, self.places = {}, {}
        self._others: dict[str, zipfile.ZipInfo] = {}
        """Arrays that are compressed, or in another order: they are read as a whole."""
        self._checksums: dict[str, tuple[Checksum, int]] = {}
        """Stored members, and the offsets of their elements."""
        self._last: tuple[str, NDArray[Any]] | None = None
        self._reading = threading.Lock()
        try:
            if path.suffix == ".npy" and self.bytes_at(0, 2) != b"PK":  # as np.load goes by what is in a file
                self._add(ONLY, 0, None, None)
                return
            with zipfile.ZipFile(path) as archive:
                members = archive.infolist()
                check_members(members, self.num_bytes, self.bytes_at)
                for member in members:
                    self._add(member.filename.removesuffix(".npy"), self.start_of(member), member, archive)
        except FileError:
            raise
        except BAD_ARCHIVE as error:
            raise unreadable(path, error) from error

    def _add(
        self,
        name: str,
        start: int,
        member: zipfile.ZipInfo | None,
        archive: zipfile.ZipFile | None,
    ) -> None:
        if name in self.tensors:
            raise ValueError(f"array {name!r} is in it twice")
        if archive is not None and member is not None and member.compress_type != zipfile.ZIP_STORED:
            with archive.open(member) as compressed:
                header = compressed.read(HEADER_BYTES)
        else:
            header = self.bytes_at(start, start + HEADER_BYTES)
        head = io.BytesIO(header)
        shape, is_fortran, dtype = npy_header(head)
        kind = _name_of(dtype)
        if kind not in ITEM_BYTES:
            raise ValueError(f"array {name!r} has dtype {dtype}; expected one of {', '.join(ITEM_BYTES)}")
        spec = TensorSpec.checked(name, kind, shape)
        available = self.num_bytes - start if member is None else member.file_size
        if head.tell() + spec.num_bytes > available:
            raise ValueError(f"array {name!r} ends behind the end of the file, which is truncated")
        if member is not None and head.tell() + spec.num_bytes < available:
            raise ValueError(
                f"array {name!r} ends {counted(available - head.tell() - spec.num_bytes, 'byte')} too early"
            )
        self.tensors[name] = spec
        is_stored = member is None or member.compress_type == zipfile.ZIP_STORED
        if is_stored and dtype.isnative and not is_fortran:
            self.places[name] = start + head.tell()
            if member is not None:
                checksum = Checksum(member.filename, member.CRC, member.file_size)
                checksum.add(0, header[: head.tell()])
                self._checksums[name] = checksum, head.tell()
        elif member is not None:
            self._others[name] = member
        else:
            self._last = name, native(np.load(self.path, allow_pickle=False))

    def elements(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Reads elements; for a compressed array takes a part of what was decompressed."""
        if name in self.places:
            found = super().elements(name, start, stop)
            if name in self._checksums:
                checksum, place = self._checksums[name]
                try:
                    checksum.add(place + start * found.itemsize, found.view(np.uint8).data)
                except ValueError as error:
                    raise unreadable(self.path, error) from error
            return found
        with self._reading:
            if self._last is None or self._last[0] != name:
                self._last = None
                self._last = name, self._whole(name)
            return self._last[1][start:stop]

    def _whole(self, name: str) -> NDArray[Any]:
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(self._others[name]) as file:
                return native(np.lib.format.read_array(file, allow_pickle=False))
        except BAD_ARCHIVE as error:
            raise unreadable(self.path, f"array {name!r}: {error or type(error).__name__}") from error


def npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Reads the shape, whether the first axis is the fastest, and the dtype of an array in NumPy's format."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"its format is version {version[0]}.{version[1]}; expected 1.0, 2.0 or 3.0")
    length = file.read(2 if version == (1, 0) else 4)
    return _parsed_header(version == (1, 0), length + file.read(int.from_bytes(length, "little")))


@functools.lru_cache(maxsize=256)
def _name_of(dtype: np.dtype[Any]) -> str:
    """Returns the name of a dtype, cached since NumPy builds it on each access."""
    return dtype.name


@functools.lru_cache(maxsize=256)
def _parsed_header(is_short: bool, header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Parses the header behind its version; cached, as models have many arrays of few shapes."""
    read = np.lib.format.read_array_header_1_0 if is_short else np.lib.format.read_array_header_2_0
    return read(io.BytesIO(header))


@contextlib.contextmanager
def written_npz(path: Path, tensors: Mapping[str, TensorSpec], _like: ModelFile) -> Iterator[ModelWriter]:
    """Writes one array after another, not compressed."""
    with replaced(path) as file:
        archive = StoredZip(file)
        current: str | None = None

        def write(name: str, start: int, elements: NDArray[Any]) -> None:  # noqa: ARG001 - in order
            nonlocal current
            if name != current:
                current, header = name, _header(tensors[name], path, name)
                archive.begin(f"{name}.npy", len(header) + tensors[name].num_bytes)
                archive.write(header)
            if elements.size:
                archive.write(elements.view(np.uint8).data)

        yield ModelWriter(write, in_any_order=False)
        archive.finish()


@contextlib.contextmanager
def written_npy(path: Path, tensors: Mapping[str, TensorSpec], _like: ModelFile) -> Iterator[ModelWriter]:
    """Writes a single array."""
    if len(tensors) != 1:
        raise FileError(
            f"{path} can hold one array, not {len(tensors)}; expected an output that ends in .npz"
        )
    ((name, spec),) = tensors.items()
    with replaced(path) as file:
        data = file.write(_header(spec, path, name))
        file.flush()
        yield ModelWriter(
            lambda _, start, elements: write_at(file, data + start * elements.itemsize, elements)
        )


def _header(spec: TensorSpec, path: Path, name: str) -> bytes:
    dtype = dtype_named(spec.dtype)
    if dtype.isbuiltin != 1:  # some of the others are written without a word, and not read again
        raise FileError(f"{path} cannot hold {name!r}: NumPy's files have no {spec.dtype}")
    return _made_header(dtype.str, spec.shape)


@functools.lru_cache(maxsize=256)
def _made_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    head = io.BytesIO()
    described = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_2_0(head, described)
    return head.getvalue()
