"""Tensors of a module on several replicas: shared where memory is, copied elsewhere; gradients are summed."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.backends.torch_backend import torch_device
from crossdevice.errors import ConversionError
from crossdevice.integrations.torch.spans import span
from crossdevice.values.device import Device
from crossdevice.values.distributed import PerReplica
from crossdevice.values.reduce_op import ReduceOp

Sized = TypeVar("Sized")


def mirrored_in_buckets(
    ops: CrossDeviceOps,
    devices: Sequence[Device],
    tensors: Sequence[torch.Tensor],
    bucket_bytes: int,
    held: HeldGradients,
) -> list[list[torch.Tensor]]:
    """Returns the tensors of each replica; gradients are summed by bucket, during the backward pass."""
    of_replicas: list[list[torch.Tensor]] = [[] for _ in devices]
    sized = [(tensor, tensor.numel() * tensor.element_size()) for tensor in tensors]
    for bucket in in_buckets(sized, bucket_bytes):
        flat = MirroredTensors.apply(ops, devices, held, held.is_holding, *bucket)
        for number, own in enumerate(of_replicas):
            own += flat[number * len(bucket) : (number + 1) * len(bucket)]
    return of_replicas


def in_buckets(sized: Iterable[tuple[Sized, int]], bucket_bytes: float) -> Iterator[list[Sized]]:
    """Groups items into buckets of about `bucket_bytes`."""
    bucket: list[Sized] = []
    total = 0
    for each, num_bytes in sized:
        bucket.append(each)
        total += num_bytes
        if total >= bucket_bytes:
            yield bucket
            bucket, total = [], 0
    if bucket:
        yield bucket


class MirroredTensors(torch.autograd.Function):
    """Differentiable copies of tensors, for every replica; all gradients are summed in one batch.

    A replica on a tensor's own device shares its memory, but has its own gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        ops: CrossDeviceOps,
        devices: Sequence[Device],
        held: HeldGradients | None,
        holds: bool,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Returns the tensors of the first replica, those of the second, and so on."""
        ctx.ops, ctx.devices, ctx.held, ctx.holds, ctx.tensors = ops, devices, held, holds, tensors
        ctx.set_materialize_grads(False)
        return tuple(_on(device, tensor) for device in devices for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        """Returns one sum per tensor; None for those that no replica used."""
        if ctx.held is not None and (ctx.holds or ctx.held.has_kept):
            nodes = [node for node, _ in ctx.next_functions]
            leaves = [
                tensor if tensor.is_leaf and _is_added_to_grad(node) else None
                for tensor, node in zip(ctx.tensors, nodes, strict=True)
            ]
            gradients = (ctx.held.hold if ctx.holds else ctx.held.joined)(leaves, gradients)
            if all(gradient is None for gradient in gradients):
                return None, None, None, None, *(None for _ in ctx.tensors)
        with span("reduce", "sum gradients", tuple(ctx.devices)):
            return None, None, None, None, *Summed.apply(ctx.ops, ctx.devices, *gradients)


def _is_added_to_grad(node: Any) -> bool:
    """Returns True if the backward pass adds to a leaf's `grad`, unlike `torch.autograd.grad`."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # raised for leaves in `torch.autograd.grad`
        return False


def _on(device: Device, tensor: torch.Tensor) -> torch.Tensor:
    source, target = tensor.device, torch_device(device)
    if source == target:
        return tensor.detach()
    places = (Device.parse(str(source)), device)
    with span("copy", "weights", places, tensor.numel() * tensor.element_size()):
        return tensor.detach().to(target)


class Summed(torch.autograd.Function):
    """Sums over replicas on the first device; this and `MirroredTensors` are each other's derivative."""

    @staticmethod
    def forward(
        ctx: Any, ops: CrossDeviceOps, devices: Sequence[Device], *gradients: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Sums the tensors of all replicas, given replica by replica; None counts as zero."""
        count = len(gradients) // len(devices)
        columns = [gradients[position::count] for position in range(count)]
        ctx.ops, ctx.devices = ops, devices
        ctx.is_given = [gradient is not None for gradient in gradients]
        ctx.set_materialize_grads(False)
        used = [
            position for position, column in enumerate(columns) if any(given is not None for given in column)
        ]
        if any(
            torch._C._functorch.is_legacy_batchedtensor(given) for given in gradients if given is not None
        ):
            raise ConversionError(
                "gradients of parameters are asked for in one batch (is_grads_batched=True, vectorize=True), "
                "in which those of replicas cannot be summed; ask for one after the other"
            )
        pairs = [(_per_replica(columns[position], devices), devices[0]) for position in used]
        sums: list[torch.Tensor | None] = [None] * count
        for position, total in zip(used, ops.batch_reduce(ReduceOp.SUM, pairs) if pairs else (), strict=True):
            sums[position] = total
        return tuple(sums)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        """Returns the gradient of each sum, for every replica."""
        given = [gradient for gradient in gradients if gradient is not None]
        copies = iter(MirroredTensors.apply(ctx.ops, ctx.devices, None, False, *given) if given else ())
        everywhere = [
            None if gradient is None else next(copies) for _ in ctx.devices for gradient in gradients
        ]
        return (
            None,
            None,
            *(copy if is_given else None for copy, is_given in zip(everywhere, ctx.is_given, strict=True)),
        )


def _per_replica(column: Sequence[torch.Tensor | None], devices: Sequence[Device]) -> PerReplica:
    """Returns one tensor's gradients, as rows if all are sparse; zeros for replicas without one."""
    some = [gradient for gradient in column if gradient is not None]
    are_rows = all(gradient.is_sparse and gradient.sparse_dim() == 1 for gradient in some)
    own = [
        torch.zeros_like(some[0], device=torch_device(device)) if gradient is None else gradient
        for gradient, device in zip(column, devices, strict=True)
    ]
    if not are_rows:
        own = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in own]
    return PerReplica.of(tuple(own), tuple(devices))


class HeldGradients:
    """Per-replica gradients that wait to be summed while batches are accumulated."""

    def __init__(self, ops: CrossDeviceOps, devices: Sequence[Device]) -> None:
        self._ops, self._devices = ops, devices
        self._kept: dict[int, tuple[torch.Tensor, list[torch.Tensor | None]]] = {}
        self.is_holding = False
        """True if gradients of later computations are kept here."""

    @property
    def has_kept(self) -> bool:
        """True if there are unsummed gradients."""
        return bool(self._kept)

    def hold(
        self, leaves: Sequence[torch.Tensor | None], gradients: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor | None, ...]:
        """Adds the gradients of leaves to those kept, by replica; returns the others."""
        others, count = list(gradients), len(leaves)
        for position, leaf in enumerate(leaves):
            if leaf is None:
                continue
            _, kept = self._kept.setdefault(id(leaf), (leaf, [None] * len(self._devices)))
            for replica, gradient in enumerate(gradients[position::count]):
                kept[replica] = _added(kept[replica], None if gradient is None else gradient.detach())
                others[position + count * replica] = None
        return tuple(others)

    def joined(
        self, leaves: Sequence[torch.Tensor | None], gradients: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor | None, ...]:
        """Adds the kept gradients of leaves to the given ones, and keeps them no longer."""
        joined, count = list(gradients), len(leaves)
        for position, leaf in enumerate(leaves):
            _, kept = self._kept.pop(id(leaf), (leaf, []))
            for replica, gradient in enumerate(kept):
                # A smaller batch may have fewer replicas.
                place = position + count * replica if replica < len(gradients) // count else position
                if gradient is not None and place == position:
                    gradient = gradient.to(torch_device(self._devices[0]))
                joined[place] = _added(joined[place], gradient)
        return tuple(joined)

    def deliver(self) -> None:
        """Adds the sums of the kept gradients to `grad` of their tensors, unless more are to be held."""
        for tensor, kept in [] if self.is_holding else list(self._kept.values()):
            del self._kept[id(tensor)]
            with torch.no_grad():
                (total,) = Summed.apply(self._ops, self._devices, *kept)
            tensor.grad = _added(tensor.grad, total)

    def forget(self) -> None:
        """Drops what is kept."""
        self._kept.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> HeldGradients:
        """Copies the kept gradients too, for the copies of the tensors."""
        copied = HeldGradients(*copy.deepcopy((self._ops, self._devices), memo))
        for leaf, kept in copy.deepcopy(list(self._kept.values()), memo):
            copied._kept[id(leaf)] = leaf, kept
        return copied

    def __reduce__(self) -> Any:
        """Pickles without gradients, as parameters are pickled."""
        return HeldGradients, (self._ops, self._devices)


def _added(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left + right


class KeptCopies:
    """Cache of copied tensors, each valid while neither the copy nor its original changes.

    PyTorch's version counters reveal changes, except for writes through `.data`.
    """

    def __init__(self) -> None:
        # References to the tensors, so that their ids are not used for others.
        self._kept: dict[tuple[int, Hashable], tuple[torch.Tensor, torch.Tensor, Any]] = {}

    def on(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns the tensor itself on its own device, else a copy that all replicas there share."""
        return tensor if tensor.device == device else self.copy_for(device, tensor, device)

    def copy_for(self, owner: Hashable, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns the owner's copy; makes a new one if the copy or the original has changed."""
        original, made, looks = self._kept.get((id(tensor), owner), (None, tensor, None))
        if original is tensor and made.device == device and looks == _looks(tensor, made):
            return made
        # A copy made in inference mode would have no version counter.
        with torch.inference_mode(False), torch.no_grad():
            made = tensor.detach().to(device, copy=True)
        if not tensor.is_inference():  # inference tensors have no version counters
            self._kept[id(tensor), owner] = (tensor, made, _looks(tensor, made))
        return made

    def forget(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Forgets copies of these tensors, or all, so that new ones are made on the next request."""
        numbers = None if tensors is None else set(map(id, tensors))
        for key in list(self._kept):
            if numbers is None or key[0] in numbers:
                del self._kept[key]

    def __reduce__(self) -> Any:
        """Copies and pickles as an empty cache."""
        return KeptCopies, ()


def _looks(*tensors: torch.Tensor) -> list[Any]:
    return [(tensor._version, tensor.data_ptr(), tensor.dtype, tensor.shape) for tensor in tensors]
