"""Containers of tensors that modules take and return: their contents, and copies with other contents.

Known are those of PyTorch's own registry (lists, dicts, named tuples, the outputs of transformers),
dataclasses, attrs classes, mappings, subclasses of lists and tuples, the key-value caches of transformers,
and what `register_container` was told.
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree

from crossdevice.errors import ConversionError, StructureMismatchError

_REGISTERED: dict[type, tuple[Callable[[Any], Iterable[Any]], Callable[[Any, list[Any]], Any]]] = {}

_BY_ATTRIBUTES = frozenset(
    f"transformers.cache_utils.{name}"
    for name in ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin")
)
"""Classes with instances that are joined and split by attribute, subclasses included."""

_OPAQUE = (
    str,
    bytes,
    int,
    float,
    complex,
    type,
    types.FunctionType,
    types.ModuleType,
    torch.dtype,
    torch.device,
)
_DEPTH = 5
"""Depth to which tensors are looked for in an unknown object."""


class Contents(NamedTuple):
    """Items of a container; `names` are written as Python would after the container."""

    names: list[str]
    values: list[Any]
    rebuild: Callable[[list[Any]], Any]


def register_container(
    kind: type, values_of: Callable[[Any], Iterable[Any]], rebuild: Callable[[Any, list[Any]], Any]
) -> None:
    """Tells `DataParallel` how to split and join instances of a class that hold tensors.

    Args:
        kind: the class.
        values_of: what an instance holds, always in the same order.
        rebuild: an instance like the first argument that holds other values.

    >>> class Boxes:
    ...     def __init__(self, corners):
    ...         self.corners = corners
    >>> register_container(Boxes, lambda boxes: [boxes.corners], lambda _, values: Boxes(*values))
    """
    _REGISTERED[kind] = (values_of, rebuild)


def contents(value: Any) -> Contents | None:
    """Returns the items of a known container; None if it is not one."""
    if type(value) in _REGISTERED:
        values_of, rebuild = _REGISTERED[type(value)]
        return _numbered(list(values_of(value)), lambda values: rebuild(value, values))
    if value is None or isinstance(value, (torch.Tensor, torch.Size, PackedSequence, *_OPAQUE)):
        return None
    values, spec = _pytree.tree_flatten(value, is_leaf=lambda node: node is not value)
    if not spec.is_leaf():
        return Contents(_names(value, len(values)), values, lambda own: _pytree.tree_unflatten(own, spec))
    if isinstance(value, Mapping):
        return Contents(_names(value, len(value)), list(value.values()), lambda own: _mapping(value, own))
    if isinstance(value, (list, tuple, deque)):
        return _numbered(list(value), lambda own: _sequence(value, own))
    attributes = _attributes(value)
    if attributes is None:
        return None
    return Contents(
        [f".{name}" for name in attributes],
        [getattr(value, name) for name in attributes],
        lambda own: _with_attributes(value, dict(zip(attributes, own, strict=True))),
    )


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a structure, each with its place."""
    inside = contents(value)
    if inside is None:
        yield path, value
    else:
        for name, part in zip(inside.names, inside.values, strict=True):
            yield from leaves(part, path + name)


def mapped(value: Any, function: Callable[[Any, str], Any], path: str) -> Any:
    """Rebuilds the structure with `function(leaf, path)` in place of each leaf."""
    inside = contents(value)
    if inside is None:
        return function(value, path)
    own = [
        mapped(part, function, path + name) for name, part in zip(inside.names, inside.values, strict=True)
    ]
    return inside.rebuild(own)


def merged(values: Sequence[Any], function: Callable[[Sequence[Any], str], Any], path: str) -> Any:
    """Merges the structures of all replicas, with `function(leaves, path)` in place of each leaf."""
    opened = [contents(value) for value in values]
    first = opened[0]
    for replica, (value, other) in enumerate(zip(values, opened, strict=True)):
        if type(value) is not type(values[0]) or (other and first and other.names != first.names):
            raise StructureMismatchError(
                f"replica {replica} returned {_shown(value, other)} at {path}; replica 0 returned "
                f"{_shown(values[0], first)}"
            )
    if first is None:
        return function(values, path)
    columns = zip(*(inside.values for inside in opened if inside), strict=True)
    own = [merged(column, function, path + name) for name, column in zip(first.names, columns, strict=True)]
    return first.rebuild(own)


def holds_tensors(value: Any, depth: int = _DEPTH) -> bool:
    """Returns True if tensors can be reached through containers and attributes."""
    if isinstance(value, torch.Tensor):
        return True
    if depth == 0 or value is None or isinstance(value, _OPAQUE):
        return False
    if isinstance(value, Mapping):
        inside: Iterable[Any] = value.values()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        inside = value
    else:
        inside = [
            *getattr(value, "__dict__", {}).values(),
            *(getattr(value, name, None) for kind in type(value).__mro__ for name in _slots(kind)),
        ]
    return any(holds_tensors(part, depth - 1) for part in inside)


def _attributes(value: Any) -> list[str] | None:
    """Returns the attributes that define an object; None if its class does not list them."""
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    if hasattr(type(value), "__attrs_attrs__"):
        return [attribute.name for attribute in type(value).__attrs_attrs__]
    if any(f"{kind.__module__}.{kind.__qualname__}" in _BY_ATTRIBUTES for kind in type(value).__mro__):
        # What describes a cache (flags, sizes) stays as it is.
        return [
            name
            for name, part in vars(value).items()
            if not isinstance(part, _OPAQUE) and not _describes(part)
        ]
    return None


def _describes(part: Any) -> bool:
    """Returns True for a table of flags or sizes, one for each state of a layer."""
    return type(part) is dict and bool(part) and not holds_tensors(part)


def _numbered(values: list[Any], rebuild: Callable[[list[Any]], Any]) -> Contents:
    return Contents([f"[{number}]" for number in range(len(values))], values, rebuild)


def _names(value: Any, count: int) -> list[str]:
    if isinstance(value, Mapping) and len(value) == count:
        return [f"[{key!r}]" for key in value]
    if len(fields := getattr(value, "_fields", ())) == count:
        return [f".{name}" for name in fields]
    return [f"[{number}]" for number in range(count)]


def _mapping(like: Mapping[Any, Any], values: list[Any]) -> Any:
    items = dict(zip(like, values, strict=True))
    try:
        made: Any = copy.copy(like)
        for key, value in items.items():
            made[key] = value
    except TypeError:  # one that cannot be changed, or copied
        made = type(like)(items)  # type: ignore[call-arg]
    return made


def _sequence(like: Any, values: list[Any]) -> Any:
    if isinstance(like, tuple):
        new = tuple.__new__(type(like), values)
        getattr(new, "__dict__", {}).update(getattr(like, "__dict__", {}))
        return new
    made = copy.copy(like)
    made.clear()
    made.extend(values)
    return made


def _with_attributes(like: Any, attributes: dict[str, Any]) -> Any:
    made = copy.copy(like)
    for name, value in getattr(made, "__dict__", {}).items():
        if name not in attributes and _describes(value):  # else replicas would write to the same one
            attributes[name] = dict(value)
    for name, value in attributes.items():
        object.__setattr__(made, name, value)  # also of frozen ones
    return made


def _slots(kind: type) -> Sequence[str]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _shown(value: Any, inside: Contents | None) -> str:
    return f"{type(value).__name__} with {', '.join(inside.names)}" if inside else type(value).__name__


def refuse_unknown(value: Any, path: str) -> None:
    """Refuses an object that holds tensors but is not a known container."""
    if holds_tensors(value):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise ConversionError(
            f"{path} is a {kind}, which holds tensors but is not a container that can be split or joined; "
            "tell how with crossdevice.integrations.torch.register_container"
        )
