"""A PyTorch module with batches split over the devices of one process: no launcher, no ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeAlias

import torch

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.backends.torch_backend import torch_device
from crossdevice.errors import OptionError
from crossdevice.integrations.torch.batches import Share, joined, leaves, shares_of
from crossdevice.integrations.torch.gradient_arenas import BUCKET_BYTES
from crossdevice.integrations.torch.mirroring import HeldGradients, KeptCopies, mirrored_in_buckets
from crossdevice.integrations.torch.module_copies import average_buffers, check_is_plain, named_tensors
from crossdevice.integrations.torch.module_replicas import check_replicable, keep_buffers, replica_of
from crossdevice.integrations.torch.spans import span, watch_backward
from crossdevice.integrations.torch.tensor_kinds import refuse_special
from crossdevice.strategies.current import get_replica_context
from crossdevice.strategies.mirrored import MirroredStrategy
from crossdevice.values.device import Device, check_listed
from crossdevice.values.options import whole_number

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
    check_listed(devices)
    return [_read_device(device) for device in devices]


def _read_device(device: DeviceLike) -> Device:
    """Parses a device; a number means a GPU, as in PyTorch."""
    if isinstance(device, int):
        return Device("cuda", device)
    return Device.parse(str(device) if isinstance(device, torch.device) else device)
