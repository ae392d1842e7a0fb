"""Gradients of copies of a module: in a form that all have in common, in flat memory, reduced in buckets."""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from crossdevice.algorithms.collective_all_reduce import group_of
from crossdevice.backends.torch_backend import torch_device
from crossdevice.errors import ContextError, ConversionError, OptionError
from crossdevice.execution.bound import BoundCall
from crossdevice.execution.pending import THIS_PROCESS, Pending
from crossdevice.execution.pending import start as start_work
from crossdevice.integrations.torch.mirroring import in_buckets
from crossdevice.integrations.torch.spans import span
from crossdevice.strategies.mirrored import MirroredStrategy
from crossdevice.strategies.running.replica_context import ReplicaContext
from crossdevice.values.distributed import PerReplica, components_of
from crossdevice.values.options import CommunicationOptions, as_options
from crossdevice.values.quantities import counted
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.replica_scope import current_replica, replica_scope

_USED_AND_UNUSED = {ReduceOp.MIN: (-1.0, 0.0), ReduceOp.PROD: (0.0, 1.0)}
"""Marks that, when combined, differ from the second one if and only if some replica gave the first."""


class ReplicaGradients:
    """Gradients of the trainable parameters by name; zeros for those that this replica has none for.

    Replicas may have used different parameters. All of them bring a gradient for every parameter, and a
    vector that says which ones they have, so that unused parameters can be told apart afterwards.
    """

    def __init__(
        self, module: torch.nn.Module, op: ReduceOp, device: torch.device, arena: Arena | None = None
    ) -> None:
        """Moves gradients with a place in an arena there; only the others are exchanged separately."""
        used, self._unused = _USED_AND_UNUSED.get(op, (1.0, 0.0))
        with_sparse = parameters_with_sparse_gradients(module)
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._views = {} if arena is None else arena.views
        if arena is not None:
            for name in arena.views:
                arena.take_in(name)
        self._own = {
            name: _zeros(p, is_sparse=id(p) in with_sparse) if p.grad is None else p.grad
            for name, p in self._parameters.items()
            if name not in self._views
        }
        self._lacks_some = any(p.grad is None for p in self._parameters.values())
        # A fill does not wait for a GPU, a copy of different numbers does.
        self._marks = torch.full((len(self._parameters),), used, device=device)
        if self._lacks_some:
            marks = [self._unused if p.grad is None else used for p in self._parameters.values()]
            self._marks = torch.tensor(marks, device=device)

    def brought(self) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Collects the gradients to reduce: one structure for all replicas."""
        return self._own, self._marks

    def take_over(self, reduced: tuple[Mapping[str, Any], torch.Tensor]) -> None:
        """Sets the gradients to the reduced ones; parameters that no replica used stay without one."""
        gradients, marks = reduced
        # With gradients of its own for all, a replica need not wait for the GPU to read the marks.
        is_used = (marks != self._unused).tolist() if self._lacks_some else [True] * len(marks)
        for (name, parameter), used in zip(self._parameters.items(), is_used, strict=True):
            if name in self._views:
                parameter.grad = self._views[name] if used else None
            elif used:
                parameter.grad = _laid_out_as(self._own[name], gradients[name])


def _zeros(parameter: torch.Tensor, *, is_sparse: bool) -> torch.Tensor:
    if not is_sparse:
        return torch.zeros_like(parameter, requires_grad=False)
    rows = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
    indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    return torch.sparse_coo_tensor(indices, rows, parameter.shape, check_invariants=False)


def _laid_out_as(own: torch.Tensor, reduced: torch.Tensor) -> torch.Tensor:
    """Returns the reduced gradient with the strides of the replica's own."""
    if own.is_sparse or reduced.is_sparse or own.stride() == reduced.stride():
        return reduced
    return torch.empty_like(own).copy_(reduced)


def parameters_with_sparse_gradients(module: torch.nn.Module) -> set[int]:
    """Returns ids of parameters with sparse gradients, also of those that a replica did not use."""
    tables = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {id(part.weight) for part in module.modules() if isinstance(part, tables) and part.sparse}


BUCKET_BYTES = 25 << 20
"""Same default as in DistributedDataParallel."""

ALIGNMENT_BYTES = 64
"""Gradients start at multiples of a cache line, as memory that PyTorch allocates does."""


class Slot(NamedTuple):
    """Place of a parameter's gradient: elements of the flat tensor of a dtype."""

    dtype: torch.dtype
    start: int
    stop: int


class Bucket(NamedTuple):
    """Slots that lie next to each other and are reduced together."""

    dtype: torch.dtype
    start: int
    stop: int
    names: tuple[str, ...]


class Arena:
    """The gradients of one copy of a module: one flat tensor per dtype, with a view for each parameter.

    Parameters lie in the reverse of their order in the module, in which a backward pass gets to them. Those
    with sparse gradients have no place here.
    """

    def __init__(self, module: torch.nn.Module, device: torch.device) -> None:
        self._module = module
        self.parameters = _dense_parameters(module)
        self.slots: dict[str, Slot] = {}
        lengths: dict[torch.dtype, int] = {}
        for name, parameter in reversed(self.parameters.items()):
            start = lengths.get(parameter.dtype, 0)
            self.slots[name] = Slot(parameter.dtype, start, start + parameter.numel())
            unit = max(1, ALIGNMENT_BYTES // parameter.element_size())
            lengths[parameter.dtype] = -(-(start + parameter.numel()) // unit) * unit
        self.flats = {
            dtype: torch.zeros(length, dtype=dtype, device=device) for dtype, length in lengths.items()
        }
        self.views = {name: self._view(name, parameter) for name, parameter in self.parameters.items()}

    def _view(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        slot, flat = self.slots[name], self.flats[parameter.dtype]
        if _is_dense(parameter):  # the strides that PyTorch gives gradients
            return flat.as_strided(parameter.shape, parameter.stride(), slot.start)
        return flat[slot.start : slot.stop].view(parameter.shape)

    def fits(self) -> bool:
        """Returns True if the trainable parameters are unchanged."""
        now = _dense_parameters(self._module)
        return now.keys() == self.parameters.keys() and all(
            parameter is self.parameters[name] and parameter.dtype == self.slots[name].dtype
            for name, parameter in now.items()
        )

    def take_in(self, name: str) -> None:
        """Moves a gradient here, from wherever PyTorch put it; zeros if there is none."""
        parameter, view = self.parameters[name], self.views[name]
        gradient = parameter.grad
        if gradient is None:
            view.zero_()
        elif gradient is not view:
            if gradient.requires_grad:
                raise ConversionError(
                    f"the gradient of {name} is part of a graph (create_graph=True), and a gradient arena "
                    "holds values only; use a MirroredModule without arenas"
                )
            view.copy_(gradient.to_dense())  # sparse where a function, not a module, made it so
            parameter.grad = view


class GradientArenas:
    """The arenas of all copies of a module.

    With `overlap`, a bucket is reduced as soon as all replicas have all of it. The bits do not depend on
    buckets: every element is reduced by itself.
    """

    def __init__(
        self,
        replicas: Sequence[torch.nn.Module],
        strategy: MirroredStrategy,
        num_holds: Sequence[int],
        overlap: ReduceOp | None,
        bucket_bytes: int,
    ) -> None:
        """`num_holds` counts the `no_sync` blocks each replica is in; gradients are not reduced in them."""
        self._replicas, self._strategy, self._num_holds = replicas, strategy, num_holds
        self._devices = strategy.extended.worker_devices
        self._ops = strategy.extended.cross_device_ops
        self._overlap, self._bucket_bytes = overlap, bucket_bytes
        self._lock = threading.Lock()
        self._hooks: list[Any] = []
        self._pending: list[Pending] = []
        self.arrange()

    def of_twin(self, replicas: Sequence[torch.nn.Module], num_holds: Sequence[int]) -> GradientArenas:
        """Returns the arenas of other copies, with the same settings."""
        return GradientArenas(replicas, self._strategy, num_holds, self._overlap, self._bucket_bytes)

    def arrange(self) -> None:
        """Rebuilds the layout for the current parameters; keeps gradients."""
        self._wait()
        for hook in self._hooks:
            hook.remove()
        self.arenas = [
            Arena(module, torch_device(device))
            for module, device in zip(self._replicas, self._devices, strict=True)
        ]
        # Between processes on the host: what is on GPUs would have to wait for them in the backward pass.
        on_host = all(device.is_host for device in self._devices)
        overlaps = self._overlap is not None and (group_of(self._ops) is None or on_host)
        self._buckets = _buckets_of(self.arenas[0], self._bucket_bytes if overlaps else math.inf)
        self._bucket_of = {name: k for k, bucket in enumerate(self._buckets) for name in bucket.names}
        self._bound: dict[tuple[int, ReduceOp], BoundCall] = {}
        # The garbage collector does not look into hooks, so what they hold would keep the module for good.
        itself = weakref.ref(self)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(
                functools.partial(_on_gradient, itself, replica, name)
            )
            for replica, arena in enumerate(self.arenas if overlaps else ())
            for name, parameter in arena.parameters.items()
        ]
        self._begin_round()

    def arrange_if_changed(self) -> None:
        """Rebuilds the layout if parameters have changed, outside of replica functions."""
        if not all(arena.fits() for arena in self.arenas):
            self.arrange()
        else:
            self._wait()
            self._begin_round()

    def reduce_as_replica(
        self, context: ReplicaContext, op: ReduceOp, options: CommunicationOptions | None
    ) -> None:
        """Does the work of `reduce_gradients` in each replica, after its backward pass."""
        self._check(op, options)
        replica = context.local_replica
        if not self.arenas[replica].fits():
            context.meet("rearrange gradients", (), None, self._rearrange)
        device = torch_device(self._devices[replica])
        gradients = ReplicaGradients(self._replicas[replica], op, device, self.arenas[replica])
        merge = functools.partial(self._reduce, op, options)
        chosen = as_options(options)
        gradients.take_over(context.meet("reduce_gradients", (op.name,), gradients.brought(), merge, chosen))

    def _rearrange(self, replicas: Sequence[None]) -> Sequence[None]:
        """Joins the replicas after their backward passes and rearranges buckets."""
        if self._num_started:
            raise ContextError(
                "trainable parameters have changed since the last step, and gradients of "
                f"{counted(self._num_started, 'bucket')} were reduced during the backward pass; change "
                "parameters by methods of the MirroredModule, or call its zero_grad() outside of replica "
                "functions afterwards"
            )
        self.arrange()
        return replicas

    def _check(self, op: ReduceOp, options: CommunicationOptions | None) -> None:
        """Refuses settings that come too late for gradients reduced during the backward pass."""
        if self._overlap is None:
            return
        if op is not self._overlap:
            raise OptionError(
                f"reduce_gradients({op.name}) of a MirroredModule with overlap={self._overlap.name!r}, whose "
                "gradients are reduced during the backward pass; expected the same operation"
            )
        if options is not None:
            raise OptionError(
                f"reduce_gradients was given options, and with overlap={self._overlap.name!r} gradients are "
                "reduced before that; leave out one of them"
            )

    def _reduce(
        self, op: ReduceOp, options: CommunicationOptions | None, brought: Sequence[Any]
    ) -> Sequence[Any]:
        """Reduces the remaining gradients in place, and the replicas' other values; returns the latter."""
        with span("reduce", "reduce_gradients", self._devices):
            self._wait()
            for number in range(self._num_started, len(self._buckets)):
                if options is None:
                    self._bound_bucket(number, op)()
                else:
                    value = self._value(number)
                    self._ops.reduce(op, value, value, options, out=value)
            self._begin_round()
            whole = PerReplica.of(tuple(brought), self._devices)
            return components_of(self._ops.batch_reduce(op, [(whole, whole)], options)[0])

    def on_gradient(self, replica: int, name: str) -> None:
        """Handles a gradient in the backward pass, in the replica's thread or a GPU's."""
        # On GPUs PyTorch goes back in threads of its own, which are no replica's; on the host, one that
        # comes outside of the replica's function is no part of a step.
        is_own = current_replica() == replica or not self._devices[replica].is_host
        if not is_own or self._num_holds[replica]:
            return
        self.arenas[replica].take_in(name)
        with self._lock:
            if name in self._counted[replica]:
                raise ContextError(
                    f"replica {replica} ({self._devices[replica]}) got a second gradient of {name} before "
                    "reduce_gradients; gradients are reduced during the backward pass here, so put all but "
                    "the last one in no_sync() (after a failed step, zero_grad() outside starts anew)"
                )
            self._counted[replica].add(name)
            self._missing[self._bucket_of[name]] -= 1
            while self._num_started < len(self._buckets) and not self._missing[self._num_started]:
                with replica_scope(None):
                    self._pending.append(self._start_bucket(self._num_started))
                self._num_started += 1

    def _start_bucket(self, number: int) -> Pending:
        assert self._overlap is not None
        bound = self._bound_bucket(number, self._overlap)
        if any(not device.is_host for device in self._devices):
            return bound.start()  # on side streams; only GPUs know when they are done

        def run() -> None:
            dtype, start, stop, _ = self._buckets[number]
            with span("reduce", f"bucket {number}", self._devices, (stop - start) * dtype.itemsize):
                bound()

        # Of a group, all calls take turns, in the order of their programs.
        return start_work(run, group_of(self._ops) or THIS_PROCESS)

    def _bound_bucket(self, number: int, op: ReduceOp) -> BoundCall:
        if (number, op) not in self._bound:
            value = self._value(number)
            self._bound[number, op] = self._ops.bind(op, value, value, out=value)
        return self._bound[number, op]

    def _value(self, number: int) -> PerReplica:
        dtype, start, stop, _ = self._buckets[number]
        return PerReplica.of(tuple(arena.flats[dtype][start:stop] for arena in self.arenas), self._devices)

    def _wait(self) -> None:
        pending, self._pending = self._pending, []
        for each in pending:
            each.wait()

    def _begin_round(self) -> None:
        self._num_started = 0
        self._counted: list[set[str]] = [set() for _ in self.arenas]
        self._missing = [len(bucket.names) * len(self.arenas) for bucket in self._buckets]


def _on_gradient(arenas: weakref.ref[GradientArenas], replica: int, name: str, _: torch.Tensor) -> None:
    if (owner := arenas()) is not None:
        owner.on_gradient(replica, name)


def _dense_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    with_sparse = parameters_with_sparse_gradients(module)
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and id(parameter) not in with_sparse
    }


def _is_dense(tensor: torch.Tensor) -> bool:
    """Returns True if its elements fill a range of memory, in any order."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() == reach + 1


def _buckets_of(arena: Arena, bucket_bytes: float) -> list[Bucket]:
    """Splits the parameters of each dtype into buckets of similar size."""
    buckets: list[Bucket] = []
    for dtype in arena.flats:
        own = [(name, slot) for name, slot in arena.slots.items() if slot.dtype == dtype]
        sized = [(each, (each[1].stop - each[1].start) * dtype.itemsize) for each in own]
        for (first, slot), *others in in_buckets(sized, bucket_bytes):
            names = (first, *(name for name, _ in others))
            buckets.append(Bucket(dtype, slot.start, arena.slots[names[-1]].stop, names))
    return buckets
