"""A PyTorch module with a copy on each device of a strategy, for training steps that run as replicas."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from crossdevice.algorithms.collective_all_reduce import CollectiveAllReduce
from crossdevice.backends.torch_backend import torch_device
from crossdevice.errors import ContextError, DeviceError, MismatchError
from crossdevice.strategies.current import get_replica_context
from crossdevice.strategies.mirrored import MirroredStrategy
from crossdevice.values.distributed import PerReplica
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.replica_scope import current_replica

_CHANGING = frozenset(
    ("train", "eval", "requires_grad_", "zero_grad", "type", "float", "double", "half", "bfloat16")
)
"""Methods of modules that change all copies, outside of replica functions."""

_MOVING = frozenset(("cpu", "cuda", "ipu", "mtia", "xpu", "share_memory", "to_empty"))
"""Methods of modules that put them elsewhere, refused there."""


class MirroredModule:
    """A module with one copy on each device of a strategy, whose parameters are kept bit for bit the same.

    In a replica function everything means the replica's own copy. Outside of one, what changes a module as a
    whole (`train`, `apply`, `double`, `zero_grad`, `load_state_dict`, `to` another dtype, setting an
    attribute) changes all copies, and calling it or reading an attribute means the first copy. This process's
    k-th copy is `replicas[k]`. Under a strategy over several processes, all start as the first process's
    module does.

    Optimizers are made by `optimizers`, one for each copy: `torch.optim.SGD(model.parameters())` has the
    parameters of the first copy only, and leaves all others as they were.

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
        if name in _CHANGING:
            return functools.partial(self._change, name)
        if name in _MOVING and current_replica() is None:
            return functools.partial(self._refuse_to_move, name)
        return getattr(self.current(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("strategy", "replicas"):
            super().__setattr__(name, value)
            return
        if current_replica() is None and isinstance(value, (torch.Tensor, torch.nn.Module)):
            raise ContextError(
                f"{name} was given a {type(value).__name__}, which all copies would share; "
                "give each of .replicas its own"
            )
        for replica in self._meant():
            setattr(replica, name, value)

    def _meant(self) -> Sequence[torch.nn.Module]:
        """The running replica's copy; all outside of replica functions."""
        return self.replicas if current_replica() is None else (self.current(),)

    def _change(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of all copies that are meant; what returns its module returns this."""
        results = [getattr(replica, method)(*args, **kwargs) for replica in self._meant()]
        return self if isinstance(results[0], torch.nn.Module) else results[0]

    def _refuse_to_move(self, method: str, *args: Any, **kwargs: Any) -> None:
        given = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])
        own = ", ".join(map(str, self.strategy.extended.worker_devices))
        raise DeviceError(
            f"{method}({given}) would put all copies on one device; they stay on those of their strategy, "
            f"{own}: make a strategy on other devices, or take one copy of .replicas"
        )

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Casts all copies, or in a replica function its own; moving all of them is refused."""
        device = torch._C._nn._parse_to(*args, **kwargs)[0]  # as the method of modules reads them
        own = {torch_device(device) for device in self.strategy.extended.worker_devices}
        if current_replica() is None and device is not None and own != {device}:
            self._refuse_to_move("to", *args, **kwargs)
        return self._change("to", *args, **kwargs)

    def apply(self, fn: Callable[[torch.nn.Module], object]) -> MirroredModule:
        """Calls a function with every submodule of all copies, which then take the first one's values.

        So initial values may be random. Under a strategy over several processes, they are those of the
        first process, and all processes take part. In a replica function only its own copy is meant.
        """
        for replica in self._meant():
            replica.apply(fn)
        if current_replica() is None:
            self._follow_first([_named_tensors(replica, buffers=True) for replica in self.replicas])
        return self

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
        self._follow_first([dict(replica.named_buffers()) for replica in self.replicas])

    def _follow_first(self, tensors: Sequence[dict[str, torch.Tensor]]) -> None:
        """Overwrites tensors of the copies with those of the first process's first copy."""
        first, *others = tensors
        self._take_over(first)
        with torch.no_grad():
            for own in others:
                for name, source in first.items():
                    own[name].copy_(source)

    def _take_over(self, tensors: dict[str, torch.Tensor]) -> None:
        """Overwrites tensors with those of the first process, where there are several."""
        ops = self.strategy.extended.cross_device_ops
        if isinstance(ops, CollectiveAllReduce) and tensors:
            detached = {name: tensor.detach() for name, tensor in tensors.items()}
            for name, tensor in ops.value_of_rank(detached, 0).items():
                detached[name].copy_(tensor)

    def check_in_step(self, *, buffers: bool = False) -> None:
        """Raises MismatchError unless this process's copies hold the same bits (in buffers too, if asked)."""
        first, *others = (_named_tensors(replica, buffers=buffers) for replica in self.replicas)
        for replica, tensors in enumerate(others, start=1):
            for name, tensor in tensors.items():
                if not _same_bits(tensor, first[name]):
                    raise MismatchError(
                        f"replica {replica} differs from replica 0 in {name!r}; copies stay in step if each "
                        "has an optimizer of its own (.optimizers) and steps after reduce_gradients"
                    )

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads the same state into all copies, or in a replica function its own; what the first one says."""
        devices = self.strategy.extended.worker_devices
        results = []
        for replica in self._meant():
            # Copies that took over the same tensors would share their memory.
            own = copy.deepcopy(state) if assign else state
            results.append(replica.load_state_dict(own, strict=strict, assign=assign))
            replica.to(torch_device(devices[self.replicas.index(replica)]))
        return results[0]


def _named_tensors(module: torch.nn.Module, *, buffers: bool) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **(dict(module.named_buffers()) if buffers else {})}


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    left, right = left.detach().cpu().contiguous(), right.detach().cpu().contiguous()
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return bool(torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)))
