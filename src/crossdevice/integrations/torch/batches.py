"""Batches split into a share for each replica, results of replicas joined into one, and their containers.

Known containers are those of PyTorch's own registry (lists, dicts, named tuples, the outputs of
transformers), dataclasses, attrs classes, mappings, subclasses of lists and tuples, the key-value caches
of transformers, and what `register_container` was told.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import numbers
import re
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree

from crossdevice.backends.torch_backend import torch_device
from crossdevice.errors import ConversionError, MismatchError, ShapeMismatchError, StructureMismatchError
from crossdevice.integrations.torch.tensor_kinds import refuse_special
from crossdevice.values.device import Device
from crossdevice.values.quantities import kind_text, with_article

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
            f"{path} is {with_article(kind)}, which holds tensors but is not a container that can be split "
            "or joined; tell how with crossdevice.integrations.torch.register_container"
        )


class Share(NamedTuple):
    """One replica's part of a batch: positional and keyword arguments."""

    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]


def shares_of(
    module: torch.nn.Module,
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    devices: Sequence[Device],
    dim: int,
    replicate: Collection[str],
) -> list[Share]:
    """Returns each replica's part of the tensors, and all other values; at most one part per example."""
    named = _named(module, inputs, kwargs)
    sizes: dict[str, int] = {}
    for path, leaf in itertools.chain.from_iterable(leaves(value, name) for name, value in named):
        refuse_special(leaf, path)
        if not isinstance(leaf, torch.Tensor):
            refuse_unknown(leaf, path)
        elif _has_axis(leaf, dim) and not _is_named(path, replicate):
            sizes[path] = leaf.shape[dim]
    batch = _batch_size(sizes, dim)
    num_shares = min(len(devices), max(batch, 1))

    def own(replica: int) -> Share:
        device = torch_device(devices[replica])

        def part(leaf: Any, path: str) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if sizes.get(path) == batch:
                leaf = leaf.tensor_split(num_shares, dim)[replica]
            return leaf.to(device)

        values = [mapped(value, part, name) for name, value in named]
        return Share(tuple(values[: len(inputs)]), dict(zip(kwargs, values[len(inputs) :], strict=True)))

    return [own(replica) for replica in range(num_shares)]


def _batch_size(sizes: Mapping[str, int], dim: int) -> int:
    """Returns the common size of the tensors along `dim`; only sizes of 1 may differ."""
    others = {path: size for path, size in sizes.items() if size != 1}
    if not others:
        return 1
    first, batch = next(iter(others.items()))
    for path, size in others.items():
        if size != batch:
            raise ShapeMismatchError(
                f"{path} has size {size} along dim {dim}; the batch has {batch}, as {first} has; if "
                f"every replica is to have all of {path}, name it: replicate=({_last_name(path)!r},)"
            )
    return batch


def joined(outputs: Sequence[Any], device: torch.device, dim: int) -> Any:
    """Joins the replicas' outputs into one result on one device."""

    def join(column: Sequence[Any], path: str) -> Any:
        for replica, part in enumerate(column):
            refuse_special(part, f"{path} of replica {replica}")
            if not isinstance(part, torch.Tensor):
                refuse_unknown(part, f"{path} of replica {replica}")
        if isinstance(column[0], torch.Tensor):
            return _joined_tensors([part.to(device) for part in column], path, dim)
        return _common_value(column, path)

    return merged(outputs, join, "result")


def _joined_tensors(column: Sequence[torch.Tensor], path: str, dim: int) -> torch.Tensor:
    if column[0].ndim == 0:
        return torch.cat([part.reshape(1) for part in column])
    if len(column) == 1:
        return column[0]
    if not all(_has_axis(part, dim) for part in column):
        raise ShapeMismatchError(
            f"{path} has shape {tuple(column[0].shape)} on replica 0 and no dim {dim}, along which results "
            "are joined"
        )
    rests = [(*part.shape[:dim], *part.shape[dim:][1:]) for part in column]
    for replica, rest in enumerate(rests):
        if rest != rests[0]:
            raise ShapeMismatchError(
                f"{path} has shape {tuple(column[replica].shape)} on replica {replica} and "
                f"{tuple(column[0].shape)} on replica 0; results are joined along dim {dim} and must be "
                "equal in all others"
            )
    return torch.cat(list(column), dim)


def _common_value(column: Sequence[Any], path: str) -> Any:
    """Returns a value that is not a tensor and must be the same for all replicas."""
    first, *others = column
    if others and isinstance(first, (numbers.Number, torch.Size)) and not isinstance(first, bool):
        raise ConversionError(
            f"replicas returned the numbers {list(column)} at {path}, which cannot be joined as tensors can; "
            "return torch.tensor(number), of which one per replica comes back"
        )
    try:
        is_same = all(bool(part == first) for part in others)
    except Exception as error:
        raise ConversionError(
            f"{path} is {kind_text(first)}, which cannot be joined, nor compared: {error}"
        ) from error
    if not is_same:
        raise MismatchError(
            f"replicas returned different values that are not tensors and cannot be joined at {path}: "
            f"{list(column)}"
        )
    return first


def _named(
    module: torch.nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    """Returns all arguments with their names in `forward`."""
    names: list[str] = []
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{number}]" for number in range(len(inputs) - len(names))]
            break
        if parameter.kind is parameter.KEYWORD_ONLY:
            break
        names.append(parameter.name)
    names += [f"argument {number}" for number in range(len(names), len(inputs))]  # forward will refuse them
    return [*zip(names, inputs, strict=False), *kwargs.items()]


def _has_axis(tensor: torch.Tensor, dim: int) -> bool:
    return -tensor.ndim <= dim < tensor.ndim


def _is_named(path: str, names: Collection[str]) -> bool:
    """Returns True if an argument, or a key or attribute on the way to this leaf, has one of the names."""
    return any(word in names for word in re.findall(r"\w+", path))


def _last_name(path: str) -> str:
    return str(re.findall(r"[^\W\d]\w*", path)[-1])
