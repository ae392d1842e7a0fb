"""Shallow copies of modules that hold other tensors: one for each replica of a call."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils import parametrize

from crossdevice.errors import ContextError, ConversionError
from crossdevice.integrations.torch.tensor_kinds import is_instance_of
from crossdevice.strategies.current import get_replica_context


class ReplicaSyncBatchNorm(torch.nn.SyncBatchNorm):
    """A replica's `torch.nn.SyncBatchNorm`, with the statistics of all replicas' shares.

    Replicas meet twice, for the mean and for the variance. Gradients flow through both, from every replica's
    results to every replica's inputs.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name of the overridden method
        """Normalizes this replica's share."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            raise ContextError(
                "SyncBatchNorm was called in a replica of DataParallel while a torch.distributed process "
                "group is in use; statistics of replicas and of processes are not combined: use one of them"
            )
        uses_batch = self.training or self.running_mean is None
        if not uses_batch:
            return super().forward(input)
        self._check_input_dim(input)
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        axes = [axis for axis in range(input.ndim) if axis != 1]
        shape = [1, -1, *[1] * (input.ndim - 2)]
        count = input.numel() // input.shape[1]
        mean, total = _mean_of_all(wide.sum(axes), count)
        # Not the mean of squares less the square of the mean, which would cancel where the mean is large.
        centered = wide - mean.view(shape)
        variance, _ = _mean_of_all(centered.square().sum(axes), count)
        if self.training and self.track_running_stats:
            self._track(mean.detach(), variance.detach() * (total / max(total - 1, 1)))
        normal = centered * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(input.dtype)

    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            momentum = self.momentum
            if momentum is None:  # a plain average over all batches
                momentum = 1 / float(self.num_batches_tracked)
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
            self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)


def _mean_of_all(sums: torch.Tensor, count: int) -> tuple[torch.Tensor, int]:
    """Returns all replicas' sums over their counts, on this replica's device, and the total count."""
    context = get_replica_context()
    assert context is not None

    def merge(parts: list[tuple[torch.Tensor, int]]) -> Sequence[tuple[torch.Tensor, int]]:
        total = sum(number for _, number in parts)
        device = parts[0][0].device
        mean = torch.stack([part.to(device) for part, _ in parts]).sum(0) / total
        return [(mean.to(part.device), total) for part, _ in parts]

    answer: tuple[torch.Tensor, int] = context.meet("sync_batch_norm", (), (sums, count), merge)
    return answer


_OWN_TABLES = frozenset(("_parameters", "_buffers", "_modules"))
_HOOKS = frozenset(
    name
    for name in vars(torch.nn.Module())
    if name.startswith(("_forward_", "_backward_")) and "hooks" in name
)
"""A hook that a forward pass registers belongs to its replica: the module would have one more per call."""

MAX_ENTRIES = 1000
"""Longer lists and dicts among a module's attributes, such as vocabularies, are not searched for tensors."""

_PLAIN_COPY = torch.nn.Module._replicate_for_data_parallel


def check_replicable(module: torch.nn.Module) -> None:
    """Refuses modules with copies that would go on using the original's tensors."""
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
        if parametrize._cache_enabled and parametrize.is_parametrized(part):
            raise ConversionError(
                f"{who} is parametrized and was called in a block of parametrize.cached(), which keeps "
                "weights by module, while replicas are new modules in every call; enter that block in forward"
            )


def replica_of(module: torch.nn.Module, tensors: dict[int, torch.Tensor]) -> torch.nn.Module:
    """Copies all submodules, shallowly, with the parameters and buffers in `tensors`, by id.

    So tied weights stay tied, and hooks, flags and attributes are those of the original. Lists, tuples and
    dicts among the attributes, such as an LSTM's flat weights, get the replica's tensors and modules too.
    """
    originals = list(module.modules())
    copies = {id(original): _shallow_copy(original) for original in originals}
    own: dict[int, Any] = {**tensors, **copies}
    for original in originals:
        replica = copies[id(original)]
        attributes = vars(replica)
        for name, value in vars(original).items():
            if name in _OWN_TABLES:
                attributes[name] = {key: own.get(id(part), part) for key, part in value.items()}
            elif name in _HOOKS:
                attributes[name] = value.copy()
            elif (replaced := _own(value, own)) is not value:
                attributes[name] = replaced
        if _is_compiled(replica):
            replica._initialize()  # compiled code is shared by replicas, their tensors are arguments of it
        elif type(replica) is torch.nn.SyncBatchNorm:
            replica.__class__ = ReplicaSyncBatchNorm
    return copies[id(module)]


def keep_buffers(module: torch.nn.Module, replica: torch.nn.Module) -> None:
    """Takes over buffers that a replica has assigned in place of the given ones."""
    originals = dict(module.named_modules())
    for path, own in replica.named_modules():
        buffers = originals[path]._buffers if path in originals else {}
        for name, buffer in own._buffers.items():
            if name in buffers and buffer is not buffers[name]:
                buffers[name] = buffer


def _is_compiled(module: torch.nn.Module) -> bool:
    return is_instance_of(module, "torch._dynamo.eval_frame", "OptimizedModule")


def _shallow_copy(module: torch.nn.Module) -> torch.nn.Module:
    kind: Any = type(module)
    # A graph's own copy has a newly compiled class of its own, and none of its plain attributes.
    is_plain = _is_compiled(module) or is_instance_of(module, "torch.fx", "GraphModule")
    if not is_plain and kind._replicate_for_data_parallel is not _PLAIN_COPY:
        return module._replicate_for_data_parallel()
    # As PyTorch does it, but for `setattr`: that is slow, and a compiled module hands on what is set.
    replica: torch.nn.Module = object.__new__(kind)
    vars(replica).update(vars(module), _is_replica=True)
    return replica


def _own(value: Any, own: dict[int, Any], depth: int = 4) -> Any:
    """Returns the replica's counterpart of a tensor, module or method, also inside containers."""
    kind = type(value)
    if kind is types.MethodType:  # such as a `forward` that was set on the module
        return types.MethodType(value.__func__, own.get(id(value.__self__), value.__self__))
    if kind is functools.partial:
        function, arguments, keywords = _own((value.func, value.args, value.keywords), own)
        return functools.partial(function, *arguments, **keywords)
    if kind not in (list, tuple, dict):
        return own.get(id(value), value)
    if depth == 0 or len(value) > MAX_ENTRIES:
        return value
    old = value.values() if kind is dict else value
    new = [_own(part, own, depth - 1) for part in old]
    if all(map(operator.is_, new, old)):
        return value
    return dict(zip(value, new, strict=True)) if kind is dict else kind(new)
