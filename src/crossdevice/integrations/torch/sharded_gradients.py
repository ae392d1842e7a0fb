"""Reduce-scatters for FSDP2: sharded gradients with bits independent of how a model is wrapped.

Those of `ExactReduceScatter` do not depend on the number of workers either.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from fractions import Fraction
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from crossdevice.algorithms.collective_all_reduce import CollectiveAllReduce
from crossdevice.backends.registry import backend_named
from crossdevice.combining.between_ranks import gathered_json
from crossdevice.errors import (
    ContextError,
    CrossDeviceError,
    DtypeError,
    MismatchError,
    OptionError,
    ReduceOpError,
)
from crossdevice.integrations.torch.communication_hook import formed_group
from crossdevice.integrations.torch.gradient_sums import no_weight, whole_weight
from crossdevice.integrations.torch.tensor_kinds import is_instance_of
from crossdevice.kernels.host.running_sum import RunningSum
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.protocol import Message
from crossdevice.values.device import host_device
from crossdevice.values.dtypes import FLOATS
from crossdevice.values.options import CommunicationImplementation, CommunicationOptions, Precision
from crossdevice.values.reduce_op import ReduceOp


def _sharded_modules(model: torch.nn.Module) -> list[Any]:
    # Older releases of PyTorch, which the package also supports, have no FSDPModule to ask for.
    modules = [module for module in model.modules() if hasattr(module, "set_custom_reduce_scatter")]
    if not modules:
        raise OptionError(f"no module of this {type(model).__name__} is sharded; call fully_shard first")
    return modules


class ReproducibleReduceScatter:
    """The reduce-scatter of modules that `torch.distributed.fsdp.fully_shard` has wrapped.

    Gradients become means over the processes of a module's mesh, added by `CollectiveAllReduce` in a wider
    type and rounded once. Their bits do not depend on which modules are wrapped, and so travel together.
    `module.set_custom_reduce_scatter` takes it for one module, `use_in(model)` sets it for all modules
    of a model. One may serve several models and meshes. The backward pass waits for each reduce-scatter.

    Args:
        precision: `"accurate"` adds in a wider type in the order of ranks and rounds once; `"exact"` rounds
            the true mean, so the order of ranks does not matter.
        implementation: `"nccl"` has gradients travel from GPU to GPU and added there. Each process needs a
            GPU of its own. Otherwise they go through the host's memory.

    Raises:
        OptionError: the precision or the implementation is unknown.

    >>> ReproducibleReduceScatter(precision="exact").use_in(torch.nn.Linear(2, 2))
    Traceback (most recent call last):
    crossdevice.errors.OptionError: no module of this Linear is sharded; call fully_shard first
    """

    def __init__(
        self,
        precision: Precision = "accurate",
        implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO,
    ) -> None:
        read = cast("CommunicationImplementation", implementation)  # the options read names too
        self._options = CommunicationOptions(precision=precision, implementation=read)
        self._ops: dict[tuple[int, ...], CollectiveAllReduce] = {}

    def use_in(self, model: torch.nn.Module) -> None:
        """Sets it as the reduce-scatter of all sharded modules of a model.

        Args:
            model: a model that `fully_shard` has wrapped.

        Raises:
            OptionError: no module of the model is sharded.
        """
        for module in _sharded_modules(model):
            module.set_custom_reduce_scatter(self)

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Allocates memory for gradients; PyTorch calls it.

        Args:
            size: the shape.
            dtype: the dtype.
            device: the device.

        Returns:
            A tensor, not initialized.
        """
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Writes this process's part of the reduced input to the output, before it returns."""
        self._ops_of(group).reduce_scatter(_read(op), input_tensor, out=output_tensor)
        return _Done() if async_op else None

    def mean_over(self, group: dist.ProcessGroup) -> Callable[[torch.Tensor], None]:
        """Makes a hook for `module.set_all_reduce_hook`: sharded gradients become means over a group.

        With it, modules that are sharded over one axis of a mesh are replicated over another one.

        Args:
            group: the processes over which modules are replicated.

        Returns:
            The hook.
        """

        def replace(gradients: torch.Tensor) -> None:
            self._ops_of(group).reduce(ReduceOp.MEAN, gradients, gradients, out=gradients)

        return replace

    def _ops_of(self, group: dist.ProcessGroup) -> CollectiveAllReduce:
        """Returns the algorithm on a group's processes, formed when all of them first need it."""
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in self._ops:
            formed = formed_group(group, "sharded gradients")
            self._ops[ranks] = CollectiveAllReduce(options=self._options, group=formed)
        return self._ops[ranks]


class _Done(dist.Work):
    """A work handle that is complete from the start."""

    def is_completed(self) -> bool:
        """Returns True: the work is done at once."""
        return True

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002
        """Returns at once."""
        return True


def _read(op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> ReduceOp:
    try:
        return ReduceOp(op)
    except ReduceOpError:
        raise ReduceOpError(
            f"{op} is not a reduction that can be reproduced; with set_gradient_divide_factor, also call "
            "set_force_sum_reduction_for_comms(True), so that gradients are summed and then divided"
        ) from None


class ExactReduceScatter:
    """Reduce-scatter for sharded models: training is the same on any number of workers.

    Each backward pass sends a micro-batch's gradients to the workers that hold their shards, which add them
    without rounding. With the last micro-batch of a step `.grad` becomes the weighted mean over all
    micro-batches of all workers, rounded once. So its bits depend neither on the number of workers nor on who
    ran which micro-batch. All workers run as many backward passes, those that have nothing left with a weight
    of 0.

    On W workers a worker keeps 16 / W bytes for each parameter of the model (24 / W for float64) beside the
    gradients, on the host, and sends as many bytes for each micro-batch as FSDP2 does itself.

    >>> ExactReduceScatter(torch.nn.Linear(2, 2))
    Traceback (most recent call last):
    crossdevice.errors.OptionError: no module of this Linear is sharded; call fully_shard first

    Args:
        model: a model that `fully_shard` has wrapped, with all of its parameters, on a mesh of one axis.

    Raises:
        OptionError: the model is not sharded, or not as it has to be.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        modules = _sharded_modules(model)
        self._parameters = dict(model.named_parameters())
        for name, parameter in self._parameters.items():
            if not is_instance_of(parameter, "torch.distributed.tensor", "DTensor"):
                raise OptionError(f"the parameter {name} is not sharded, so nothing would add its gradients")
            if parameter.device_mesh.ndim > 1:
                raise OptionError(
                    f"the parameter {name} is on a mesh of {parameter.device_mesh.ndim} axes; "
                    "expected one axis: what HSDP adds between replicas would be rounded"
                )
        self._shards = [_ShardSum(self) for _ in modules]
        for module, shard in zip(modules, self._shards, strict=True):
            module.set_custom_reduce_scatter(shard)
            module.set_all_reduce_hook(shard.add_alone)
            # Nothing is divided before it is added: by what depends on the number of workers.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}
        self._with_gradients: list[str] | None = None
        self._pass: tuple[int, bool] | None = None
        """Weight of the running micro-batch, and whether it is the last one of its step."""
        self._problem: CrossDeviceError | None = None
        """Error raised when the block ends: FSDP2 is unusable after an error in its backward pass."""

    @property
    def group(self) -> ProcessGroup | None:
        """The workers that hold shards, for `clip_grad_norm_`; None if this is the only one.

        All of them ask for it alike the first time.
        """
        mesh = next(iter(self._parameters.values())).device_mesh
        return self._group_of(mesh.get_group()) if mesh.size() > 1 else None

    @contextlib.contextmanager
    def micro_batch(self, weight: int = 1, *, is_last: bool) -> Iterator[None]:
        """Runs the backward pass of one micro-batch in a block; all workers run as many.

        Args:
            weight: a whole number, 0 or more: how many examples or tokens the loss is a mean of.
            is_last: the last one of this step, after which `.grad` holds the mean.

        Returns:
            A context manager.

        Raises:
            OptionError: the weight is not a whole number from 0 to 2**53, or all weights add up to 0.
            ContextError: blocks are nested, gradients of the last step were not cleared, or other parameters
                have a gradient than in the micro-batch before.
            MismatchError: workers differ in which micro-batch is the last.
            DtypeError: gradients are not of floats.
        """
        factor = whole_weight(weight)
        if self._pass is not None:
            raise ContextError("a micro-batch is running already; end its block first")
        held = [name for name, parameter in self._parameters.items() if parameter.grad is not None]
        if held:
            raise ContextError(
                f"the gradient of {held[0]} still holds the result of the last step; call "
                "optimizer.zero_grad() first"
            )
        self._pass = factor, is_last
        try:
            yield
            if self._problem is not None:
                raise self._problem
            self._check_gradients()
        except BaseException:
            self.clear()
            raise
        finally:
            self._pass = None
        if is_last:
            self._with_gradients = None
        else:
            for parameter in self._parameters.values():
                parameter.grad = None

    def clear(self) -> None:
        """Drops what was added in this step; all workers call it."""
        for shard in self._shards:
            shard.clear()
        self._with_gradients = self._problem = None

    def _check_gradients(self) -> None:
        """Refuses micro-batches in which other parameters have gradients: shards have them side by side."""
        found = [name for name, parameter in self._parameters.items() if parameter.grad is not None]
        known, self._with_gradients = self._with_gradients, found
        if known is not None and known != found:
            odd = sorted({*known} ^ {*found})[0]
            raise ContextError(
                f"{odd} has a gradient in one micro-batch of the step and none in another; FSDP2 needs the "
                "same parameters in all of them"
            )

    def _group_of(self, group: dist.ProcessGroup) -> ProcessGroup:
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in self._groups:
            self._groups[ranks] = formed_group(group, "exact sharded gradients")
        return self._groups[ranks]


class _ShardSum:
    """The sum of this worker's shard of one module, as FSDP2 lays it out."""

    def __init__(self, owner: ExactReduceScatter) -> None:
        self._owner = owner
        self._running: RunningSum | None = None
        self._weight = 0
        self._was_called = False

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Allocates memory for gradients; PyTorch calls it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,  # noqa: ARG002 - nothing is divided
        async_op: bool = False,  # noqa: ARG002 - PyTorch asks for none
    ) -> None:
        """Adds all workers' gradients of this shard."""
        weight, is_last = self._now()
        self._was_called = True
        workers = self._owner._group_of(group)
        whole = _on_host(input_tensor).reshape(workers.size, -1)
        with workers.call("exact reduce-scatter", b"exact reduce-scatter") as call:
            facts = gathered_json(call, [weight, is_last, str(input_tensor.dtype), whole.shape[1]])
            for name, own in zip(workers.members, facts, strict=True):
                if own[1:] != facts[0][1:]:
                    self._owner._problem = MismatchError(
                        f"{name} has is_last={own[1]} and {own[3]} elements of {own[2]} in a shard; "
                        f"{workers.members[0]} has is_last={facts[0][1]} and {facts[0][3]} of {facts[0][2]}"
                    )
                    output_tensor.zero_()
                    return
            received = {peer: np.empty_like(whole[0]) for peer in call.others()}
            call.exchange(
                [Message(peer, whole[peer].view(np.uint8)) for peer in call.others()],
                [Message(peer, memory.view(np.uint8)) for peer, memory in received.items()],
            )
        received[call.group.rank] = whole[call.group.rank]
        self._add([received[peer] for peer in range(workers.size)], [own[0] for own in facts])
        self._write(output_tensor, is_last=is_last)

    def add_alone(self, gradients: torch.Tensor) -> None:
        """Adds gradients of the only worker, for which FSDP2 asks for no reduce-scatter."""
        if self._was_called:
            self._was_called = False
            return
        weight, is_last = self._now()
        self._add([_on_host(gradients)], [weight])
        self._write(gradients, is_last=is_last)

    def clear(self) -> None:
        """Drops what was added."""
        self._running, self._weight, self._was_called = None, 0, False

    def _now(self) -> tuple[int, bool]:
        if self._owner._pass is None:
            raise ContextError(
                "a backward pass ran outside of micro_batch(); run each of them in such a block"
            )
        return self._owner._pass

    def _add(self, arrays: Sequence[NDArray[Any]], weights: Sequence[int]) -> None:
        if self._running is None:
            self._running = RunningSum(arrays[0].size, arrays[0].dtype, "exact")
        counted = [(array, float(weight)) for array, weight in zip(arrays, weights, strict=True) if weight]
        if counted:
            self._running.add([array for array, _ in counted], [weight for _, weight in counted])
        self._weight += sum(weights)

    def _write(self, out: torch.Tensor, *, is_last: bool) -> None:
        assert self._running is not None
        if not is_last:
            out.zero_()  # dropped when the block ends
            return
        if not self._weight:
            self._owner._problem = no_weight()
            out.zero_()
            return
        mean = np.empty(self._running.size, self._running.dtype)
        self._running.write(mean, Fraction(self._weight))
        out.copy_(backend_named("torch").from_host(mean, tuple(out.shape), host_device(0)))
        self._running.clear()
        self._weight = 0


def _on_host(gradients: torch.Tensor) -> NDArray[Any]:
    dtype = str(gradients.dtype).removeprefix("torch.")
    if dtype not in FLOATS:
        raise DtypeError(f"sharded gradients have dtype {dtype}; expected one of {', '.join(FLOATS)}")
    flat: NDArray[Any] = backend_named("torch").to_host(gradients)
    return flat
