"""A reduce-scatter for FSDP2: sharded gradients with bits independent of how a model is wrapped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from crossdevice.algorithms.collective_all_reduce import CollectiveAllReduce
from crossdevice.errors import OptionError, ReduceOpError
from crossdevice.integrations.torch.communication_hook import formed_group
from crossdevice.values.options import CommunicationImplementation, CommunicationOptions, Precision
from crossdevice.values.reduce_op import ReduceOp


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
        # Older releases of PyTorch, which the package also supports, have no FSDPModule to ask for.
        modules = [module for module in model.modules() if hasattr(module, "set_custom_reduce_scatter")]
        if not modules:
            raise OptionError(f"no module of this {type(model).__name__} is sharded; call fully_shard first")
        for module in modules:
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
