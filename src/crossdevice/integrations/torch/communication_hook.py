"""A communication hook for DistributedDataParallel: gradients whose bits do not depend on buckets."""

# DistributedDataParallel compares a hook's annotations with types, so here they must not be strings.

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from crossdevice.algorithms.collective_all_reduce import CollectiveAllReduce
from crossdevice.errors import OptionError
from crossdevice.process_groups.courier import Courier
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.torch_group import form_group
from crossdevice.values.options import CommunicationOptions, Precision
from crossdevice.values.reduce_op import ReduceOp


class ReproducibleMean:
    """What `reproducible_hook` needs: the model's processes, and a thread that sees to its buckets in order.

    Args:
        group: the processes that share the model; None forms a group of those of torch.distributed's
            default group, so all of them make this object together.
        precision: `"accurate"` adds wide, in the order of ranks, and rounds once; `"exact"` rounds the true
            mean, whatever the order of ranks.
    """

    def __init__(self, group: ProcessGroup | None = None, precision: Precision = "accurate") -> None:
        if group is None:
            if not dist.is_available() or not dist.is_initialized():
                raise OptionError(
                    "torch.distributed has no default group to take processes from; "
                    "call torch.distributed.init_process_group first, or give a group"
                )
            group = form_group(dist.get_rank(), dist.get_world_size(), name="communication hook")
        self.group = group
        self._ops = CollectiveAllReduce(options=CommunicationOptions(precision=precision), group=group)
        self._courier = Courier(f"crossdevice gradients of rank {group.rank}")

    def start(self, gradients: torch.Tensor, then: Callable[[BaseException | None], None]) -> None:
        """Has gradients replaced by their mean over all processes, once those started before have been.

        Args:
            then: called on another thread, with what went wrong.
        """
        if gradients.is_cuda:
            torch.cuda.current_stream(gradients.device).synchronize()

        def reduce() -> None:
            try:
                self._ops.reduce(ReduceOp.MEAN, gradients, gradients, out=gradients)
                if gradients.is_cuda:
                    torch.cuda.current_stream(gradients.device).synchronize()
            except BaseException as error:
                then(error)
                raise
            then(None)

        self._courier.send(reduce)


def reproducible_hook(state: ReproducibleMean, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For `model.register_comm_hook(ReproducibleMean(), reproducible_hook)` of a DistributedDataParallel.

    Gradients, those in bfloat16 and float16 too, are the mean over all processes as
    `CollectiveAllReduce` computes it: added wide, rounded once. Their bits do not depend on
    `bucket_cap_mb`. The backward pass goes on meanwhile. An error of the group ends the backward pass.
    """
    if not isinstance(state, ReproducibleMean):
        raise OptionError(
            f"reproducible_hook needs a ReproducibleMean as its state, got {type(state).__name__}: "
            "model.register_comm_hook(ReproducibleMean(), reproducible_hook)"
        )
    gradients = bucket.buffer()
    ended: torch.futures.Future[Any] = torch.futures.Future(
        devices=[gradients.device] if gradients.is_cuda else None
    )

    def mean(ended: torch.futures.Future[Any]) -> torch.Tensor:
        error = ended.value()
        if error is not None:
            raise error
        return gradients

    state.start(gradients, ended.set_result)
    return ended.then(mean)
