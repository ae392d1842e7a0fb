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

from crossdevice.combining.files.mapped_file import MappedFile
from crossdevice.combining.files.model_file import ModelFile, ModelWriter, TensorSpec, unreadable
from crossdevice.combining.files.replacing import replaced, write_at

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


class SafetensorsFile(MappedFile):
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
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise unreadable(path, f"its header is not one of safetensors: {error!r}") from error
        if place != self.num_bytes:
            raise unreadable(path, f"it has {self.num_bytes} bytes, and its tensors end at byte {place}")

    def _header(self) -> tuple[dict[str, Any], int]:
        length = int.from_bytes(self.bytes_at(0, LENGTH_BYTES), "little")
        start = LENGTH_BYTES + length
        if self.num_bytes < start or not length:
            raise unreadable(
                self.path, f"it has {self.num_bytes} bytes, fewer than its header; it may be truncated"
            )
        try:
            header = json.loads(self.bytes_at(LENGTH_BYTES, start), object_pairs_hook=_without_duplicates)
        except (ValueError, RecursionError) as error:
            raise unreadable(self.path, f"its header is not valid JSON: {error}") from error
        if not isinstance(header, dict):
            raise unreadable(self.path, "its header is not a JSON object")
        return header, start

    def _add(self, name: str, dtype: str, shape: tuple[int, ...], begin: int, end: int) -> None:
        if dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise unreadable(self.path, f"tensor {name!r} has dtype {dtype}; expected one of {known}")
        if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
            raise unreadable(
                self.path, f"tensor {name!r} has shape {list(shape)}; expected whole numbers, 0 or more"
            )
        spec = TensorSpec(DTYPES[dtype], shape)
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

        yield ModelWriter(write)


def _is_metadata(found: Any) -> bool:
    """Whether it is what the format allows: strings by strings."""
    return isinstance(found, dict) and all(
        isinstance(key, str) and isinstance(value, str) for key, value in found.items()
    )
