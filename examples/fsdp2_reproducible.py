"""FSDP2 whose gradients do not depend on how the model is wrapped.

    torchrun --nproc-per-node 4 examples/fsdp2_reproducible.py

Gradients of modules that are wrapped together travel together. With PyTorch's own
reduce-scatter that decides the order of additions, and so the bits of the model.
"""

import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from crossdevice.integrations.torch import ReproducibleReduceScatter

if "RANK" in os.environ:
    dist.init_process_group("gloo")
else:  # not started by torchrun
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def trained(mesh: DeviceMesh, *, layer_by_layer: bool, with_ours: bool) -> str:
    """Trains for ten steps; returns a digest of the parameters."""
    torch.manual_seed(0)
    first, second, last = nn.Linear(33, 256), nn.Linear(256, 256), nn.Linear(256, 1)
    model = nn.Sequential(first, nn.Tanh(), second, last)
    for layer in (first, second, last) if layer_by_layer else ():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if with_ours:
        ReproducibleReduceScatter().use_in(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    examples = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(10):
        inputs = torch.randn(64, 33, generator=examples)
        optimizer.zero_grad()
        (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean().backward()
        optimizer.step()
    whole = [each.full_tensor().detach() for each in model.parameters()]
    flat = torch.cat([each.reshape(-1) for each in whole])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


size = dist.get_world_size()
shape = (2, size // 2) if size > 1 else (1, 1)
line = init_device_mesh("cpu", (size,))
square = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
meshes = ("FSDP", line, False), ("FSDP", line, True), ("HSDP", square, True)
for kind, mesh, ours in meshes:
    single = trained(mesh, layer_by_layer=True, with_ours=ours)
    whole = trained(mesh, layer_by_layer=False, with_ours=ours)
    if dist.get_rank() == 0:
        what = f"{kind}, our reduce-scatter" if ours else f"{kind}, PyTorch's own"
        print(f"{what}: layers wrapped one by one {single}, all at once {whole}")
dist.destroy_process_group()
