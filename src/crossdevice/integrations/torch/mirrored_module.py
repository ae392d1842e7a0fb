"""A PyTorch module with a copy on each device of a strategy, for training steps that run as replicas."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from crossdevice.backends.torch_backend import torch_device
from crossdevice.errors import ContextError, MismatchError
from crossdevice.strategies.current import get_replica_context
from crossdevice.strategies.mirrored import MirroredStrategy
from crossdevice.values.distributed import PerReplica
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.replica_scope import current_replica


class MirroredModule:
    """A module with one copy on each device of a strategy, whose parameters are kept bit for bit the same.

    In a replica function, calling it (or reading any attribute) means the replica's own copy;
    outside of one, the first. This process's k-th copy is `replicas[k]`; `optimizers(make)` gives each an
    optimizer. Under a strategy over several processes, all start as the first process's module does.

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
        self._take_over(_named_tensors(module, buffers=True))
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
        # By name: replicas in which other parameters took part are an error, never added to each other.
        parameters = {name: p for name, p in self.current().named_parameters() if p.grad is not None}
        gradients = {name: p.grad for name, p in parameters.items()}
        for name, gradient in context.all_reduce(reduce_op, gradients, options).items():
            parameters[name].grad = gradient

    def synchronize_buffers(self) -> None:
        """Copies the first replica's buffers (such as running statistics) to all others."""
        self._take_over(dict(self.replicas[0].named_buffers()))
        first, *others = ([*replica.buffers()] for replica in self.replicas)
        with torch.no_grad():
            for buffers in others:
                for source, target in zip(first, buffers, strict=True):
                    target.copy_(source)

    def _take_over(self, tensors: dict[str, torch.Tensor]) -> None:
        """Overwrites tensors with those of the first process, where there are several."""
        ops = self.strategy.extended.cross_device_ops
        if ops.group is not None and tensors:
            detached = {name: tensor.detach() for name, tensor in tensors.items()}
            for name, tensor in ops.value_of_rank(detached, 0).items():
                detached[name].copy_(tensor)

    def check_in_step(self, *, buffers: bool = False) -> None:
        """Raises MismatchError unless this process's copies hold the same bits (in buffers too, if asked)."""
        first, *others = (_named_tensors(replica, buffers=buffers) for replica in self.replicas)
        for replica, tensors in enumerate(others, start=1):
            for name, tensor in tensors.items():
                if not _same_bits(tensor, first[name]):
                    raise MismatchError(f"replica {replica} differs from replica 0 in {name!r}")

    def train(self, mode: bool = True) -> MirroredModule:
        """Sets all copies to training, or to evaluation."""
        for replica in self.replicas:
            replica.train(mode)
        return self

    def eval(self) -> MirroredModule:
        """Sets all copies to evaluation."""
        return self.train(False)

    def load_state_dict(self, state: Any, strict: bool = True) -> None:
        """Loads the same state into all copies."""
        for replica in self.replicas:
            replica.load_state_dict(state, strict=strict)

    def requires_grad_(self, requires_grad: bool = True) -> MirroredModule:
        """Switches gradients of all copies' parameters on or off."""
        for replica in self.replicas:
            replica.requires_grad_(requires_grad)
        return self


def _named_tensors(module: torch.nn.Module, *, buffers: bool) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **(dict(module.named_buffers()) if buffers else {})}


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    left, right = left.detach().cpu().contiguous(), right.detach().cpu().contiguous()
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return bool(torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)))
