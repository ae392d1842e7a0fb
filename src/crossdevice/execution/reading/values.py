"""Reading values: what replicas hold, checked against each other before any work is done."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from crossdevice.backends.numpy_backend import arrays_of_numbers
from crossdevice.backends.protocol import Array, Backend
from crossdevice.backends.registry import BACKENDS, backend_of_type
from crossdevice.errors import (
    ConversionError,
    DeviceMismatchError,
    DtypeMismatchError,
    LibraryMismatchError,
    MismatchError,
    ShapeMismatchError,
    StructureMismatchError,
)
from crossdevice.execution.reading.leaf_spec import LeafSpec
from crossdevice.execution.signature_cache import SignatureCache
from crossdevice.values.delegation import PlacedArray
from crossdevice.values.device import Device, device_of, host_device, misplaced
from crossdevice.values.disagreement import disagreement
from crossdevice.values.distributed import DistributedValues, IndexedSlices, as_distributed
from crossdevice.values.dtypes import INTEGERS, check_reducible, widest_float
from crossdevice.values.nesting import (
    NUMBERS,
    first_leaf,
    flatten,
    is_number,
    is_number_list,
    leaf_paths,
    spelled_structure,
)
from crossdevice.values.quantities import counted, kind_text, with_article
from crossdevice.values.reduce_op import ReduceOp


class Leaf(NamedTuple):
    """One array of every replica: the same place in each replica's structure.

    `path` is how errors name that place, empty for a value that is not a structure.
    """

    arrays: tuple[Any, ...]
    path: str

    @property
    def at_path(self) -> str:
        """The place, as the end of a phrase."""
        return at(self.path)

    @property
    def is_sparse(self) -> bool:
        """True if some replica holds `IndexedSlices` here."""
        return any(isinstance(array, IndexedSlices) for array in self.arrays)


class Value(NamedTuple):
    """A value as read: its replicas' devices, its leaves, and its structure (None for a single array)."""

    devices: tuple[Device, ...]
    leaves: list[Leaf]
    structure: Any
    components: tuple[Any, ...]
    """The components that were read."""


def read_value(value: Any, what: str = "value") -> Value:
    """Reads a DistributedValues, or anything array-like as the only replica of one."""
    value = as_distributed(value)
    if isinstance(value, DistributedValues):
        components, devices = value.values, value.devices
    else:
        components, devices = (value,), (device_of(first_leaf(value)) or host_device(0),)
    if components and all(
        type(component) in _array_types and not getattr(component, "is_sparse", False)
        for component in components
    ):
        return Value(devices, [Leaf(components, "")], None, components)
    if not components:
        raise ConversionError(
            f"the {what} is {kind_text(value)} without components; expected one per replica"
        )
    for replica, component in enumerate(components):
        if component is None:
            raise ConversionError(f"replica {replica} of the {what} is None; expected an array")
    if all(is_leaf(component) for component in components):
        return Value(devices, [_read_leaf(components, devices, "", what)], None, components)
    flattened = [flatten(component, is_leaf) for component in components]
    structures = [structure for _, structure in flattened]
    check_agreement(
        structures,
        devices,
        "structure",
        StructureMismatchError,
        describe=lambda structure: _described(structure, structures, what),
    )
    paths = leaf_paths(structures[0], what)
    columns = zip(*(leaves for leaves, _ in flattened), strict=True)
    leaves = [_read_leaf(column, devices, path, what) for column, path in zip(columns, paths, strict=True)]
    return Value(devices, leaves, structures[0], components)


def checked_spec(
    leaf: Leaf,
    devices: tuple[Device, ...],
    destinations: tuple[Device, ...],
    op: ReduceOp,
    into: str | None = None,
    integer_op: ReduceOp | None = None,
) -> LeafSpec:
    """The spec of a dense leaf, after every check; arrays with known signatures have passed them before.

    Args:
        into: the dtype of `out`, if it was given.
        integer_op: the operation for integers, if it is not `op`.
    """
    arrays, path = leaf.arrays, leaf.path
    backend = backend_of(arrays[0], 0, path)
    try:
        key = (op, into, integer_op, devices, destinations, *map(backend.signature, arrays))
    except (AttributeError, RuntimeError):  # an array of another library, or one without a shape
        key = None  # checked outside this handler, so that the error does not seem to be caused by this one
    known = _known_specs.get(key)
    if known is not None:
        return known
    backend = one_backend(arrays, devices, path, destinations)
    check_agreement([backend.dtype_of(a) for a in arrays], devices, "dtype", DtypeMismatchError, path)
    check_agreement([backend.shape_of(a) for a in arrays], devices, "shape", ShapeMismatchError, path)
    dtype = backend.dtype_of(arrays[0])
    own_op = integer_op if dtype in INTEGERS else None
    check_reducible(dtype, own_op or op, replica_at(0, devices[0], path))
    if into == dtype or widest_float([dtype, into or "none"]) is None:
        into = None  # what is not a float is refused where memory for results is checked
    spec = LeafSpec(backend, dtype, backend.shape_of(arrays[0]), devices, destinations, into, own_op)
    if key is not None:
        _known_specs[key] = spec
    return spec


_known_specs: SignatureCache[LeafSpec] = SignatureCache(most=1 << 14)


def widened(leaf: Leaf) -> Leaf:
    """Replicas with different float dtypes, all in the widest of them; anything else as it is."""
    backends = {backend_of_type(type(array)) for array in leaf.arrays}
    backend = backends.pop()
    if backend is None or backends:
        return leaf
    dtypes = [backend.dtype_of(array) for array in leaf.arrays]
    widest = widest_float(dtypes)
    if widest is None or len(set(dtypes)) == 1:
        return leaf
    pairs = zip(leaf.arrays, dtypes, strict=True)
    return Leaf(tuple(x if dtype == widest else backend.cast(x, widest) for x, dtype in pairs), leaf.path)


def one_backend(
    arrays: Sequence[Array], devices: Sequence[Device], path: str, destinations: Sequence[Device] = ()
) -> Backend:
    """The one library of these arrays, each on its replica's device; it also has all the destinations."""
    backends = [backend_of(array, replica, path) for replica, array in enumerate(arrays)]
    check_agreement([each.name for each in backends], devices, "an array of", LibraryMismatchError, path)
    backend = backends[0]
    for replica, (array, device) in enumerate(zip(arrays, devices, strict=True)):
        where = replica_at(replica, device, path)
        backend.check_array(array, where)
        elsewhere = misplaced(array, device)
        if elsewhere is not None:
            raise DeviceMismatchError(
                f"{where} holds an array that is on {elsewhere}; copy it to {device} first"
            )
    for device in (*devices, *destinations):
        backend.check_device(device)
    return backend


def backend_of(array: Array, replica: int, path: str = "") -> Backend:
    """The library of one array."""
    backend = backend_of_type(type(array))
    if backend is None or not hasattr(array, "dtype"):
        kind = type(array)
        library = kind.__module__.partition(".")[0]
        origin = "" if library in ("__main__", *sys.stdlib_module_names) else f" of {library}"
        raise ConversionError(
            f"replica {replica} holds {with_article(kind.__name__)}{origin}{at(path)}; expected a number or "
            f"an array of {', '.join(BACKENDS)}{_remedy(array)}"
        )
    return backend


def _remedy(value: object) -> str:
    """Names the function that makes an array, or a tree of arrays, of a value that is neither."""
    if hasattr(value, "__array__"):
        return " (numpy.asarray makes one of it)"
    if isinstance(value, Mapping):
        return " (dict makes a tree of it)"
    return " (vars makes a tree of its fields)" if dataclasses.is_dataclass(value) else ""


def check_agreement(
    answers: Sequence[Hashable],
    devices: Sequence[Device],
    noun: str,
    error: type[MismatchError],
    path: str = "",
    describe: Callable[[Any], str] = str,
) -> None:
    """Raises `error` unless all replicas that answer (not None) agree; the message names the odd ones out."""
    given = {replica: answer for replica, answer in enumerate(answers) if answer is not None}
    if len(set(given.values())) > 1:
        names = [replica_at(replica, device) for replica, device in enumerate(devices)]
        raise error(disagreement(given, names, f"has {noun}", describe, at(path)))


def replica_at(replica: int, device: Device, path: str = "") -> str:
    """Names a replica's value in errors."""
    return f"replica {replica} ({device}){at(path)}"


def at(path: str) -> str:
    """A path as the end of a phrase; a single array has none."""
    return f" at {path}" if path else ""


def is_leaf(node: Any) -> bool:
    """True if a node of a structure is a value, not a container of values."""
    return (
        isinstance(node, (IndexedSlices, PlacedArray, DistributedValues, *NUMBERS))
        or hasattr(node, "dtype")
        or is_number_list(node)
    )


def _read_leaf(column: Sequence[Any], devices: Sequence[Device], path: str, what: str) -> Leaf:
    arrays: list[Any] = []
    numbers: dict[int, Any] = {}
    for replica, item in enumerate(map(as_distributed, column)):
        if isinstance(item, DistributedValues):
            raise ConversionError(
                f"{replica_at(replica, devices[replica])} of the {what} holds {kind_text(item)}; "
                "distributed values do not nest"
            )
        if isinstance(item, PlacedArray):
            if item.device != devices[replica]:
                where = replica_at(replica, devices[replica], path)
                raise DeviceMismatchError(
                    f"{where} holds a variable on {item.device}; expected one on {devices[replica]}"
                )
            item = item.operand()
        if is_number(item) or isinstance(item, (list, tuple)):
            numbers[replica] = item
            arrays.append(item)
        else:
            backend = backend_of_type(type(item))
            slices = None if backend is None else backend.as_indexed_slices(item)
            if backend is not None and slices is None:
                _array_types.add(type(item))
            arrays.append(item if slices is None else slices)
    for replica, array in zip(numbers, arrays_of_numbers(list(numbers.values())), strict=True):
        arrays[replica] = array
    return Leaf(tuple(arrays), path)


_array_types: set[type[Any]] = set()
"""Types seen to be arrays of a library: values made of nothing else need no further look.

PyTorch's sparse tensors are of the same type as others, but say what they are.
"""


def _described(structure: Any, structures: Sequence[Any], what: str) -> str:
    """All of a small structure; of a large one (a model's) what it has and others lack, or lacks."""
    text = spelled_structure(structure)
    if len(text) <= MAX_CHARACTERS:
        return text
    paths = leaf_paths(structure, what)
    of_others = [leaf_paths(other, what) for other in dict.fromkeys(structures) if other != structure]
    own = [path for path in paths if any(path not in other for other in map(set, of_others))]
    lacking = dict.fromkeys(path for other in of_others for path in other if path not in set(paths))
    parts = [f"{structure.type.__name__} of {counted(len(paths), 'leaf', 'leaves')}"]
    parts += [f"{word} {few(found)}" for word, found in (("with", own), ("without", list(lacking))) if found]
    if not own and not lacking and any(other != paths for other in of_others):
        parts.append(f"in the order {few(paths)}")
    return ", ".join(parts)


MAX_CHARACTERS = 200
"""A structure whose text is longer is described by what is different about it."""


def few(texts: Sequence[str], most: int = 3) -> str:
    """The first of them, and how many more there are.

    >>> few(["w", "b", "u", "v"])
    'w, b, u and 1 more'
    """
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")
