"""A PyTorch module with batches split over the devices of one process: no launcher, no ranks.

Replicas are shallow copies that hold other tensors, one for each device and call.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import types
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch.nn.utils import parametrize

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.backends.torch_backend import torch_device
from crossdevice.errors import ContextError, ConversionError, DeviceError, OptionError
from crossdevice.integrations.torch.batches import Share, joined, leaves, shares_of
from crossdevice.integrations.torch.gradient_arenas import BUCKET_BYTES
from crossdevice.integrations.torch.mirroring import HeldGradients, KeptCopies, mirrored_in_buckets
from crossdevice.integrations.torch.module_copies import average_buffers, check_is_plain, named_tensors
from crossdevice.integrations.torch.spans import span, watch_backward
from crossdevice.integrations.torch.tensor_kinds import is_instance_of, refuse_special
from crossdevice.strategies.current import get_replica_context
from crossdevice.strategies.mirrored import MirroredStrategy
from crossdevice.values.device import Device
from crossdevice.values.options import whole_number


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


DeviceLike: TypeAlias = "Device | str | int | torch.device"


class DataParallel(torch.nn.Module):
    """A module that splits its batches among devices; replaces `torch.nn.DataParallel`, on any devices.

    `devices` may be logical CPU devices, GPUs, or one GPU several times. The gradients of replicas are
    summed in one batch, in a wider type in replica order. The same seed gives the same bits in every run,
    also with dropout: each replica has its own random stream.

    Arguments: the batch size is the size along `dim` of the first tensor for which it is not 1. Tensors of
    that size are split, also in lists, dicts, dataclasses and other containers (`register_container`). Every
    replica gets all of tensors without axes or of size 1, of those named in `replicate`, and of what is not
    a tensor. A tensor of any other size is refused by name. A batch with fewer examples than devices uses
    fewer replicas; without a batch there is one replica.

    Results: tensors are concatenated along `dim` on the output device; tensors without axes become a vector
    with one number per replica. With several replicas, a Python number such as `len(x)` is refused, because
    it describes only one share. Other results must be equal on all replicas.

    Replicas on the device of a parameter use its memory, replicas on other devices a copy. Gradients are
    computed only for parameters that require them. Replicas are shallow copies of the module, made for every
    call: attributes that `forward` sets are lost; `buffers` says which changed buffers are kept.

    Args:
        module: the module, whose parameters are on the first device.
        devices: logical CPU devices, GPUs, or one GPU several times; None is all GPUs, or one logical CPU
            device per core.
        cross_device_ops: the algorithm that sums gradients; None chooses one.
        dim: the axis along which batches are split.
        replicate: names of arguments, or of keys and attributes in them, that every replica gets whole.
        buffers: `"first"` keeps the buffers (running statistics) of the first replica, as
            `torch.nn.DataParallel` does; `"mean"` keeps the mean over replicas of floats and complex
            numbers.
        device_ids: another name of `devices`, where numbers are GPUs, as in `torch.nn.DataParallel`.
        output_device: where results are joined; the first device if None.
        bucket_bytes: gradients are summed in buckets of this size, during the backward pass, as soon as all
            replicas have them. The bits do not depend on it.

    Raises:
        OptionError: an argument is outside its range, or contradicts another.
        DeviceError: a device name cannot be read, or there is no such device.
        MismatchError: in a call, if a tensor has neither the batch size nor size 1.
        ConversionError: in a call, if results that are not tensors differ.
        ReplicaError: in a call, if replicas make different calls.

    >>> model = DataParallel(torch.nn.Linear(3, 1), devices=["cpu:0", "cpu:1"])
    >>> model(torch.ones(5, 3)).shape
    torch.Size([5, 1])
    """

    def __init__(
        self,
        module: torch.nn.Module,
        devices: Sequence[DeviceLike] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        dim: int = 0,
        *,
        replicate: Collection[str] = (),
        buffers: str = "first",
        device_ids: Sequence[DeviceLike] | None = None,
        output_device: DeviceLike | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__()
        check_is_plain(module)
        if buffers not in ("first", "mean"):
            raise OptionError(f"buffers must be 'first' or 'mean', got {buffers!r}")
        if devices is not None and device_ids is not None:
            raise OptionError(
                "both devices and device_ids were given; they are the same, expected one of them"
            )
        chosen = _read_devices(device_ids if devices is None else devices)
        self.strategy = MirroredStrategy(chosen, cross_device_ops, own_random_streams=True)
        self._smaller: dict[int, MirroredStrategy] = {}
        self.devices = self.strategy.extended.worker_devices
        self.output_device = torch_device(
            self.devices[0] if output_device is None else _read_device(output_device)
        )
        self.dim = dim
        self.replicate = (replicate,) if isinstance(replicate, str) else tuple(replicate)
        self.buffer_rule = buffers
        self.bucket_bytes = whole_number("bucket_bytes", bucket_bytes, least=1)
        self._kept = KeptCopies()
        self._held = HeldGradients(self.strategy.extended.cross_device_ops, self.devices)
        for name, tensor in named_tensors(module).items():
            if not torch.nn.parameter.is_lazy(tensor):  # by the first call it may have values
                refuse_special(tensor, f"module.{name}")
        self.module = module.to(torch_device(self.devices[0]))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Splits the batch, runs a replica on each share, and joins the results.

        Args:
            inputs: the arguments of the module; tensors of the batch size are split.
            kwargs: its keyword arguments, likewise.

        Returns:
            What the module returns for the whole batch.

        Raises:
            MismatchError: a tensor has neither the batch size nor size 1.
            ConversionError: results that are not tensors differ.
        """
        check_replicable(self.module)
        shares = shares_of(self.module, inputs, kwargs, self.devices, self.dim, self.replicate)
        if len(shares) == 1:
            # The first share is on the module's own device, so it needs no replica, nor a thread.
            with span("forward", "forward", self.devices[:1]):
                outputs = [self.module(*shares[0].inputs, **shares[0].kwargs)]
        else:
            outputs = self._run(shares)
        result = joined(outputs, self.output_device, self.dim)
        watched = [leaf for _, leaf in leaves(result, "result")]
        watch_backward(
            watched, self.devices[: len(shares)], self._held.deliver, is_of_replicas=len(shares) > 1
        )
        return result

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keeps the gradients of calls in this block, and sums them with those of the next call after it.

        Until that one's backward pass, `grad` does not contain them. For micro-batches of one optimizer step;
        the forward pass has to be in the block too.

        Returns:
            A context manager.
        """
        before, self._held.is_holding = self._held.is_holding, True
        try:
            yield
        finally:
            self._held.is_holding = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients as for any module, those of `no_sync` blocks too.

        Args:
            set_to_none: as in PyTorch.
        """
        self._held.forget()
        super().zero_grad(set_to_none)

    def train(self, mode: bool = True) -> DataParallel:
        """Sets the mode, as for any module, and renews all copies on other devices.

        Args:
            mode: True for training, False for evaluation.

        Returns:
            The module itself.
        """
        self._kept.forget()
        return super().train(mode)

    def _run(self, shares: Sequence[Share]) -> list[Any]:
        """Runs each replica on its share and returns the outputs."""
        is_training = any(part.training for part in self.module.modules())
        replicas = self._replicas(len(shares), is_training=is_training)
        outputs: list[Any] = [None] * len(shares)

        def run_replica() -> None:
            context = get_replica_context()
            assert context is not None
            context.joins_graphs = True  # the caller's backward pass goes through all replicas
            number = context.replica_id_in_sync_group
            with span("forward", "forward", context.devices):
                outputs[number] = replicas[number](*shares[number].inputs, **shares[number].kwargs)

        self._strategy_of(len(shares)).run(run_replica)
        keep_buffers(self.module, replicas[0])
        if self.buffer_rule == "mean" and is_training:
            # The first replica's are those of the module itself; all others go with this call.
            buffers = [dict(part.named_buffers()) for part in (self.module, *replicas[1:])]
            ops, devices = self.strategy.extended.cross_device_ops, self.devices[: len(replicas)]
            average_buffers(ops, buffers, devices, everywhere=False)
        return outputs

    def _strategy_of(self, num_replicas: int) -> MirroredStrategy:
        """Returns the strategy, or one of its first devices: all of its replicas must take part in calls."""
        if num_replicas == len(self.devices):
            return self.strategy
        if num_replicas not in self._smaller:
            self._smaller[num_replicas] = MirroredStrategy(
                self.devices[:num_replicas], self.strategy.extended.cross_device_ops, own_random_streams=True
            )
        return self._smaller[num_replicas]

    def _replicas(self, count: int, *, is_training: bool) -> list[torch.nn.Module]:
        """Returns modules that share all but parameters and buffers with the original, one per device."""
        parameters, buffers = dict(self.module.named_parameters()), dict(self.module.named_buffers())
        for name, tensor in (*parameters.items(), *buffers.items()):
            refuse_special(tensor, f"module.{name}")
        learns = torch.is_grad_enabled()
        trainable = [parameter for parameter in parameters.values() if learns and parameter.requires_grad]
        # Some write through `.data`, and batch norm's statistics are not counted as changed.
        self._kept.forget([*trainable, *(buffers.values() if is_training else ())])
        ops, devices = self.strategy.extended.cross_device_ops, self.devices[:count]
        mirrored = mirrored_in_buckets(ops, devices, trainable, self.bucket_bytes, self._held)
        replicas = []
        for number, device in enumerate(map(torch_device, devices)):
            tensors = dict(zip(map(id, trainable), mirrored[number], strict=True))
            for parameter in parameters.values():
                if id(parameter) not in tensors:
                    tensors[id(parameter)] = self._kept.on(parameter, device)
            for buffer in buffers.values():
                if number == 0:
                    tensors[id(buffer)] = buffer
                elif is_training:
                    tensors[id(buffer)] = buffer.to(device, copy=True)
                else:
                    tensors[id(buffer)] = self._kept.copy_for(number, buffer, device)
            replicas.append(replica_of(self.module, tensors))
        return replicas


def _read_devices(devices: Sequence[DeviceLike] | None) -> list[Device] | None:
    if devices is None:
        return None
    if isinstance(devices, (str, bytes)) or not isinstance(devices, Sequence):
        raise DeviceError(f"devices must be a list of device names, got {devices!r}")
    if not devices:
        raise OptionError("devices is empty; expected at least one, or None for all that there are")
    return [_read_device(device) for device in devices]


def _read_device(device: DeviceLike) -> Device:
    """Parses a device; a number means a GPU, as in PyTorch."""
    if isinstance(device, int):
        return Device("cuda", device)
    return Device.parse(str(device) if isinstance(device, torch.device) else device)
