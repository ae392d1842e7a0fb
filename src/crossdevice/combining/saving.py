"""Accumulators as files: an `.npz` of the sums, and all that is no array as JSON beside them."""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from collections.abc import Mapping
from fractions import Fraction
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.registry import backend_named
from crossdevice.combining.files.model_file import MAX_HEADER_BYTES, TensorSpec, opened, replaced
from crossdevice.combining.files.numpy_files import NumpyFile
from crossdevice.combining.files.zip_members import MOST_COMPRESSED
from crossdevice.combining.trees import INTEGERS, Leaf, LeafTotal, num_parts
from crossdevice.errors import ConversionError, FileError
from crossdevice.kernels.host.reference.running import NUM_PARTS
from crossdevice.kernels.host.running_sum import sum_family
from crossdevice.values.device import Device
from crossdevice.values.dtypes import ITEM_BYTES, PARTS
from crossdevice.values.nesting import flatten
from crossdevice.values.quantities import counted, with_article

FORMAT = "crossdevice accumulator 1"
WIDENED_FORMAT = "crossdevice accumulator 2"
"""Format for sums with more parts than usual, which older versions would not read completely."""

CONTAINERS: dict[str, type[Any]] = {"dict": dict, "OrderedDict": OrderedDict, "list": list, "tuple": tuple}


def save(
    file: str | PathLike[str], header: Mapping[str, Any], skeleton: Any, totals: Mapping[str, LeafTotal]
) -> None:
    """Writes to a new file, which replaces an old one when it is complete."""
    arrays: dict[str, Any] = {}
    leaves = []
    format_name = FORMAT
    for number, (path, total) in enumerate(totals.items()):
        leaf, running = total.leaf, total.running
        row: dict[str, Any] = {
            "path": path,
            "library": leaf.backend.name,
            "dtype": leaf.dtype,
            "shape": leaf.shape,
            "device": str(leaf.device),
            "weight": str(total.weight),
        }
        if running is None:
            arrays[f"{number}/kept"] = total.kept
        else:
            row["fractions"] = {element: str(value) for element, value in running.fractions.items()}
            row["specials"] = running.all_specials
            row["parts"] = len(running.parts)
            if len(running.parts) > NUM_PARTS[sum_family(running.dtype, "exact")]:
                format_name = WIDENED_FORMAT
            arrays.update({f"{number}/{part}": values for part, values in enumerate(running.parts)})
        leaves.append(row)
    text = json.dumps(
        {"format": format_name, **header, "tree": described(skeleton), "leaves": leaves}
    ).encode()
    with replaced(file) as new:
        np.savez(new, header=np.frombuffer(text, np.uint8), **arrays)


def load(file: str | PathLike[str]) -> tuple[dict[str, Any], Any, dict[str, LeafTotal]]:
    """Reads the header, the skeleton and the totals; rejects implausible sizes before allocating."""
    try:
        with opened(NumpyFile(Path(file))) as arrays:
            header = json.loads(_array(arrays, "header", "uint8").tobytes())
            if header.get("format") not in (FORMAT, WIDENED_FORMAT):
                raise FileError(f"{file} has format {header.get('format')!r:.60}; expected {FORMAT!r}")
            rows = header["leaves"]
            totals = {row["path"]: _total(row, number, arrays, header) for number, row in enumerate(rows)}
            skeleton = undescribed(header["tree"])
            if sorted(flatten(skeleton)[0]) != sorted(totals) or len(totals) < len(rows):
                raise ValueError("its tree does not have the leaves that it lists")
            if type(header["count"]) is not int or header["count"] < 0:
                raise ValueError(f"its count is {header['count']!r:.60}; expected a whole number, 0 or more")
    except _UNREADABLE as error:
        if isinstance(error, FileError):
            raise
        raise FileError(
            f"{file} cannot be read as a saved accumulator: {error or type(error).__name__}"
        ) from error
    return header, skeleton, totals


_UNREADABLE = (
    *(OSError, KeyError, IndexError, ValueError, TypeError, AttributeError),
    *(OverflowError, RecursionError, MemoryError),
)
"""Errors of bytes that are not an accumulator."""


def _array(arrays: NumpyFile, name: str, dtype: str, size: int | None = None) -> NDArray[Any]:
    """Reads a flat array of a file, of this dtype and size (None: any that a header may have)."""
    found = arrays.tensors[name]
    if size is None and len(found.shape) == 1 and found.num_bytes <= MAX_HEADER_BYTES:
        size = found.num_elements
    if found != TensorSpec(dtype, (size,) if size is not None else ()):
        raise ValueError(
            f"array {name!r} is {found.dtype} of shape {found.shape}; expected {dtype} of ({size},)"
        )
    return arrays.elements(name, 0, found.num_elements)


def _total(row: Mapping[str, Any], number: int, arrays: NumpyFile, header: Mapping[str, Any]) -> LeafTotal:
    dtype, path = row["dtype"], row["path"]
    if dtype not in ITEM_BYTES or type(path) is not str:
        raise ValueError(
            f"leaf {path!r:.60} has dtype {dtype!r:.60}; expected one of {', '.join(ITEM_BYTES)}"
        )
    if header["precision"] not in ("accurate", "exact") or header["integers"] not in INTEGERS:
        raise ValueError(f"its settings are {header['precision']!r:.60} and {header['integers']!r:.60}")
    spec = TensorSpec.checked(path, dtype, tuple(row["shape"]))
    leaf = Leaf(backend_named(row["library"]), dtype, spec.shape, Device.parse(row["device"]))
    # All that is kept of a leaf is in the file, so no more memory is taken than that has bytes.
    if spec.num_elements * ITEM_BYTES[dtype] > arrays.num_bytes * MOST_COMPRESSED:
        raise ValueError(f"leaf {path!r} has shape {spec.shape}, more than the file holds")
    parts = num_parts(leaf, header["precision"], header["integers"])
    if parts and row.get("parts", parts) != parts:
        parts = _widened_parts(row["parts"], parts, header["precision"])
    size = spec.num_elements * (2 if dtype in PARTS else 1)
    held = [_array(arrays, f"{number}/{part}", "float64", size) for part in range(parts)]
    kept = None if parts else _array(arrays, f"{number}/kept", dtype, size)
    total = LeafTotal(leaf, header["precision"], header["integers"])
    total.merged_weight = _fraction(row["weight"])
    total.kept = kept
    if total.running is None:
        return total
    while len(total.running.parts) < parts:
        total.running.widen()
    for values, found in zip(total.running.parts, held, strict=True):
        values[:] = found
    for name, read in (("fractions", _fraction), ("specials", _special)):
        numbers = {int(element): read(value) for element, value in row[name].items()}
        if not all(0 <= element < size for element in numbers):
            raise ValueError(f"leaf {path!r} has {name} outside of its {counted(size, 'element')}")
        getattr(total.running, name).update(numbers)
    return total


def _widened_parts(found: Any, usual: int, precision: Any) -> int:
    if precision != "exact" or type(found) is not int or not usual < found <= max(NUM_PARTS.values()):
        raise ValueError(f"a leaf has {found!r:.60} parts; expected {usual}")
    return found


def _fraction(text: Any) -> Fraction:
    """Parses a saved number: whole numbers, with bounded length."""
    if type(text) is not str or _FRACTION.fullmatch(text) is None:
        raise ValueError(f"{text!r:.60} is not a fraction as accumulators save them")
    return Fraction(text)


_FRACTION = re.compile(r"-?[0-9]{1,2000}(/0{0,2000}[1-9][0-9]{0,2000})?")
"""Sums of products of float64 have at most 700 digits above and below the line."""


def _special(value: Any) -> float:
    if type(value) is not float or math.isfinite(value):
        raise ValueError(f"{value!r:.60} is not an infinity or NaN")
    return value


def described(node: Any) -> Any:
    """Encodes a skeleton as JSON: containers by name, leaves as their paths."""
    if node is None or isinstance(node, str):
        return node
    name = type(node).__name__
    if CONTAINERS.get(name) is not type(node):
        raise ConversionError(
            f"a tree with {with_article(name)} cannot be saved; expected {', '.join(CONTAINERS)}"
        )
    if not isinstance(node, dict):
        return {name: [described(child) for child in node]}
    for key in node:
        if type(key) not in (str, int, bool):
            raise ConversionError(
                f"a tree with the key {key!r} cannot be saved; expected strings or integers"
            )
    return {name: [[key, described(child)] for key, child in node.items()]}


def undescribed(node: Any) -> Any:
    """Decodes a skeleton from `described`."""
    if node is None or isinstance(node, str):
        return node
    ((name, children),) = node.items()
    if issubclass(CONTAINERS[name], dict):
        return CONTAINERS[name]((key, undescribed(child)) for key, child in children)
    return CONTAINERS[name](map(undescribed, children))
