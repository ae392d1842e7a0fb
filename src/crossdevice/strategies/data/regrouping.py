"""Conversion between one structure per replica and one structure of per-replica values."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import optree

from crossdevice.backends.registry import backend_of_type
from crossdevice.errors import ConversionError, StructureMismatchError
from crossdevice.execution.reading.values import check_agreement
from crossdevice.strategies.variables.distributed_variable import DistributedVariable
from crossdevice.values.delegation import PlacedArray
from crossdevice.values.device import Device, device_of, host_device
from crossdevice.values.distributed import DistributedValues, IndexedSlices, PerReplica, as_distributed
from crossdevice.values.nesting import NUMBERS, first_leaf, spelled_structure
from crossdevice.values.quantities import counted, kind_text


def regroup(
    components: Sequence[Any],
    devices: Sequence[Device],
    always_wrap: bool = False,
    among: int | None = None,
) -> Any:
    """Merges one structure per replica into one of distributed values; a single replica's is unchanged.

    An object that all replicas share (None, a name, a variable) stays bare. Arrays and numbers do not:
    whether they count once or once per replica would otherwise depend on who made them.

    Args:
        among: how many replicas there are in all, if others are in other processes.

    >>> regroup([(1.0, "ab"), (1.0, "ab")], [Device("cpu"), Device("cpu", 1)])[1]
    'ab'
    """
    if (among or len(components)) == 1 and not always_wrap:
        return components[0]
    flattened = [optree.tree_flatten(component, none_is_leaf=True) for component in components]
    structures = [structure for _, structure in flattened]
    check_agreement(structures, devices, "structure", StructureMismatchError, describe=spelled_structure)

    def regrouped(*column: Any) -> Any:
        first = column[0]
        if not always_wrap and not is_countable(first) and all(leaf is first for leaf in column):
            return first
        return PerReplica.of(column, placed_on(column, devices))

    columns = zip(*(leaves for leaves, _ in flattened), strict=True)
    return optree.tree_unflatten(structures[0], list(itertools.starmap(regrouped, columns)))


def is_countable(leaf: Any) -> bool:
    """Returns True for an array or a number, one contribution of each replica."""
    if isinstance(leaf, (IndexedSlices, *NUMBERS)):
        return True
    return hasattr(leaf, "dtype") and not isinstance(leaf, (DistributedValues, PlacedArray))


def is_sparse(leaf: Any) -> bool:
    """Returns True for IndexedSlices, ours or another library's."""
    backend = backend_of_type(type(leaf))
    return isinstance(leaf, IndexedSlices) or (
        backend is not None and backend.as_indexed_slices(leaf) is not None
    )


def is_array(leaf: Any) -> bool:
    """Returns True for an array of a known library."""
    return is_countable(leaf) and hasattr(leaf, "dtype") and backend_of_type(type(leaf)) is not None


def placed_on(components: Sequence[Any], devices: Sequence[Device]) -> tuple[Device, ...]:
    """Returns the devices of components: host arrays belong to a host replica, or to `cpu:k` beside a GPU."""
    return tuple(
        device_of(first_leaf(component)) or (device if device.is_host else host_device(replica))
        for replica, (component, device) in enumerate(zip(components, devices, strict=True))
    )


def distributed_leaves(tree: Any) -> list[DistributedValues]:
    """Returns all distributed values in a structure, in order."""
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, DistributedValues)]


def is_structure(tree: Any) -> bool:
    """Returns True for a container of values, even an empty one; None is a value."""
    return not optree.tree_is_leaf(tree, none_is_leaf=True)


def in_our_classes(tree: Any) -> Any:
    """Converts the distributed values of tf.distribute in a structure to ours."""
    return map_structure(as_distributed, tree) if "tensorflow" in sys.modules else tree


def map_structure(function: Callable[[Any], Any], tree: Any) -> Any:
    """Returns the structure with every leaf replaced; None is a leaf."""
    return optree.tree_map(function, tree, none_is_leaf=True)


def select_replica(replica: int, tree: Any) -> Any:
    """Selects a replica's components in a structure; variables stay, as they select it themselves."""

    def own(leaf: Any) -> Any:
        if isinstance(leaf, DistributedValues) and not isinstance(leaf, DistributedVariable):
            return leaf.values[replica]
        return leaf

    return map_structure(own, tree)


def own_component(replica: int, among: int, tree: Any) -> Any:
    """Returns the running replica's plain arrays: its components, and its copies of variables."""

    def own(leaf: Any) -> Any:
        if isinstance(leaf, DistributedVariable):
            return leaf.operand()
        if not isinstance(leaf, DistributedValues):
            return leaf
        _check_components(leaf, among)
        return leaf.values[replica]

    return map_structure(own, tree) if distributed_leaves(tree) else tree


def spread(tree: Any, devices: Sequence[Device]) -> list[Any]:
    """Returns each replica's view of a structure; distributed values must have a component for each."""
    tree = in_our_classes(tree)
    found = [leaf for leaf in distributed_leaves(tree) if not isinstance(leaf, DistributedVariable)]
    if not found:
        return [tree] * len(devices)
    for leaf in found:
        _check_components(leaf, len(devices))
    return [select_replica(replica, tree) for replica in range(len(devices))]


def _check_components(value: DistributedValues, number: int) -> None:
    if len(value.values) != number:
        raise StructureMismatchError(
            f"{kind_text(value)} has {counted(len(value.values), 'component')}; expected {number}, "
            "one for each replica"
        )


def check_listed_arguments(args: object) -> None:
    """Refuses positional arguments of `run` that are not in a list or tuple."""
    if not isinstance(args, (list, tuple)):
        raise ConversionError(f"args must be a list or tuple, got {kind_text(args)}")


def checked_arguments(
    call: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the checked arguments of a function that is called for each replica, or for all."""
    if isinstance(args, (str, bytes, Mapping)) or not isinstance(args, Iterable):
        raise ConversionError(f"args of {call} must be a list or tuple, got {kind_text(args)}")
    if not isinstance(kwargs, (Mapping, type(None))):
        raise ConversionError(f"kwargs of {call} must be a dict, got {kind_text(kwargs)}")
    return tuple(args), dict(kwargs or {})
