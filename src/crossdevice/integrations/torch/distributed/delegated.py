"""Engines of torch.distributed for operations that crossdevice delegates: gloo, and NCCL on request."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from crossdevice.errors import OptionError
from crossdevice.process_groups.engines.torch_store import leave_behind_at_fork


def gloo_of(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Returns a gloo group that connects at once: otherwise a receive waits until the other rank sends.

    The store must be new: addresses of an earlier group would be taken for these.
    """
    if not dist.is_gloo_available():
        raise OptionError("this PyTorch was built without gloo, which the crossdevice backend needs")
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(interface=name) for name in interfaces] or [
        gloo.create_default_device()
    ]
    options._timeout = timeout
    made = gloo(dist.PrefixStore("gloo", store), rank, size, options)
    leave_behind_at_fork(made)
    return made


def nccl_asked_for(group: dist.ProcessGroup) -> bool:
    """Returns True if the program has named NCCL beside this backend, as in "cpu:crossdevice,cuda:nccl"."""
    config = distributed_c10d._world.pg_backend_config.get(group, "")
    return "cuda:nccl" in str(config)


def nccl_of(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Returns a group on NCCL; its first collective creates communicators."""
    if not dist.is_nccl_available():
        raise RuntimeError("Distributed package doesn't have NCCL built in")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    made = dist.ProcessGroupNCCL(dist.PrefixStore("cuda/", store), rank, size, options)
    made._set_sequence_number_for_group()
    return made
