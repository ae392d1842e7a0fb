"""Shallow copies of modules that hold other tensors: one for each replica of a call."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo import OptimizedModule

from crossdevice.errors import ConversionError
from crossdevice.integrations.torch.sync_batch_norm import ReplicaSyncBatchNorm

_OWN_TABLES = frozenset(("_parameters", "_buffers", "_modules"))


def check_replicable(module: torch.nn.Module) -> None:
    """Refuses modules whose copies would go on using the original's tensors."""
    for name, part in module.named_modules():
        who = f"submodule {name!r}" if name else "the module"
        if isinstance(part, torch.jit.ScriptModule):
            raise ConversionError(
                f"{who} is a ScriptModule, which cannot be replicated; give the plain module"
            )
        if part._compiled_call_impl is not None:
            raise ConversionError(
                f"{who} was compiled in place by {type(part).__name__}.compile(), which ties the compiled "
                "code to its tensors; use torch.compile(module), which returns a module, or the plain one"
            )


def replica_of(module: torch.nn.Module, tensors: dict[int, torch.Tensor]) -> torch.nn.Module:
    """A shallow copy of all submodules in which each parameter and buffer is its entry in `tensors`, by id.

    So tied weights stay tied, and hooks, flags and attributes are those of the original. Lists, tuples and
    dicts among the attributes, such as an LSTM's flat weights, get the replica's tensors and modules too.
    """
    copies = {id(original): _shallow_copy(original) for original in module.modules()}
    own: dict[int, Any] = {**tensors, **copies}
    for original in module.modules():
        replica = copies[id(original)]
        attributes = vars(replica)
        attributes["_modules"] = {name: _own(child, own) for name, child in original._modules.items()}
        attributes["_parameters"] = {name: _own(child, own) for name, child in original._parameters.items()}
        attributes["_buffers"] = {name: _own(child, own) for name, child in original._buffers.items()}
        for name, value in vars(original).items():
            if name not in _OWN_TABLES and (replaced := _own(value, own)) is not value:
                attributes[name] = replaced
        if isinstance(replica, OptimizedModule):
            replica._initialize()  # compiled code is shared by replicas, their tensors are arguments of it
        elif type(replica) is torch.nn.SyncBatchNorm:
            replica.__class__ = ReplicaSyncBatchNorm
    return copies[id(module)]


def keep_buffers(module: torch.nn.Module, replica: torch.nn.Module) -> None:
    """Takes over buffers that a replica has assigned in place of those it was given."""
    originals, replicas = module.modules(), replica.modules()
    for original, own in zip(originals, replicas, strict=True):
        for name, buffer in own._buffers.items():
            if name in original._buffers and buffer is not original._buffers[name]:
                original._buffers[name] = buffer


def _shallow_copy(module: torch.nn.Module) -> torch.nn.Module:
    if isinstance(module, OptimizedModule):  # it hands what is set on it to the module inside
        replica = OptimizedModule.__new__(OptimizedModule)
        vars(replica).update(vars(module))
        return replica
    return module._replicate_for_data_parallel()


def _own(value: Any, own: dict[int, Any]) -> Any:
    """The replica's counterpart of a tensor or module, also inside of lists, tuples and dicts."""
    if isinstance(value, (torch.Tensor, torch.nn.Module)):
        return own.get(id(value), value)
    if type(value) in (list, tuple):
        parts = [_own(part, own) for part in value]
        is_same = all(new is old for new, old in zip(parts, value, strict=True))
        return value if is_same else type(value)(parts)
    if type(value) is dict:
        replaced = {key: _own(part, own) for key, part in value.items()}
        is_same = all(new is old for new, old in zip(replaced.values(), value.values(), strict=True))
        return value if is_same else replaced
    return value
