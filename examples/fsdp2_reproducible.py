"""FSDP2 with a reduce-scatter that gives the same gradients however the model is wrapped.

    torchrun --nproc-per-node 4 examples/fsdp2_reproducible.py

Gradients of modules that are wrapped together travel together. With PyTorch's own reduce-scatter that decides
in which order they are added, and so the bits of the trained model.
"""

import hashlib
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from crossdevice.integrations.torch import ReproducibleReduceScatter

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29518"}
"""What torchrun sets; without it this is the only process."""

for name, value in ALONE.items():
    os.environ.setdefault(name, value)
dist.init_process_group("gloo")


def digest_of_training(mesh: DeviceMesh, *, layer_by_layer: bool, with_ours: bool) -> str:
    """The trained parameters, as a few characters."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(33, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256), torch.nn.Linear(256, 1)]
    model = torch.nn.Sequential(*layers)
    for layer in (layers[0], layers[2], layers[3]) if layer_by_layer else ():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if with_ours:
        ReproducibleReduceScatter().use_in(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    examples = torch.Generator().manual_seed(1 + dist.get_rank())  # every process has its own
    for _ in range(10):
        inputs = torch.randn(64, 33, generator=examples)
        optimizer.zero_grad()
        (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean().backward()
        optimizer.step()
    flat = torch.cat([parameter.full_tensor().detach().reshape(-1) for parameter in model.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


size = dist.get_world_size()
line = init_device_mesh("cpu", (size,))
square = init_device_mesh(
    "cpu", (2, size // 2) if size > 1 else (1, 1), mesh_dim_names=("replicate", "shard")
)
for kind, mesh, ours in (("FSDP", line, False), ("FSDP", line, True), ("HSDP", square, True)):
    digests = [digest_of_training(mesh, layer_by_layer=each, with_ours=ours) for each in (True, False)]
    if dist.get_rank() == 0:
        what = f"{kind}, our reduce-scatter" if ours else f"{kind}, PyTorch's own"
        print(f"{what}: layers wrapped one by one {digests[0]}, all at once {digests[1]}")
dist.destroy_process_group()
