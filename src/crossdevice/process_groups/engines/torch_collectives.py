"""Collectives of PyTorch's tensors where they are: NCCL for GPUs, each rank with GPUs of its own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from crossdevice.process_groups.engines.torch_store import leave_behind_at_fork
from crossdevice.process_groups.protocol import Started

PAUSE_SECONDS = 0.00005
"""Between two questions whether a collective has ended."""


class TorchCollectives:
    """The collectives of one rank on an engine of torch.distributed, which the first of them starts."""

    def __init__(self, store: dist.Store, rank: int, size: int, start: Callable[..., Any]) -> None:
        """`start` makes the engine of a store, a rank, a size and a timeout."""
        self._place = (store, rank, size)
        self._start = start
        self._engine: Any = None

    def all_reduce_of(self, tensor: torch.Tensor, op: str) -> Started:
        """An all-reduce after all that the current stream is to do before it."""
        options = dist.AllreduceOptions()
        options.reduceOp = {
            "SUM": dist.ReduceOp.SUM,
            "PROD": dist.ReduceOp.PRODUCT,
            "MIN": dist.ReduceOp.MIN,
            "MAX": dist.ReduceOp.MAX,
        }[op]
        return self._after_current_stream(tensor, lambda engine: engine.allreduce([tensor], options))

    def all_to_all_of(self, output: torch.Tensor, tensor: torch.Tensor) -> Started:
        """The same for an all-to-all; of bytes, since engines do not have all dtypes."""
        out, sent = output.view(torch.uint8), tensor.view(torch.uint8)
        return self._after_current_stream(tensor, lambda engine: engine.alltoall_base(out, sent, [], []))

    def all_gather_of(self, output: torch.Tensor, tensor: torch.Tensor) -> Started:
        """The same for an all-gather."""
        out, sent = output.view(torch.uint8), tensor.view(torch.uint8)
        return self._after_current_stream(tensor, lambda engine: engine._allgather_base(out, sent))

    def _after_current_stream(self, tensor: torch.Tensor, begin: Callable[[Any], dist.Work]) -> Started:
        on_gpu = tensor.device.type == "cuda"
        stream = torch.cuda.current_stream(tensor.device) if on_gpu else None

        def run(timeout_seconds: float) -> None:
            end = time.monotonic() + timeout_seconds
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                if self._engine is None:
                    self._engine = self._start(*self._place, timedelta(seconds=timeout_seconds))
                    leave_behind_at_fork(self._engine)
                work = begin(self._engine)
                while not work.is_completed():
                    if time.monotonic() > end:
                        raise TimeoutError(f"no answer in {timeout_seconds:g} seconds")
                    time.sleep(PAUSE_SECONDS)
                work.wait()

        return run


def nccl_of(store: dist.Store, rank: int, size: int) -> TorchCollectives | None:
    """The collectives of NCCL, if PyTorch has it and sees a GPU."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return None
    return TorchCollectives(dist.PrefixStore("nccl", store), rank, size, dist.ProcessGroupNCCL)
