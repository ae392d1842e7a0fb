"""DistributedDataParallel with and without a hook for reproducible gradients.

    torchrun --nproc-per-node 3 examples/reproducible_ddp.py

Gradients are exchanged in buckets. Without the hook their size decides in which order
gloo adds, and so the bits of the trained model; with it, it does not.
"""

import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from crossdevice.integrations.torch import ReproducibleMean, reproducible_hook

if "RANK" in os.environ:
    dist.init_process_group("gloo")
else:  # not started by torchrun
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def digest_of_training(*, bucket_cap_mb: float, with_hook: bool) -> str:
    """Trains for ten steps; returns a digest of the parameters."""
    torch.manual_seed(0)
    first = [nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh()]
    layers = nn.Sequential(*first, nn.Linear(256, 1))
    model = DistributedDataParallel(layers, bucket_cap_mb=bucket_cap_mb)
    if with_hook:
        model.register_comm_hook(ReproducibleMean(), reproducible_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    examples = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(10):
        inputs = torch.randn(64, 32, generator=examples)
        optimizer.zero_grad()
        (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean().backward()
        optimizer.step()
    flat = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


for with_hook in (False, True):
    small = digest_of_training(bucket_cap_mb=0.05, with_hook=with_hook)
    large = digest_of_training(bucket_cap_mb=25, with_hook=with_hook)
    if dist.get_rank() == 0:
        what = "with the hook" if with_hook else "without"
        print(f"{what}: buckets of 0.05 MiB {small}, of 25 MiB {large}")
dist.destroy_process_group()
