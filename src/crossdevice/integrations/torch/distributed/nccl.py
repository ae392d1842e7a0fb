"""NCCL, for operations of a group of torch.distributed that has asked for it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def nccl_asked_for(group: dist.ProcessGroup) -> bool:
    """Returns True if the program has named NCCL beside this backend, as in "cpu:crossdevice,cuda:nccl"."""
    config = distributed_c10d._world.pg_backend_config.get(group, "")
    return "cuda:nccl" in str(config)


def nccl_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Returns a group on NCCL; its first collective creates communicators."""
    if not dist.is_nccl_available():
        raise RuntimeError("Distributed package doesn't have NCCL built in")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    made = dist.ProcessGroupNCCL(dist.PrefixStore("cuda/", store), rank, size, options)
    made._set_sequence_number_for_group()
    return made
