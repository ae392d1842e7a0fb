"""safetensors: the length of a header in 8 bytes, the header as JSON, and the bytes of all tensors."""

from __future__ import annotations

import contextlib
import json
import os
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from crossdevice.combining.files.model_file import (
    MAX_HEADER_BYTES,
    ModelFile,
    ModelWriter,
    StoredFile,
    TensorSpec,
    replaced,
    unreadable,
    write_at,
)
from crossdevice.errors import FileError
from crossdevice.values.quantities import counted

LENGTH_BYTES = 8

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class SafetensorsFile(StoredFile):
    """One file of the format."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        text = self._header_text()
        self.layout = self._header = _known_headers.get((self.num_bytes, text)) or _Header(
            path, text, self.num_bytes
        )
        _known_headers[self.num_bytes, text] = self._header
        self.tensors, self.places = self._header.tensors, self._header.places
        self.metadata = self._header.metadata

    def is_before(self, name: str, other: str) -> bool:
        """Compares by position in the file, the order of their bytes."""
        return self._header.following.get(name) == other

    def _header_text(self) -> bytes:
        length = int.from_bytes(self.bytes_at(0, LENGTH_BYTES), "little")
        start = LENGTH_BYTES + length
        if self.num_bytes < start or not length:
            raise unreadable(
                self.path,
                f"it has {counted(self.num_bytes, 'byte')}, fewer than its header; it may be truncated",
            )
        if length > MAX_HEADER_BYTES:
            raise unreadable(self.path, f"its header has {length} bytes; expected at most {MAX_HEADER_BYTES}")
        return self.bytes_at(LENGTH_BYTES, start)


class _Header:
    """Checked header of a file of this many bytes; files of one model share it while they are open."""

    def __init__(self, path: Path, text: bytes, num_bytes: int) -> None:
        self.tensors: dict[str, TensorSpec] = {}
        self.places: dict[str, int] = {}
        self.following: dict[str, str] = {}
        """Tensor with the following bytes, if it has the same dtype."""
        self._path, self._num_bytes = path, num_bytes
        try:
            header = json.loads(text, object_pairs_hook=_without_duplicates)
        except (ValueError, RecursionError, MemoryError) as error:
            raise unreadable(path, f"its header is not valid JSON: {error}") from error
        if not isinstance(header, dict):
            raise unreadable(path, "its header is not a JSON object")
        self.metadata = header.pop("__metadata__", None)
        place = LENGTH_BYTES + len(text)
        try:
            place = self._add_all(header, place)
        except FileError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise unreadable(path, f"its header is not one of safetensors: {error!r}") from error
        if place != num_bytes:
            raise unreadable(
                path, f"it has {counted(num_bytes, 'byte')}, and its tensors end at byte {place}"
            )

    def _add_all(self, header: dict[str, Any], start: int) -> int:
        """Adds all tensors, in the order of their bytes; returns where they end."""
        specs: dict[tuple[str, tuple[int, ...]], tuple[TensorSpec, int]] = {}
        place, last, last_dtype = start, "", ""
        for name, row in sorted(header.items(), key=lambda row: row[1]["data_offsets"]):
            begin, end = row["data_offsets"]
            key = row["dtype"], tuple(row["shape"])
            if key not in specs or not all(type(length) is int for length in key[1]):
                specs[key] = self._spec(name, *key)
            spec, num_bytes = specs[key]
            self._check(name, key, start + begin, start + end, num_bytes)
            if start + begin != place:
                raise unreadable(self._path, f"tensor {name!r} does not begin where the one before it ends")
            self.tensors[name], self.places[name] = spec, place
            if spec.dtype == last_dtype:
                self.following[last] = name
            place, last, last_dtype = start + end, name, spec.dtype
        return place

    def _spec(self, name: str, dtype: str, shape: tuple[int, ...]) -> tuple[TensorSpec, int]:
        if dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise unreadable(self._path, f"tensor {name!r} has dtype {dtype}; expected one of {known}")
        spec = TensorSpec.checked(name, DTYPES[dtype], shape)
        return spec, spec.num_bytes

    def _check(
        self, name: str, key: tuple[str, tuple[int, ...]], begin: int, end: int, num_bytes: int
    ) -> None:
        if not type(begin) is type(end) is int or not self._num_bytes >= begin >= 0:
            raise ValueError(f"tensor {name!r} is at bytes {begin!r:.30} to {end!r:.30}")
        if not name.isascii():
            name.encode()  # ValueError for what cannot be written again
        if end > self._num_bytes:
            raise unreadable(
                self._path,
                f"tensor {name!r} ends at byte {end} of {self._num_bytes}; the file is truncated",
            )
        if end - begin != num_bytes:
            raise unreadable(
                self._path,
                f"tensor {name!r} has {end - begin} bytes; shape {list(key[1])} of {key[0]} needs "
                f"{num_bytes}",
            )


_known_headers: weakref.WeakValueDictionary[tuple[int, bytes], _Header] = weakref.WeakValueDictionary()


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds a JSON object; refuses duplicate names: Python would silently take the last."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError(f"{Counter(name for name, _ in pairs).most_common(1)[0][0]!r} is in it twice")
    return entries


@contextlib.contextmanager
def written_safetensors(
    path: Path, tensors: Mapping[str, TensorSpec], like: ModelFile
) -> Iterator[ModelWriter]:
    """Writes a file with the metadata of another one of the format."""
    header: dict[str, Any] = {"__metadata__": like.metadata} if _is_metadata(like.metadata) else {}
    end = 0
    for name, spec in tensors.items():
        offsets = [end, end + spec.num_bytes]
        header[name] = {"dtype": NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    with replaced(path) as file:
        if hasattr(os, "posix_fallocate"):
            # A disk that is too small is found out now.
            os.posix_fallocate(file.fileno(), 0, LENGTH_BYTES + len(text) + end)
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        file.flush()
        data = LENGTH_BYTES + len(text)

        def write(name: str, start: int, elements: NDArray[Any]) -> None:
            place = data + header[name]["data_offsets"][0] + start * elements.itemsize
            write_at(file, place, elements)

        def is_before(name: str, other: str) -> bool:
            return bool(header[name]["data_offsets"][1] == header[other]["data_offsets"][0])

        yield ModelWriter(write, is_before=is_before)


def _is_metadata(found: Any) -> bool:
    """Returns True for metadata that the format allows: strings by strings."""
    return isinstance(found, dict) and all(
        isinstance(key, str) and isinstance(value, str) for key, value in found.items()
    )
