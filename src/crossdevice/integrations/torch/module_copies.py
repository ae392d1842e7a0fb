"""Copies of one module: modules that support them, their differences, and means of their buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized

import torch

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.errors import ConversionError, MismatchError, OptionError
from crossdevice.integrations.torch.tensor_kinds import is_instance_of
from crossdevice.values.device import Device
from crossdevice.values.distributed import PerReplica, components_of
from crossdevice.values.quantities import counted, kind_text
from crossdevice.values.reduce_op import ReduceOp


def check_is_plain(module: torch.nn.Module) -> None:
    """Refuses objects that are not modules, and modules with copies."""
    is_mirrored = is_instance_of(module, "crossdevice.integrations.torch.mirrored_module", "MirroredModule")
    if is_mirrored or not isinstance(module, torch.nn.Module):
        raise OptionError(f"module must be a plain torch.nn.Module, got {type(module).__name__}")


def check_can_have_copies(module: torch.nn.Module) -> None:
    """Refuses modules with copies that would silently compute something else."""
    check_is_plain(module)
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.SyncBatchNorm):
            raise ConversionError(
                f"module {name!r} is a SyncBatchNorm, whose statistics are over the processes of "
                "torch.distributed, never over replicas; use BatchNorm, with synchronize_buffers('mean')"
            )
    for name, tensor in named_tensors(module).items():
        if torch.nn.parameter.is_lazy(tensor):
            raise ConversionError(
                f"{name!r} has no values yet, and each copy would make its own; call the module once before"
            )


def named_tensors(module: torch.nn.Module, *, buffers: bool = True) -> dict[str, torch.Tensor]:
    """Parameters, and buffers if asked for, by their names."""
    return {**dict(module.named_parameters()), **(dict(module.named_buffers()) if buffers else {})}


def average_buffers(
    ops: CrossDeviceOps,
    buffers: Sequence[Mapping[str, torch.Tensor]],
    devices: Sequence[Device],
    *,
    everywhere: bool,
) -> Sequence[str]:
    """Sets the buffers that have a mean to theirs over all replicas, and returns their names.

    Those of the first replica are set, or with `everywhere` those of all.
    """
    names = [name for name, own in buffers[0].items() if own.is_floating_point() or own.is_complex()]
    if names:
        brought = tuple({name: own[name].detach() for name in names} for own in buffers)
        value = PerReplica.of(brought, tuple(devices))
        mean = ops.reduce(ReduceOp.MEAN, value, value if everywhere else devices[0])
        for own, result in zip(brought, components_of(mean), strict=False):
            for name in names:
                own[name].copy_(result[name])
    return names


def check_same(copies: Sequence[torch.nn.Module], *, buffers: bool) -> None:
    """Refuses copies that differ from the first in structure, or in the bits of their tensors."""
    expected, first = _structure(copies[0]), named_tensors(copies[0], buffers=buffers)
    for replica, module in enumerate(copies[1:], start=1):
        found = _structure(module)
        for place in {**expected, **found}:
            if found.get(place) != expected.get(place):
                raise MismatchError(
                    f"replica {replica} has {found.get(place, 'nothing')} as {place}, replica 0 has "
                    f"{expected.get(place, 'nothing')}; what is done to a part of one copy is to be done "
                    "for each of .replicas"
                )
        for name, tensor in named_tensors(module, buffers=buffers).items():
            if not _is_same_bits(tensor, first[name]):
                raise MismatchError(
                    f"replica {replica} differs from replica 0 in {name!r}; copies stay in step if each "
                    "has an optimizer of its own (.optimizers) and steps after reduce_gradients"
                )


def _structure(module: torch.nn.Module) -> dict[str, str]:
    """Describes everything in a module but the values of its tensors."""
    places = {}
    for name, part in module.named_modules():
        hooks = sum(
            len(own) for key, own in vars(part).items() if key.endswith("_hooks") and isinstance(own, Sized)
        )
        mode = "training" if part.training else "evaluation"
        places[f"module {name!r}"] = f"{kind_text(part)} in {mode} mode with {counted(hooks, 'hook')}"
    for name, parameter in module.named_parameters():
        is_frozen = "" if parameter.requires_grad else "frozen "
        hooks = len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())
        places[f"parameter {name!r}"] = (
            f"a {is_frozen}{parameter.dtype} of shape {tuple(parameter.shape)} with {counted(hooks, 'hook')}"
        )
    for name, buffer in module.named_buffers():
        places[f"buffer {name!r}"] = f"a {buffer.dtype} of shape {tuple(buffer.shape)}"
    return places


def _is_same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    left, right = left.detach().cpu().contiguous(), right.detach().cpu().contiguous()
    return bool(torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)))
