"""Trees that arrive one by one: their leaves by path, and their common structure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

from crossdevice.combining.leaf_total import Leaf
from crossdevice.errors import ConversionError, StructureMismatchError
from crossdevice.execution.reading.values import backend_of, few, read_value
from crossdevice.values.device import device_of, host_device
from crossdevice.values.dtypes import ITEM_BYTES
from crossdevice.values.nesting import flatten, unflatten

ROOT = "tree"


class ArrivedTree(NamedTuple):
    """A tree with paths in place of its arrays, and the arrays by path."""

    skeleton: Any
    leaves: dict[str, tuple[Leaf, Any]]


def read_tree(tree: Any) -> ArrivedTree:
    """Returns an array or a tree of arrays of any library, checked.

    >>> read_tree({"a": [1.0], "b": 2.0}).skeleton
    {'a': "tree['a']", 'b': "tree['b']"}
    """
    value = read_value(tree, ROOT)
    if len(value.components) > 1:
        raise ConversionError(
            f"a distributed value of {len(value.components)} replicas cannot be added; add them one by one"
        )
    leaves: dict[str, tuple[Leaf, Any]] = {}
    for read in value.leaves:
        (array,) = read.arrays
        where = read.path or ROOT
        if read.is_sparse:
            raise ConversionError(
                f"{where} is sparse; expected a dense array (crossdevice.to_dense makes one)"
            )
        backend = backend_of(array, 0, read.path)
        backend.check_array(array, where)
        dtype = backend.dtype_of(array)
        if dtype not in ITEM_BYTES:
            raise ConversionError(f"{where} has dtype {dtype}; expected one of {', '.join(ITEM_BYTES)}")
        device = device_of(array) or host_device(0)
        leaves[read.path] = Leaf(backend, dtype, backend.shape_of(array), device), array
    if value.structure is None:
        return ArrivedTree("", leaves)
    return ArrivedTree(unflatten(value.structure, list(leaves)), leaves)


def rebuilt(skeleton: Any, results: Mapping[str, Any]) -> Any:
    """Rebuilds the tree with results in place of their paths."""
    paths, structure = flatten(skeleton)
    return unflatten(structure, [results[path] for path in paths])


def check_same(known: Any, found: Any, name: str) -> None:
    """Refuses a tree of another structure, and says where it differs."""
    if flatten(known) == flatten(found):
        return
    before, now = flatten(known)[0], flatten(found)[0]
    lacking = [path for path in before if path not in set(now)]
    more = [path for path in now if path not in set(before)]
    parts = [f"{word} {few(paths)}" for word, paths in (("lacks", lacking), ("has", more)) if paths]
    if not parts:
        parts = [f"is made of other containers: {flatten(found)[1]}"]
    raise StructureMismatchError(
        f"{name} {' and '.join(parts)}, unlike those before it; if dicts may be incomplete, use partial=True"
    )


def united(known: Any, found: Any, name: str, path: str = ROOT) -> Any:
    """Merges the entries of both trees; only dicts may differ."""
    if isinstance(known, dict) and isinstance(found, dict):
        both = {
            key: united(known[key], found[key], name, f"{path}[{key!r}]") for key in known if key in found
        }
        entries = {**known, **found, **both}
        return OrderedDict(entries) if isinstance(known, OrderedDict) else entries
    if flatten(known) != flatten(found):
        raise StructureMismatchError(
            f"{name} has another structure at {path}, {flatten(found)[1]}; those before it have "
            f"{flatten(known)[1]}, and only dicts may differ"
        )
    return known
