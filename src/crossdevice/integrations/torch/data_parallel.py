"""A PyTorch module whose batches are shared among devices of one process: no launcher, no ranks."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import torch

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.backends.torch_backend import torch_device
from crossdevice.errors import ConversionError, MismatchError
from crossdevice.strategies.mirrored import MirroredStrategy
from crossdevice.values.device import Device
from crossdevice.values.distributed import PerReplica
from crossdevice.values.nesting import flatten, is_number_list, unflatten
from crossdevice.values.reduce_op import ReduceOp


class DataParallel(torch.nn.Module):
    """A module whose batches are shared among devices: in place of `torch.nn.DataParallel`, on any devices.

    `devices` may be logical CPU devices, GPUs, or one GPU several times. The gradients of the copies are
    summed in one batch, wide and in replica order. Tensors that the copies return are joined on the first
    device, those without axes to one number per replica. Of several replicas, Python's numbers such as
    `len(x)` are refused, since each is about a share; anything else that they return must be equal. As in
    `torch.nn.DataParallel`, copies are made anew for every call and only the first one's buffers are kept.
    Gradients of gradients and sparse gradients are refused. Random numbers (dropout) come from
    PyTorch's one generator per device, for which replicas on one device race.

    >>> model = DataParallel(torch.nn.Linear(3, 1), devices=["cpu:0", "cpu:1"])
    >>> model(torch.ones(5, 3)).shape
    torch.Size([5, 1])
    """

    def __init__(
        self,
        module: torch.nn.Module,
        devices: Sequence[Device | str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        dim: int = 0,
    ) -> None:
        super().__init__()
        self.strategy = MirroredStrategy(devices, cross_device_ops)
        self.devices = self.strategy.extended.worker_devices
        self.dim = dim
        self.module = module.to(torch_device(self.devices[0]))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Cuts up the tensors among the arguments, runs all replicas at once, joins their results."""
        shares = self._shares((inputs, kwargs))
        replicas = self._replicas(self.devices[: len(shares)])
        calls: list[Any] = [(replica, *share) for replica, share in zip(replicas, shares, strict=True)]
        calls += [None] * (len(self.devices) - len(shares))
        results = self.strategy.run(_run_replica, args=(PerReplica.of(tuple(calls), self.devices),))
        outputs = self.strategy.experimental_local_results(results)[: len(shares)]
        return self._joined(outputs)

    def _replicas(self, devices: Sequence[Device]) -> list[torch.nn.Module]:
        """Modules that share everything with the original but for parameters and buffers, one per device."""
        parameters = list(self.module.parameters())
        ops = self.strategy.extended.cross_device_ops
        copies = _MirroredParameters.apply(ops, devices, *parameters) if parameters else ()
        replicas = []
        for number, device in enumerate(devices):
            own = copies[number * len(parameters) : (number + 1) * len(parameters)]
            tensors = dict(zip(map(id, parameters), own, strict=True))
            for buffer in self.module.buffers():
                tensors[id(buffer)] = buffer if number == 0 else buffer.to(torch_device(device), copy=True)
            replicas.append(_replica_with(self.module, tensors))
        return replicas

    def _shares(self, arguments: Any) -> list[Any]:
        """Each replica's part of the tensors, and all of everything else; no more parts than examples."""
        leaves, structure = flatten(arguments)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim > self.dim]
        num_shares = min([len(self.devices), *(max(leaf.shape[self.dim], 1) for leaf in tensors)])
        shares: list[Any] = []
        for replica, device in enumerate(self.devices[:num_shares]):
            own = [
                _moved(
                    leaf.tensor_split(num_shares, self.dim)[replica] if _is_in(leaf, tensors) else leaf,
                    device,
                )
                for leaf in leaves
            ]
            shares.append(unflatten(structure, own))
        return shares

    def _joined(self, outputs: Sequence[Any]) -> Any:
        flattened = [flatten(output) for output in outputs]
        columns = zip(*(leaves for leaves, _ in flattened), strict=True)
        return unflatten(flattened[0][1], [self._joined_leaf(column) for column in columns])

    def _joined_leaf(self, column: Sequence[Any]) -> Any:
        if all(isinstance(part, torch.Tensor) for part in column):
            target = torch_device(self.devices[0])
            return torch.cat([_at_least_1d(part).to(target) for part in column], self.dim)
        if len(column) > 1 and any(_is_number(part) or is_number_list(part) for part in column):
            raise ConversionError(
                f"replicas returned the numbers {list(column)}, which cannot be joined as tensors can; "
                "return torch.tensor(number), of which one per replica comes back"
            )
        if any(part != column[0] for part in column):
            raise MismatchError(
                f"replicas returned different values that are no tensors and cannot be joined: {list(column)}"
            )
        return column[0]


def _run_replica(call: Any) -> Any:
    if call is None:
        return None
    module, inputs, kwargs = call
    return module(*inputs, **kwargs)


def _replica_with(module: torch.nn.Module, tensors: dict[int, torch.Tensor]) -> torch.nn.Module:
    """A shallow copy of all submodules in which each parameter and buffer is its entry in `tensors`, by id.

    So tied weights stay tied, and hooks, flags and attributes are those of the original. Copied
    parameters are plain attributes, since tensors with a history cannot be parameters.
    """
    replicas = {original: original._replicate_for_data_parallel() for original in module.modules()}
    for original, replica in replicas.items():
        for name, child in original._modules.items():
            replica._modules[name] = None if child is None else replicas[child]
        for name, parameter in original._parameters.items():
            if parameter is None:
                replica._parameters[name] = None
            else:
                setattr(replica, name, tensors[id(parameter)])
        for name, buffer in original._buffers.items():
            replica._buffers[name] = None if buffer is None else tensors[id(buffer)]
    return replicas[module]


class _MirroredParameters(torch.autograd.Function):
    """Parameters on every device; backward sums the gradients of all copies in one batch."""

    @staticmethod
    def forward(
        ctx: Any, ops: CrossDeviceOps, devices: Sequence[Device], *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.ops, ctx.devices, ctx.count = ops, tuple(devices), len(parameters)
        ctx.set_materialize_grads(False)
        return tuple(
            parameter.detach().to(torch_device(device), copy=True)
            for device in devices
            for parameter in parameters
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        sums: list[Any] = [None] * ctx.count
        pairs = []
        used = []
        for position in range(ctx.count):
            column = gradients[position :: ctx.count]
            given = next((gradient for gradient in column if gradient is not None), None)
            if given is None:
                continue  # a parameter that no replica used has no gradient
            if given.is_sparse:
                raise ConversionError(
                    "sparse gradients cannot be summed here; make the layer with sparse=False"
                )
            own = [
                torch.zeros_like(given, device=torch_device(device)) if gradient is None else gradient
                for gradient, device in zip(column, ctx.devices, strict=True)
            ]
            used.append(position)
            pairs.append((PerReplica.of(tuple(own), ctx.devices), ctx.devices[0]))
        for position, total in zip(used, ctx.ops.batch_reduce(ReduceOp.SUM, pairs), strict=True):
            sums[position] = total
        return None, None, *sums


def _moved(leaf: Any, device: Device) -> Any:
    return leaf.to(torch_device(device)) if isinstance(leaf, torch.Tensor) else leaf


def _is_in(leaf: Any, tensors: Sequence[torch.Tensor]) -> bool:
    return any(leaf is tensor for tensor in tensors)


def _is_number(part: Any) -> bool:
    return isinstance(part, numbers.Number) and not isinstance(part, bool)


def _at_least_1d(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(1) if tensor.ndim == 0 else tensor
