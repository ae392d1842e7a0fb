"""Batches split into a share for each replica, and results of replicas joined into one."""

from __future__ import annotations

import inspect
import itertools
import numbers
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from crossdevice.backends.torch_backend import torch_device
from crossdevice.errors import ConversionError, MismatchError, ShapeMismatchError
from crossdevice.integrations.torch.containers import leaves, mapped, merged, refuse_unknown
from crossdevice.integrations.torch.tensor_kinds import refuse_special
from crossdevice.values.device import Device


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
            f"{path} is a {type(first).__name__}, which cannot be joined, nor compared: {error}"
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
