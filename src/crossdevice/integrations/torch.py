"""PyTorch modules on several devices of one process: no launcher, no ranks.

`DataParallel` takes the place of `torch.nn.DataParallel`. `MirroredModule` is for training steps that run as
replicas of a `MirroredStrategy`, backward pass and optimizer included.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.backends.torch_backend import torch_device
from crossdevice.errors import ContextError, MismatchError
from crossdevice.strategies.current import get_replica_context
from crossdevice.strategies.mirrored import MirroredStrategy
from crossdevice.values.device import Device
from crossdevice.values.distributed import PerReplica
from crossdevice.values.nesting import flatten, unflatten
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.replica_scope import current_replica


class MirroredModule:
    """A module with one copy on each device of a strategy, all of them kept bit for bit the same.

    In a replica function, calling it (or reading any attribute) means the replica's own copy;
    outside of one, the first. Replica k's copy is `replicas[k]`; `optimizers(make)` gives each an optimizer.

    >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
    >>> model = MirroredModule(torch.nn.Linear(3, 1), strategy)
    >>> optimizers = model.optimizers(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    >>> def step(x, optimizer):
    ...     optimizer.zero_grad()
    ...     model(x).square().mean().backward()
    ...     model.reduce_gradients("mean")
    ...     optimizer.step()
    >>> x = PerReplica([torch.ones(4, 3), torch.zeros(4, 3)])
    >>> _ = strategy.run(step, args=(x, optimizers))
    >>> model.check_in_step()
    """

    def __init__(self, module: torch.nn.Module, strategy: MirroredStrategy) -> None:
        self.strategy = strategy
        devices = strategy.extended.worker_devices
        copies = [module, *(copy.deepcopy(module) for _ in devices[1:])]
        self.replicas = tuple(
            replica.to(torch_device(device)) for replica, device in zip(copies, devices, strict=True)
        )

    def current(self) -> torch.nn.Module:
        """The running replica's copy; the first outside of replica functions."""
        return self.replicas[current_replica() or 0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the current copy."""
        return self.current()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "replicas":  # copying looks for these on half-made objects
            raise AttributeError(name)
        return getattr(self.current(), name)

    def optimizers(self, make: Callable[[Iterator[torch.nn.Parameter]], Any]) -> PerReplica:
        """An optimizer for each copy, to be passed to `strategy.run`, where each replica gets its own."""
        made = [make(replica.parameters()) for replica in self.replicas]
        return PerReplica.of(tuple(made), self.strategy.extended.worker_devices)

    def reduce_gradients(
        self, reduce_op: ReduceOp | str = ReduceOp.MEAN, options: CommunicationOptions | None = None
    ) -> None:
        """Combines the gradients of all replicas in one batch; called by each after its backward pass.

        With shares of a batch that differ in size, divide each loss by the size of the whole batch and
        use `"sum"`: then the gradient is that of one device on the whole batch.
        """
        context = get_replica_context()
        if context is None or current_replica() is None:
            raise ContextError("reduce_gradients is called by every replica, inside of strategy.run")
        parameters = [p for p in self.current().parameters() if p.grad is not None]
        gradients = [p.grad for p in parameters]
        reduced = context.all_reduce(reduce_op, gradients, options)
        for parameter, gradient in zip(parameters, reduced, strict=True):
            parameter.grad = gradient

    def synchronize_buffers(self) -> None:
        """Copies the first replica's buffers (such as running statistics) to all others."""
        first, *others = ([*replica.buffers()] for replica in self.replicas)
        with torch.no_grad():
            for buffers in others:
                for source, target in zip(first, buffers, strict=True):
                    target.copy_(source)

    def check_in_step(self) -> None:
        """Raises MismatchError unless all copies hold the same bits, naming the first that does not."""
        first = self.replicas[0].state_dict()
        for replica, module in enumerate(self.replicas[1:], start=1):
            for name, tensor in module.state_dict().items():
                if not _same_bits(tensor, first[name]):
                    raise MismatchError(f"replica {replica} differs from replica 0 in {name!r}")


class DataParallel(torch.nn.Module):
    """A module whose batches are shared among devices: in place of `torch.nn.DataParallel`, on any devices.

    `devices` may be logical CPU devices, GPUs, or one GPU several times. The gradients of the copies are
    summed in one batch, wide and in replica order. Results are gathered on the first device. Only the first
    copy's buffers are kept, as in `torch.nn.DataParallel`.

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
        # Calls with other parameters are made one at a time on one module object, so every further
        # replica has an object of its own: a shell, whose parameters take no memory.
        self._shells = [copy.deepcopy(module).to("meta") for _ in self.devices[1:]]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Cuts up the tensors among the arguments, runs all replicas at once, joins their results."""
        shares = self._shares((inputs, kwargs))
        names, parameters = zip(*self.module.named_parameters(), strict=True)
        copies = _MirroredParameters.apply(
            self.strategy.extended.cross_device_ops, self.devices[: len(shares)], *parameters
        )
        states = [
            dict(zip(names, copies[start : start + len(names)], strict=True))
            for start in range(0, len(copies), len(names))
        ]
        states[0].update(self.module.named_buffers())
        for state, device in zip(states[1:], self.devices[1:], strict=False):
            buffers = self.module.named_buffers()
            state.update((name, buffer.to(torch_device(device), copy=True)) for name, buffer in buffers)
        modules = [self.module, *self._shells]
        for shell in self._shells:
            for own, original in zip(shell.modules(), self.module.modules(), strict=True):
                own.training = original.training
        calls: list[Any] = [
            (module, state, *share) for module, state, share in zip(modules, states, shares, strict=False)
        ]
        calls += [None] * (len(self.devices) - len(shares))
        results = self.strategy.run(self._run_copy, args=(PerReplica.of(tuple(calls), self.devices),))
        outputs = self.strategy.experimental_local_results(results)[: len(shares)]
        return self._joined(outputs)

    @staticmethod
    def _run_copy(call: Any) -> Any:
        if call is None:
            return None
        module, state, inputs, kwargs = call
        return torch.func.functional_call(module, state, inputs, kwargs)

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
        target = torch_device(self.devices[0])
        columns = zip(*(leaves for leaves, _ in flattened), strict=True)
        joined = [
            torch.cat([_at_least_1d(part).to(target) for part in column], self.dim) for column in columns
        ]
        return unflatten(flattened[0][1], joined)


class _MirroredParameters(torch.autograd.Function):
    """Parameters on every device; backward sums the gradients of all copies in one batch."""

    @staticmethod
    def forward(
        ctx: Any, ops: CrossDeviceOps, devices: Sequence[Device], *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.ops, ctx.devices = ops, devices
        ctx.shapes = [(parameter.shape, parameter.dtype) for parameter in parameters]
        return tuple(
            parameter.detach().to(torch_device(device), copy=True)
            for device in devices
            for parameter in parameters
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        count = len(ctx.shapes)
        pairs = []
        for position, (shape, dtype) in enumerate(ctx.shapes):
            column = [
                torch.zeros(shape, dtype=dtype, device=torch_device(device)) if own is None else own
                for own, device in zip(gradients[position::count], ctx.devices, strict=True)
            ]
            pairs.append((PerReplica.of(tuple(column), tuple(ctx.devices)), ctx.devices[0]))
        return None, None, *ctx.ops.batch_reduce(ReduceOp.SUM, pairs)


def _moved(leaf: Any, device: Device) -> Any:
    return leaf.to(torch_device(device)) if isinstance(leaf, torch.Tensor) else leaf


def _is_in(leaf: Any, tensors: Sequence[torch.Tensor]) -> bool:
    return any(leaf is tensor for tensor in tensors)


def _at_least_1d(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(1) if tensor.ndim == 0 else tensor


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    left, right = left.detach().cpu().contiguous(), right.detach().cpu().contiguous()
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return bool(torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)))
