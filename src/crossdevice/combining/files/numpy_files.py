"""NumPy's files: one array (.npy), or several by name (.npz)."""

from __future__ import annotations

import contextlib
import io
import threading
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.host_memory import native
from crossdevice.backends.protocol import dtype_named
from crossdevice.combining.files.mapped_file import MappedFile
from crossdevice.combining.files.model_file import ModelFile, ModelWriter, TensorSpec, unreadable
from crossdevice.combining.files.replacing import replaced, write_at
from crossdevice.errors import FileError
from crossdevice.values.dtypes import ITEM_BYTES

HEADER_BYTES = 1 << 16
"""More than any header of an array of numbers."""

LOCAL_HEADER_BYTES = 30
"""The fixed part of a member's header in an archive, before its name and extra fields."""

ONLY = "array"
"""What the one array of a .npy is called."""


class NumpyFile(MappedFile):
    """Arrays in a .npy or .npz, as views where they are stored as they are in memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.tensors, self.places = {}, {}
        self._others: dict[str, zipfile.ZipInfo] = {}
        """Arrays that are compressed, or in another order: they are read as a whole."""
        self._last: tuple[str, NDArray[Any]] | None = None
        self._reading = threading.Lock()
        try:
            if path.suffix == ".npy":
                self._add(ONLY, 0, None)
                return
            with zipfile.ZipFile(path) as archive:
                for member in archive.infolist():
                    self._add(member.filename.removesuffix(".npy"), self._start_of(member), member)
        except (ValueError, zipfile.BadZipFile, EOFError) as error:
            raise unreadable(path, error) from error

    def _start_of(self, member: zipfile.ZipInfo) -> int:
        header = self.bytes_at(member.header_offset, member.header_offset + LOCAL_HEADER_BYTES)
        lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        return member.header_offset + LOCAL_HEADER_BYTES + lengths

    def _add(self, name: str, start: int, member: zipfile.ZipInfo | None) -> None:
        is_stored = member is None or member.compress_type == zipfile.ZIP_STORED
        if is_stored:
            head: IO[bytes] = io.BytesIO(self.bytes_at(start, start + HEADER_BYTES))
            shape, is_fortran, dtype = npy_header(head)
            start += head.tell()
        else:
            assert member is not None
            with zipfile.ZipFile(self.path) as archive, archive.open(member) as head:
                shape, is_fortran, dtype = npy_header(head)
        if dtype.name not in ITEM_BYTES:
            raise ValueError(f"array {name!r} has dtype {dtype}; expected one of {', '.join(ITEM_BYTES)}")
        spec = TensorSpec(dtype.name, shape)
        if is_stored and start + spec.num_bytes > self.num_bytes:
            raise ValueError(f"array {name!r} ends behind the end of the file, which is truncated")
        self.tensors[name] = spec
        if is_stored and dtype.isnative and not is_fortran:
            self.places[name] = start
        elif member is not None:
            self._others[name] = member
        else:
            self._last = name, native(np.load(self.path, allow_pickle=False))

    def elements(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """A view of the file; of a compressed array, a part of what was read."""
        if name in self.places:
            return super().elements(name, start, stop)
        with self._reading:
            if self._last is None or self._last[0] != name:
                self._last = name, self._whole(name)
            return self._last[1][start:stop]

    def _whole(self, name: str) -> NDArray[Any]:
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(self._others[name]) as file:
                return native(np.lib.format.read_array(file, allow_pickle=False))
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise unreadable(self.path, f"array {name!r}: {error}") from error


def npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """The shape, whether the first axis is the fastest, and the dtype of an array in NumPy's format."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(file)


@contextlib.contextmanager
def written_npz(path: Path, tensors: Mapping[str, TensorSpec], _like: ModelFile) -> Iterator[ModelWriter]:
    """One array after another, not compressed."""
    with replaced(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        member: IO[bytes] | None = None
        current: str | None = None

        def write(name: str, start: int, elements: NDArray[Any]) -> None:  # noqa: ARG001 - in order
            nonlocal member, current
            if name != current:
                if member is not None:
                    member.close()
                member, current = archive.open(f"{name}.npy", "w", force_zip64=True), name
                _write_header(member, tensors[name], path, name)
            assert member is not None
            member.write(elements.view("uint8").data)

        try:
            yield ModelWriter(write, in_any_order=False)
        finally:
            if member is not None:
                member.close()


@contextlib.contextmanager
def written_npy(path: Path, tensors: Mapping[str, TensorSpec], _like: ModelFile) -> Iterator[ModelWriter]:
    """The only array there is."""
    if len(tensors) != 1:
        raise FileError(
            f"{path} can hold one array, not {len(tensors)}; expected an output that ends in .npz"
        )
    ((name, spec),) = tensors.items()
    with replaced(path) as file:
        _write_header(file, spec, path, name)
        file.flush()
        data = file.tell()
        yield ModelWriter(
            lambda _, start, elements: write_at(file, data + start * elements.itemsize, elements)
        )


def _write_header(file: IO[bytes] | BinaryIO, spec: TensorSpec, path: Path, name: str) -> None:
    dtype = dtype_named(spec.dtype)
    if dtype.isbuiltin != 1:  # some of the others are written without a word, and not read again
        raise FileError(f"{path} cannot hold {name!r}: NumPy's files have no {spec.dtype}")
    described = {"descr": dtype.str, "fortran_order": False, "shape": spec.shape}
    np.lib.format.write_array_header_2_0(file, described)
