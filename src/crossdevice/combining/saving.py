"""Accumulators as files: an `.npz` of the sums, and all that is no array as JSON beside them."""

from __future__ import annotations

import json
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from fractions import Fraction
from os import PathLike
from typing import Any

import numpy as np

from crossdevice.backends.registry import backend_named
from crossdevice.combining.files.replacing import replaced
from crossdevice.combining.leaf_total import Leaf, LeafTotal
from crossdevice.errors import ConversionError, FileError
from crossdevice.values.device import Device

FORMAT = "crossdevice accumulator 1"

CONTAINERS: dict[str, type[Any]] = {"dict": dict, "OrderedDict": OrderedDict, "list": list, "tuple": tuple}


def save(
    file: str | PathLike[str], header: Mapping[str, Any], skeleton: Any, totals: Mapping[str, LeafTotal]
) -> None:
    """Writes to a new file that takes the place of an old one when it is complete."""
    arrays: dict[str, Any] = {}
    leaves = []
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
            row["specials"] = running.specials
            arrays.update({f"{number}/{part}": values for part, values in enumerate(running.parts)})
        leaves.append(row)
    described = {"format": FORMAT, **header, "tree": _described(skeleton), "leaves": leaves}
    text = json.dumps(described).encode()
    with replaced(file) as opened:
        np.savez(opened, header=np.frombuffer(text, np.uint8), **arrays)


def load(file: str | PathLike[str]) -> tuple[dict[str, Any], Any, dict[str, LeafTotal]]:
    """The header, the skeleton and the totals that were saved."""
    try:
        with open(file, "rb") as opened, np.load(opened, allow_pickle=False) as arrays:
            header = json.loads(arrays["header"].tobytes())
            if header.get("format") != FORMAT:
                raise FileError(f"{file} has format {header.get('format')!r}; expected {FORMAT!r}")
            totals = {
                row["path"]: _total(row, number, arrays, header)
                for number, row in enumerate(header["leaves"])
            }
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{file} cannot be read as a saved accumulator: {error}") from error
    return header, _undescribed(header["tree"]), totals


def _total(row: Mapping[str, Any], number: int, arrays: Any, header: Mapping[str, Any]) -> LeafTotal:
    leaf = Leaf(backend_named(row["library"]), row["dtype"], tuple(row["shape"]), Device.parse(row["device"]))
    total = LeafTotal(leaf, header["precision"], header["integers"])
    total.merged_weight = Fraction(row["weight"])
    if total.running is None:
        total.kept = arrays[f"{number}/kept"]
        return total
    for part, values in enumerate(total.running.parts):
        values[:] = arrays[f"{number}/{part}"]
    for name, kind in (("fractions", Fraction), ("specials", float)):
        found = {int(element): kind(value) for element, value in row[name].items()}
        getattr(total.running, name).update(found)
    return total


def _described(node: Any) -> Any:
    """A skeleton as JSON: containers by name, leaves as their paths."""
    if node is None or isinstance(node, str):
        return node
    name = type(node).__name__
    if CONTAINERS.get(name) is not type(node):
        raise ConversionError(f"a tree with a {name} cannot be saved; expected {', '.join(CONTAINERS)}")
    if not isinstance(node, dict):
        return {name: [_described(child) for child in node]}
    for key in node:
        if type(key) not in (str, int, bool):
            raise ConversionError(
                f"a tree with the key {key!r} cannot be saved; expected strings or integers"
            )
    return {name: [[key, _described(child)] for key, child in node.items()]}


def _undescribed(node: Any) -> Any:
    if node is None or isinstance(node, str):
        return node
    ((name, children),) = node.items()
    if issubclass(CONTAINERS[name], dict):
        return CONTAINERS[name]((key, _undescribed(child)) for key, child in children)
    return CONTAINERS[name](map(_undescribed, children))
