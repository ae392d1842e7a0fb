"""DistributedDataParallel with and without a hook that makes its gradients reproducible.

    torchrun --nproc-per-node 3 examples/reproducible_ddp.py

Gradients are exchanged in buckets. Without the hook their size decides in which order gloo adds, and so the
bits of the trained model; with it, it does not.
"""

import hashlib
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from crossdevice.integrations.torch import ReproducibleMean, reproducible_hook

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
"""What torchrun sets; without it this is the only process."""

for name, value in ALONE.items():
    os.environ.setdefault(name, value)
dist.init_process_group("gloo")


def digest_of_training(*, bucket_cap_mb: float, with_hook: bool) -> str:
    """The trained parameters, as a few characters."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256), torch.nn.Tanh()]
    model = DistributedDataParallel(
        torch.nn.Sequential(*layers, torch.nn.Linear(256, 1)), bucket_cap_mb=bucket_cap_mb
    )
    if with_hook:
        model.register_comm_hook(ReproducibleMean(), reproducible_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    examples = torch.Generator().manual_seed(1 + dist.get_rank())  # every process has its own
    for _ in range(10):
        inputs = torch.randn(64, 32, generator=examples)
        optimizer.zero_grad()
        (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean().backward()
        optimizer.step()
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


for with_hook in (False, True):
    digests = [digest_of_training(bucket_cap_mb=size, with_hook=with_hook) for size in (0.05, 25)]
    if dist.get_rank() == 0:
        what = "with the hook" if with_hook else "without"
        print(f"{what}: buckets of 0.05 MiB {digests[0]}, of 25 MiB {digests[1]}")
dist.destroy_process_group()
