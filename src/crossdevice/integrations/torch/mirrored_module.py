"""A PyTorch module with a copy on each device of a strategy, for training steps that run as replicas."""

from __future__ import annotations

import contextlib
import copy
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn

import optree
import torch

from crossdevice.algorithms.collective_all_reduce import CollectiveAllReduce
from crossdevice.backends.torch_backend import torch_device
from crossdevice.errors import ContextError, ConversionError, DeviceError, OptionError
from crossdevice.integrations.torch.gradient_arenas import BUCKET_BYTES, GradientArenas, ReplicaGradients
from crossdevice.integrations.torch.module_copies import (
    average_buffers,
    check_can_have_copies,
    check_same,
    named_tensors,
)
from crossdevice.integrations.torch.spans import span, watch_backward
from crossdevice.strategies.current import get_replica_context
from crossdevice.strategies.mirrored import MirroredStrategy
from crossdevice.values.distributed import PerReplica
from crossdevice.values.options import CommunicationOptions, whole_number
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.replica_scope import current_replica

_OWN = ("strategy", "replicas", "_num_holds", "_arenas")

_READING = (
    *("forward", "state_dict", "get_extra_state", "extra_repr"),
    *("parameters", "buffers", "modules", "children", "get_parameter", "get_buffer", "get_submodule"),
    *("named_parameters", "named_buffers", "named_modules", "named_children"),
    *("_save_to_state_dict", "_load_from_state_dict"),  # called by a module around this one
)
"""Methods of modules that mean the current copy."""

_CHANGING = (
    *("train", "eval", "requires_grad_", "zero_grad", "compile"),
    *("type", "float", "double", "half", "bfloat16"),
    *("register_forward_hook", "register_forward_pre_hook", "register_backward_hook"),
    *("register_full_backward_hook", "register_full_backward_pre_hook"),
    *("register_state_dict_pre_hook", "register_state_dict_post_hook"),
    *("register_load_state_dict_pre_hook", "register_load_state_dict_post_hook"),
)
"""Methods that change all copies, outside of replica functions."""

_GIVING = (
    *("add_module", "register_module", "set_submodule", "register_parameter", "register_buffer"),
    "set_extra_state",
)
"""Methods with tensor or module arguments; each copy of the module gets its own copies of these."""

_MOVING = ("cpu", "cuda", "ipu", "mtia", "xpu", "share_memory", "to_empty")
"""Methods that move modules, refused outside of replica functions."""


class MirroredModule(torch.nn.Module):
    """A module with one copy on each device of a strategy, with parameters kept equal bit for bit.

    In a replica function everything refers to the replica's own copy. Outside of one, what changes a module
    (`train`, `apply`, `double`, `zero_grad`, `load_state_dict`, `to` another dtype, `add_module`, hooks,
    setting an attribute) changes all copies. Calling the module or reading from it uses the first copy, so
    its `state_dict()` is that of the module itself. The k-th copy of this process is `replicas[k]`. Under a
    strategy over several processes, all copies start with the values of the first process.

    Create optimizers by `optimizers`, one for each copy: `torch.optim.SGD(model.parameters())` has the
    parameters of the first copy only, and does not change the others.

    Args:
        module: the module that is copied.
        strategy: a MirroredStrategy, or a MultiWorkerMirroredStrategy.
        arenas: whether the gradients of a copy lie in one flat tensor per dtype, so that a whole model is
            reduced as one array, in place. Each `grad` is a view of it, which
            `zero_grad(set_to_none=False)` and optimizers keep. After `zero_grad(set_to_none=True)` PyTorch
            allocates new gradients, which are copied there.
        overlap: the operation of `reduce_gradients`; given that, gradients (in arenas) are reduced in
            buckets while the backward pass goes on, and `reduce_gradients` waits for the last. On GPUs they
            are reduced after it.
        bucket_bytes: the size of a bucket. The bits do not depend on it.

    Raises:
        OptionError: an argument is outside its range.
        MismatchError: processes brought different modules.

    >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
    >>> model = MirroredModule(torch.nn.Linear(3, 1), strategy)
    >>> model
    MirroredModule(
      devices: cpu:0, cpu:1
      (module): Linear(in_features=3, out_features=1, bias=True)
    )
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

    strategy: MirroredStrategy
    replicas: tuple[torch.nn.Module, ...]
    _arenas: GradientArenas | None

    def __init__(
        self,
        module: torch.nn.Module,
        strategy: MirroredStrategy,
        *,
        arenas: bool = False,
        overlap: ReduceOp | str | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        whole_number("bucket_bytes", bucket_bytes, least=1)
        if not isinstance(strategy, MirroredStrategy):
            raise OptionError(f"strategy must be a MirroredStrategy, got {strategy!r}")
        # Module.__init__ is left out: parameters, submodules and hooks are those of the copies.
        check_can_have_copies(module)
        self.strategy = strategy
        devices = strategy.extended.worker_devices
        self._take_over(named_tensors(module))
        copies = [module, *(copy.deepcopy(module) for _ in devices[1:])]
        self.replicas = tuple(
            replica.to(torch_device(device)) for replica, device in zip(copies, devices, strict=True)
        )
        self._num_holds = [0] * len(devices)
        self._arenas = None
        if arenas or overlap is not None:
            op = None if overlap is None else ReduceOp(overlap)
            self._arenas = GradientArenas(self.replicas, strategy, self._num_holds, op, bucket_bytes)

    def current(self) -> torch.nn.Module:
        """Returns the running replica's copy; the first outside of replica functions.

        Returns:
            The module.
        """
        return self.replicas[current_replica() or 0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the current copy."""
        devices = self.strategy.extended.worker_devices[current_replica() or 0 :][:1]
        with span("forward", "forward", devices):
            outputs = self.current()(*args, **kwargs)
        watch_backward(outputs, devices, is_of_replicas=current_replica() is not None)
        return outputs

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _OWN:  # copying looks for these on half-made objects
            raise AttributeError(name)
        return getattr(self.current(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        elif name == "__class__":
            raise ConversionError(
                "a MirroredModule cannot become another class, as torch.nn.utils.parametrize would have it; "
                "parametrize the module before it is mirrored"
            )
        elif isinstance(value, (torch.Tensor, torch.nn.Module)):
            self._give("__setattr__", name, value)
        else:
            self._change("__setattr__", name, value)

    def __delattr__(self, name: str) -> None:
        self._change("__delattr__", name)

    def __deepcopy__(self, memo: dict[int, Any]) -> MirroredModule:
        twin = type(self).__new__(type(self))
        twin.strategy = self.strategy
        twin.replicas = tuple(copy.deepcopy(replica, memo) for replica in self.replicas)
        twin._num_holds = [0] * len(self.replicas)
        own = self._arenas
        twin._arenas = None if own is None else own.of_twin(twin.replicas, twin._num_holds)
        return twin

    def __reduce__(self) -> NoReturn:
        raise ConversionError("a MirroredModule is not saved as a whole; save its state_dict()")

    def __repr__(self) -> str:
        devices = ", ".join(map(str, self.strategy.extended.worker_devices))
        module = textwrap.indent(f"(module): {self.replicas[0]!r}", "  ")
        return f"{type(self).__name__}(\n  devices: {devices}\n{module}\n)"

    def _meant(self) -> Sequence[torch.nn.Module]:
        """Returns the running replica's copy; all copies outside of replica functions."""
        return self.replicas if current_replica() is None else (self.current(),)

    def _read(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the current copy."""
        return getattr(self.current(), method)(*args, **kwargs)

    def _change(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of all selected copies; a method that returns its module returns this one."""
        results = [getattr(replica, method)(*args, **kwargs) for replica in self._meant()]
        self._rearrange()
        if isinstance(results[0], torch.utils.hooks.RemovableHandle):
            handles = _Handles()
            for handle in results:
                handles.callback(handle.remove)
            return handles
        return self if isinstance(results[0], torch.nn.Module) else results[0]

    def _give(self, method: str, /, *args: Any, **kwargs: Any) -> None:
        """Calls a method of all copies that are meant, with copies of its arguments for all but the first."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.nn.Module):
                check_can_have_copies(value)
            if current_replica() is None and isinstance(value, (torch.nn.Module, torch.Tensor)):
                is_module = isinstance(value, torch.nn.Module)
                self._take_over(named_tensors(value) if is_module else {"given": value})
        for number, replica in enumerate(self._meant()):
            own, named = copy.deepcopy((args, kwargs)) if number else (args, kwargs)
            getattr(replica, method)(*own, **named)
            replica.to(self._device_of(replica))
        self._rearrange()

    def _rearrange(self) -> None:
        """Updates the layout of gradients after a change outside of replica functions."""
        if self._arenas is not None and current_replica() is None:
            self._arenas.arrange_if_changed()

    def _device_of(self, replica: torch.nn.Module) -> torch.device:
        number = next(number for number, own in enumerate(self.replicas) if own is replica)
        return torch_device(self.strategy.extended.worker_devices[number])

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> MirroredModule:
        """Casts or moves the module; called by a module around this one."""
        for replica in self._meant():
            device = self._device_of(replica)
            # A function does not say where it moves tensors to, so it is tried on an empty one.
            if fn(torch.empty(0, device=device)).device != device:
                self._refuse_to_move("to", "elsewhere")
        self._change("_apply", fn, recurse)
        return self

    def _move(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Refuses, except in a replica function, where it moves the replica's own copy."""
        if current_replica() is None:
            self._refuse_to_move(method, *args, **kwargs)
        return self._change(method, *args, **kwargs)

    def _refuse_to_move(self, method: str, /, *args: Any, **kwargs: Any) -> NoReturn:
        given = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])
        own = ", ".join(map(str, self.strategy.extended.worker_devices))
        raise DeviceError(
            f"{method}({given}) would put all copies on one device; they stay on those of their strategy, "
            f"{own}: make a strategy on other devices, or take one copy of .replicas"
        )

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Casts all copies, or in a replica function its own; moving all of them is refused.

        Args:
            args: as of `torch.nn.Module.to`.
            kwargs: as of `torch.nn.Module.to`.

        Returns:
            The module itself.

        Raises:
            DeviceError: all copies would be moved.
        """
        device = torch._C._nn._parse_to(*args, **kwargs)[0]  # as the method of modules reads them
        own = {torch_device(device) for device in self.strategy.extended.worker_devices}
        if current_replica() is None and device is not None and own != {device}:
            self._refuse_to_move("to", *args, **kwargs)
        return self._change("to", *args, **kwargs)

    def apply(self, fn: Callable[[torch.nn.Module], object]) -> MirroredModule:
        """Calls a function with every submodule of all copies, which then take the first one's values.

        So initial values may be random. Under a strategy over several processes, they are those of the
        first process, and all processes take part. In a replica function only its own copy is meant.

        Args:
            fn: called with each submodule.

        Returns:
            The module itself.

        Raises:
            DeadlineError: other processes did not come in time.
            ProcessGroupError: a process of the group was lost.
        """
        for replica in self._meant():
            replica.apply(fn)
        if current_replica() is None:
            self._follow_first()
        return self

    def optimizers(self, make: Callable[[Iterator[torch.nn.Parameter]], Any]) -> PerReplica:
        """Makes an optimizer for each copy; `strategy.run` gives each replica its own.

        All of them may load the same state: each keeps tensors of its own.

        Args:
            make: called with the parameters of a copy; returns its optimizer.

        Returns:
            A PerReplica of optimizers.

        Raises:
            TypeError: `make` cannot be called.
        """
        made = [make(replica.parameters()) for replica in self.replicas]
        for found in optree.tree_leaves(made):
            if isinstance(found, torch.optim.Optimizer):
                found.register_load_state_dict_pre_hook(_own_state)
        return PerReplica.of(tuple(made), self.strategy.extended.worker_devices)

    def reduce_gradients(
        self, reduce_op: ReduceOp | str = ReduceOp.MEAN, options: CommunicationOptions | None = None
    ) -> None:
        """Combines the gradients of all replicas in one batch; called by each after its backward pass.

        A parameter that only some replicas used counts as zero in the others; one that no replica used has
        no gradient. Frozen parameters are left alone, sparse gradients stay sparse, strides are kept.

        With shares of a batch that differ in size, divide each loss by the size of the whole batch and
        use `"sum"`: then the gradient is that of one device on the whole batch.

        Args:
            reduce_op: the operation, as in `CrossDeviceOps.reduce`.
            options: precision, deadline and more; None takes the defaults.

        Raises:
            ContextError: it is called outside of replica functions.
            ReplicaError: replicas make different calls, or some have ended.
            DeadlineError: a replica did not come in time.
            MismatchError: replicas differ in shape, dtype, structure, device or library; the message names
                the odd one out.
        """
        context, replica = get_replica_context(), current_replica()
        if context is None or replica is None:
            raise ContextError("reduce_gradients is called by every replica, inside of strategy.run")
        if self._num_holds[replica]:
            return
        op = ReduceOp(reduce_op)
        if self._arenas is not None:
            self._arenas.reduce_as_replica(context, op, options)
            return
        gradients = ReplicaGradients(self.current(), op, torch_device(context.devices[0]))
        gradients.take_over(context.all_reduce(op, gradients.brought(), options))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Lets gradients of several batches add up: `reduce_gradients` does nothing in this block.

        It is for all replicas, or in a replica function for its own: then all of them enter it.

        Returns:
            A context manager.
        """
        replica = current_replica()
        held = range(len(self.replicas)) if replica is None else (replica,)
        for number in held:
            self._num_holds[number] += 1
        try:
            yield
        finally:
            for number in held:
                self._num_holds[number] -= 1

    def synchronize_buffers(self, how: Literal["first", "mean"] = "first") -> None:
        """Brings buffers (such as running statistics) of all copies into step.

        Args:
            how: `"first"` copies the first replica's to all others; `"mean"` takes the mean over all
                replicas of those with a floating-point dtype, and the first replica's of others.

        Raises:
            OptionError: `how` is another word.
            DeadlineError: other processes did not come in time.
            ProcessGroupError: a process of the group was lost.
        """
        if how not in ("first", "mean"):
            raise OptionError(f"how must be 'first' or 'mean', got {how!r}")
        buffers = [dict(replica.named_buffers()) for replica in self.replicas]
        extended = self.strategy.extended
        if how == "mean":
            averaged = average_buffers(
                extended.cross_device_ops, buffers, extended.worker_devices, everywhere=True
            )
            buffers = [{name: own[name] for name in own if name not in averaged} for own in buffers]
        self._follow_first(buffers)

    def _follow_first(self, tensors: Sequence[Mapping[str, torch.Tensor]] | None = None) -> None:
        """Overwrites tensors of the copies, all unless given, with the first process's first copy's."""
        first, *others = tensors or [named_tensors(replica) for replica in self.replicas]
        self._take_over(first)
        with torch.no_grad():
            for own in others:
                for name, source in first.items():
                    own[name].copy_(source)

    def _take_over(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrites tensors with those of the first process, if there are several."""
        ops = self.strategy.extended.cross_device_ops
        if isinstance(ops, CollectiveAllReduce) and tensors:
            detached = {name: tensor.detach() for name, tensor in tensors.items()}
            for name, tensor in ops.value_of_rank(detached, 0).items():
                detached[name].copy_(tensor)

    def check_in_step(self, *, buffers: bool = False) -> None:
        """Compares this process's copies, bit for bit.

        Their structure is compared too: modules, modes, hooks and frozen parameters.

        Args:
            buffers: True compares values of buffers, too.

        Raises:
            MismatchError: copies differ; the message names the first difference.
        """
        check_same(self.replicas, buffers=buffers)

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads the same state into all copies, or in a replica function its own.

        Args:
            state: the state of the module.
            strict: as in PyTorch.
            assign: as in PyTorch.

        Returns:
            What the first copy returned.

        Raises:
            RuntimeError: PyTorch's, if names or shapes do not fit.
        """
        results = []
        for replica in self._meant():
            # Copies that took over the same tensors would share their memory.
            own = copy.deepcopy(state) if assign else state
            results.append(replica.load_state_dict(own, strict=strict, assign=assign))
            replica.to(self._device_of(replica))
        self._rearrange()
        return results[0]

    @property
    def _load_state_dict_post_hooks(self) -> dict[Any, Callable[..., None]]:
        """The hooks of the copy; then the other copies follow, if a module around this one was loaded."""
        hooks = dict(self.current()._load_state_dict_post_hooks)
        if current_replica() is None:
            hooks["follow"] = lambda *_: self._follow_first()
        return hooks


def _own_state(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Copies what an optimizer loads, since it would keep tensors that are on its device already."""
    own: dict[str, Any] = copy.deepcopy(state)
    return own


class _Handles(contextlib.ExitStack):
    """The handles of a hook that all copies have; removes all of them, also at the end of a `with` block."""

    remove = contextlib.ExitStack.close


def _method(name: str, rule: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a method of modules that follows one of the rules above."""

    def method(self: MirroredModule, /, *args: Any, **kwargs: Any) -> Any:
        return rule(self, name, *args, **kwargs)

    method.__name__, method.__doc__ = name, f"`torch.nn.Module.{name}`. {rule.__doc__}"
    return method


for _rule, _names in (
    (MirroredModule._read, _READING),
    (MirroredModule._change, _CHANGING),
    (MirroredModule._give, _GIVING),
    (MirroredModule._move, _MOVING),
):
    for _name in _names:
        setattr(MirroredModule, _name, _method(_name, _rule))
