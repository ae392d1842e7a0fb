"""Batch normalization over the batch of all replicas."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from crossdevice.errors import ContextError
from crossdevice.strategies.current import get_replica_context


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
    """The sums of all replicas over the counts of all, on this replica's device; and the count of all."""
    context = get_replica_context()
    assert context is not None

    def merge(parts: list[tuple[torch.Tensor, int]]) -> Sequence[tuple[torch.Tensor, int]]:
        total = sum(number for _, number in parts)
        device = parts[0][0].device
        mean = torch.stack([part.to(device) for part, _ in parts]).sum(0) / total
        return [(mean.to(part.device), total) for part, _ in parts]

    answer: tuple[torch.Tensor, int] = context.meet("sync_batch_norm", (), (sums, count), merge)
    return answer
