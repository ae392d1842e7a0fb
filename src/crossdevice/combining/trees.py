"""Trees that arrive one by one: their common structure, their leaves by path, and the total of each leaf."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import Backend, dtype_named
from crossdevice.errors import (
    ConversionError,
    DtypeMismatchError,
    LibraryMismatchError,
    MismatchError,
    OptionError,
    ShapeMismatchError,
    StructureMismatchError,
)
from crossdevice.execution.reading.values import backend_of, few, read_value
from crossdevice.kernels.host.reference.running import NUM_PARTS
from crossdevice.kernels.host.resources.pool import result_pool
from crossdevice.kernels.host.running_sum import RunningSum, sum_family, write_all
from crossdevice.values.device import Device, device_of, host_device
from crossdevice.values.dtypes import ITEM_BYTES, PARTS
from crossdevice.values.nesting import flatten, unflatten
from crossdevice.values.options import Precision

Integers = Literal["mean", "first", "max"]
INTEGERS: tuple[Integers, ...] = ("mean", "first", "max")
"""Treatment of integers and booleans, which have no mean in their dtype: the mean rounded to nearest even,
the first value, or the largest."""


class Leaf(NamedTuple):
    """Shape and dtype of all arrays of one place in the tree."""

    backend: Backend
    dtype: str
    shape: tuple[int, ...]
    device: Device


class LeafTotal:
    """The sum of one leaf of all models that had it, and the sum of their weights."""

    def __init__(self, leaf: Leaf, precision: Precision, integers: Integers) -> None:
        self.leaf = leaf
        self.weights: list[float] = []
        """Weights of the trees that had the leaf; merged or loaded ones are in `merged_weight`."""
        self.merged_weight = Fraction(0)
        self.running: RunningSum | None = None
        self.kept: NDArray[Any] | None = None
        """Integers that are not summed: the first, or the largest so far."""
        self.dtype = dtype_named(leaf.dtype)
        self.size = int(np.prod(leaf.shape, dtype=np.int64))
        self._takes_largest = integers == "max"
        if num_parts(leaf, precision, integers):
            part = dtype_named(PARTS.get(leaf.dtype, leaf.dtype))
            size = self.size * (2 if leaf.dtype in PARTS else 1)
            self.running = RunningSum(size, part, precision)

    @property
    def weight(self) -> Fraction:
        """The sum of all weights, without any rounding."""
        return self.merged_weight + _sum_of(tuple(self.weights))

    def enter(self, flats: Sequence[NDArray[Any]], weights: Sequence[float]) -> list[NDArray[Any]]:
        """Counts flat arrays and returns them as `running` takes them; none if the leaf is not summed."""
        self.weights += weights
        if self.running is not None:
            return [flat.view(self.running.dtype) for flat in flats]
        for flat in flats:
            self._keep(flat)
        return []

    def merge(self, other: LeafTotal) -> None:
        """Adds the contents of another total of the same leaf."""
        self.merged_weight += other.weight
        if self.running is not None and other.running is not None:
            self.running.merge(other.running)
        elif other.kept is not None:
            self._keep(other.kept)

    def _keep(self, flat: NDArray[Any]) -> None:
        if self.kept is None:
            self.kept = flat.copy()
        elif self._takes_largest:
            np.maximum(self.kept, flat, out=self.kept)


def divisor_of(weight: Fraction, path: str) -> Fraction:
    """Returns the divisor of a mean: the sum of the weights of a leaf."""
    if weight <= 0:
        raise OptionError(
            f"the weights{f' at {path}' if path else ''} add up to {float(weight):g}; "
            "a mean needs a positive sum of weights"
        )
    return weight


def num_parts(leaf: Leaf, precision: Precision, integers: Integers) -> int:
    """Returns the number of float64 kept for each element of a leaf; 0 for integers that are not summed."""
    part = dtype_named(PARTS.get(leaf.dtype, leaf.dtype))
    return 0 if part.kind in "iub" and integers != "mean" else NUM_PARTS[sum_family(part, precision)]


def results_of(totals: Mapping[str, LeafTotal], *, is_mean: bool) -> dict[str, Any]:
    """Returns arrays by path, like those that were added: sums, or means by the weights of each leaf."""
    by_divisor: dict[Fraction, list[tuple[RunningSum, NDArray[Any]]]] = {}
    sizes = [(total.size, total.dtype) for total in totals.values()]
    flats = dict(zip(totals, result_pool.empty_batch(sizes), strict=True))
    for path, total in totals.items():
        if total.running is None:
            flats[path][:] = total.kept
        else:
            divisor = divisor_of(total.weight, path) if is_mean else Fraction(1)
            by_divisor.setdefault(divisor, []).append((total.running, flats[path].view(total.running.dtype)))
    for divisor, tasks in by_divisor.items():
        write_all(tasks, divisor)
    return {
        path: total.leaf.backend.from_host(flats[path], total.leaf.shape, total.leaf.device)
        for path, total in totals.items()
    }


@functools.lru_cache(maxsize=64)  # most leaves have the same
def _sum_of(weights: tuple[float, ...]) -> Fraction:
    return sum(map(Fraction, weights), Fraction(0))


def check_like(found: Leaf, known: Leaf, name: str, path: str) -> None:
    """Refuses an array that differs from the earlier ones."""
    at = f" at {path}" if path else ""
    comparisons: list[tuple[str, object, object, type[MismatchError]]] = [
        ("an array of", found.backend.name, known.backend.name, LibraryMismatchError),
        ("dtype", found.dtype, known.dtype, DtypeMismatchError),
        ("shape", found.shape, known.shape, ShapeMismatchError),
    ]
    for noun, one, other, error in comparisons:
        if one != other:
            raise error(f"{name} has {noun} {one}{at}; those before it have {other}")


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
