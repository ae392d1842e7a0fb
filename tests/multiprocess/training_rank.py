"""A rank that trains as programs for torch.distributed do, unmodified but for the backend's name."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import crossdevice.integrations.torch  # noqa: F401 - registers the backend
from multiprocess.launching import report

WIDTH, STEPS, ROWS = 24, 3, 12
DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"


class Block(nn.Module):
    """A block of a transformer without its attention: a norm and two layers, and a residual."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, WIDTH), Block(), nn.Linear(WIDTH, 1)).to(DEVICE)


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def parameters_of(model):
    return [whole(parameter).clone() for parameter in model.parameters()]


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 5, generator=generator).to(DEVICE)


def share(x):
    rank, size = dist.get_rank(), dist.get_world_size()
    return x[rank * ROWS // size : (rank + 1) * ROWS // size]


def trained(model, optimizer=None, *, clips=False, splits=True):
    """The parameters after some steps; each rank has its share of every batch, or all of it."""
    # On GPUs PyTorch would update parameters that are DTensors together with those that are none, and fail.
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = share(batch(step)) if splits else batch(step)
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return parameters_of(model)


def close(found, expected):
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(found, expected, strict=True))


def equal(found, expected):
    return all(map(torch.equal, found, expected))


def data_parallel(alone):
    whole_model = trained(DistributedDataParallel(network()))
    facts = {"DDP": close(whole_model, alone)}
    ways = {
        "small buckets": {"bucket_cap_mb": 0.0005},
        "large buckets": {"bucket_cap_mb": 100},
        "static graph": {"static_graph": True},
        "unused parameters": {"find_unused_parameters": True},
        "bucket views": {"gradient_as_bucket_view": True},
    }
    for name, options in ways.items():
        facts[name] = equal(trained(DistributedDataParallel(network(), **options)), whole_model)
    model = DistributedDataParallel(network())
    with model.no_sync():
        model(share(batch(0))).sum().backward()
    model(share(batch(1))).sum().backward()
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, [p.grad for p in model.parameters()])
    facts["no_sync"] = all(equal(each, everyones[0]) for each in everyones)
    model = DistributedDataParallel(network())
    from torch.distributed.optim import ZeroRedundancyOptimizer  # deprecated parts of PyTorch come with it

    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05)
    facts["ZeRO"] = close(trained(model, zero), alone)
    return facts


def sharded(**options):
    model = network()
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def fully_sharded(alone, clipped):
    found = trained(sharded())
    facts = {
        "FSDP2": close(found, alone),
        "at once": equal(trained(fully_shard(network())), found),
        "kept after forward": equal(trained(sharded(reshard_after_forward=False)), found),
        "clipped": close(trained(sharded(), clips=True), clipped),
    }
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mixed = trained(sharded(mp_policy=policy))
    facts["mixed precision"] = all(
        torch.allclose(a, b, rtol=0.1, atol=0.1) for a, b in zip(mixed, alone, strict=True)
    )
    model, folders = sharded(), [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    trained(model)
    dist.broadcast_object_list(folders, 0)
    state = get_model_state_dict(model)
    dcp.save(state, checkpoint_id=folders[0])
    again = sharded()
    read = get_model_state_dict(again)
    dcp.load(read, checkpoint_id=folders[0])
    set_model_state_dict(again, read)
    facts["checkpoint"] = equal(parameters_of(again), parameters_of(model))
    return facts


def tensor_parallel(alone, mesh):
    size = dist.get_world_size()
    a = torch.arange(12.0 * size, device=DEVICE).view(2 * size, 6)
    x = distribute_tensor(a, mesh, [Shard(0)])
    facts = {"DTensor": x.sum().full_tensor().item() == a.sum().item()}
    moved = x.redistribute(mesh, [Shard(1)]).full_tensor()
    facts["redistributed"] = torch.equal(moved, a)
    model = network()
    parallelize_module(model[1], mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    facts["tensor parallel"] = close(trained(model, splits=False), alone)
    block, plain = Block().to(DEVICE), Block().to(DEVICE)
    plain.load_state_dict(block.state_dict())
    for other in (block, plain):  # one model on all ranks
        for parameter in other.parameters():
            dist.broadcast(parameter.data, 0)
    parallelize_module(block, mesh, {"norm": SequenceParallel()})
    x = torch.randn(2, 2 * size, WIDTH, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    own = x.chunk(size, 1)[dist.get_rank()]  # each rank has a part of every sequence
    facts["sequence parallel"] = torch.allclose(whole(block.norm(own)), plain.norm(x), atol=1e-5)
    return facts


def pipelined():
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    stages = [nn.Linear(WIDTH, WIDTH).to(DEVICE) for _ in range(size)]
    x = torch.randn(8, WIDTH).to(DEVICE)
    schedule = ScheduleGPipe(
        PipelineStage(stages[rank], rank, size, torch.device(DEVICE)),
        4,
        loss_fn=lambda a, b: (a - b).square().mean(),
    )
    losses = []
    if rank == 0:
        schedule.step(x)
    elif rank == size - 1:
        schedule.step(target=x, losses=losses)
    else:
        schedule.step()
    if rank != size - 1:
        return True
    expected = x
    for stage in stages:
        expected = stage(expected)
    found = torch.stack(losses).mean()
    return torch.allclose(found, (expected - x).square().mean(), atol=1e-5)


def accelerated(alone):
    if DEVICE != "cpu":  # it would look for a GPU for each rank
        return None
    try:
        from accelerate import Accelerator
    except ModuleNotFoundError:
        return None
    accelerator = Accelerator(
        cpu=DEVICE == "cpu"
    )  # on the group there is: it knows no names of other backends
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for step in range(STEPS):
        x = share(batch(step))
        optimizer.zero_grad()
        accelerator.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
        optimizer.step()
    return close(parameters_of(model), alone)


def main(rank, size):
    torch.set_num_threads(1)
    dist.init_process_group("crossdevice", rank=rank, world_size=size)
    mesh = init_device_mesh(DEVICE, (size,))
    alone, clipped = trained(network(), splits=False), trained(network(), splits=False, clips=True)
    facts = {
        "backend": dist.get_backend(),
        "data parallel": data_parallel(alone),
        "fully sharded": fully_sharded(alone, clipped),
        "tensor parallel": tensor_parallel(alone, mesh),
        "pipelined": pipelined(),
        "accelerate": accelerated(alone),
    }
    dist.barrier()
    dist.destroy_process_group()
    report(rank, facts)


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
