"""safetensors: the length of a header in 8 bytes, the header as JSON, and the bytes of all tensors."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from crossdevice.combining.files.model_file import (
    MAX_HEADER_BYTES,
    ModelFile,
    ModelWriter,
    TensorSpec,
    unreadable,
)
from crossdevice.combining.files.replacing import replaced, write_at
from crossdevice.combining.files.stored_file import StoredFile
from crossdevice.errors import FileError

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
        self.tensors, self.places = {}, {}
        header, start = self._header()
        self.metadata = header.pop("__metadata__", None)
        try:
            rows = sorted(header.items(), key=lambda row: row[1]["data_offsets"])
            place = start
            for name, row in rows:
                begin, end = row["data_offsets"]
                self._add(name, row["dtype"], tuple(row["shape"]), start + begin, start + end)
                if start + begin != place:
                    raise unreadable(path, f"tensor {name!r} does not begin where the one before it ends")
                place = start + end
        except FileError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise unreadable(path, f"its header is not one of safetensors: {error!r}") from error
        if place != self.num_bytes:
            raise unreadable(path, f"it has {self.num_bytes} bytes, and its tensors end at byte {place}")

    def is_before(self, name: str, other: str) -> bool:
        """As the format has them, in the order of their bytes."""
        first = self.tensors[name]
        is_next = self.places[name] + first.num_bytes == self.places[other]
        return is_next and first.dtype == self.tensors[other].dtype

    def _header(self) -> tuple[dict[str, Any], int]:
        length = int.from_bytes(self.bytes_at(0, LENGTH_BYTES), "little")
        start = LENGTH_BYTES + length
        if self.num_bytes < start or not length:
            raise unreadable(
                self.path, f"it has {self.num_bytes} bytes, fewer than its header; it may be truncated"
            )
        if length > MAX_HEADER_BYTES:
            raise unreadable(self.path, f"its header has {length} bytes; expected at most {MAX_HEADER_BYTES}")
        try:
            header = json.loads(self.bytes_at(LENGTH_BYTES, start), object_pairs_hook=_without_duplicates)
        except (ValueError, RecursionError, MemoryError) as error:
            raise unreadable(self.path, f"its header is not valid JSON: {error}") from error
        if not isinstance(header, dict):
            raise unreadable(self.path, "its header is not a JSON object")
        return header, start

    def _add(self, name: str, dtype: str, shape: tuple[int, ...], begin: int, end: int) -> None:
        if dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise unreadable(self.path, f"tensor {name!r} has dtype {dtype}; expected one of {known}")
        spec = TensorSpec.checked(name, DTYPES[dtype], shape)
        if not type(begin) is type(end) is int or not self.num_bytes >= begin >= 0:
            raise ValueError(f"tensor {name!r} is at bytes {begin!r:.30} to {end!r:.30}")
        name.encode()  # ValueError for what cannot be written again
        if end > self.num_bytes:
            raise unreadable(
                self.path,
                f"tensor {name!r} ends at byte {end} of {self.num_bytes}; the file is truncated",
            )
        if end - begin != spec.num_bytes:
            raise unreadable(
                self.path,
                f"tensor {name!r} has {end - begin} bytes; shape {list(shape)} of {dtype} needs "
                f"{spec.num_bytes}",
            )
        self.tensors[name], self.places[name] = spec, begin


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of two entries of one name Python would take the last one without a word."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError(f"{Counter(name for name, _ in pairs).most_common(1)[0][0]!r} is in it twice")
    return entries


@contextlib.contextmanager
def written_safetensors(
    path: Path, tensors: Mapping[str, TensorSpec], like: ModelFile
) -> Iterator[ModelWriter]:
    """A file with the metadata of another one of the format."""
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
    """Returns True for what the format allows: strings by strings."""
    return isinstance(found, dict) and all(
        isinstance(key, str) and isinstance(value, str) for key, value in found.items()
    )
