"""A rank that trains as programs for torch.distributed do, unmodified but for the backend's name."""

import copy
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
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
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


class Attention(nn.Module):
    """As many heads as its layers have columns for: each rank may have a part of them."""

    HEAD_WIDTH = 2

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        heads = [
            layer(x).unflatten(-1, (-1, self.HEAD_WIDTH)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        found = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(-2))


class TransformerBlock(nn.Module):
    """A whole block: attention and two layers, each after a norm and around a residual."""

    def __init__(self):
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.feed = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.first_norm(x))
        return x + self.feed(self.second_norm(x))


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
    for reduced in (torch.float32, torch.bfloat16):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
        mixed = trained(sharded(mp_policy=policy))
        facts[f"mixed precision, reduced as {reduced}"] = all(
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
    return facts | transformer_block(mesh)


def transformer_block(mesh):
    """Outputs, gradients and their norm, of a block in parts, and of its sequences, too."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    plain, x = TransformerBlock().to(DEVICE), torch.randn(2, 12, WIDTH).to(DEVICE)
    in_columns = ("attention.query", "attention.key", "attention.value", "feed.0")
    layers = {
        **{name: ColwiseParallel() for name in in_columns},
        **{name: RowwiseParallel() for name in ("attention.out", "feed.2")},
    }
    of_sequences = layers | {
        **{name: SequenceParallel() for name in ("first_norm", "second_norm")},
        **{name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.out", "feed.2")},
        **{
            name: PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
            for name in ("attention", "feed")
        },
    }
    expected = plain(x)
    expected.square().sum().backward()
    facts = {}
    for name, places, own in (
        ("tensor parallel block", layers, x),
        ("sequence parallel block", of_sequences, x.chunk(size, 1)[rank]),
    ):
        block = copy.deepcopy(plain)
        block.zero_grad()
        parallelize_module(block, mesh, places)
        found = block(own)
        found.square().sum().backward()
        if own is not x:
            found = whole(DTensor.from_local(found, mesh, [Shard(1)]))
        facts[name] = torch.allclose(found, expected, atol=1e-4)
        gradients = [[each.grad for each in model.parameters()] for model in (block, plain)]
        facts[f"{name}'s gradients"] = close(map(whole, gradients[0]), gradients[1])
    # PyTorch 2.11 loses what its loop over many tensors, the default on GPUs, writes to partial gradients.
    norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False) for model in (block, plain)]
    facts["norm of gradients in parts"] = close([whole(norms[0])], norms[1:])
    facts["clipped gradients in parts"] = close(map(whole, gradients[0]), gradients[1])
    return facts


def pipelined():
    schedules = (ScheduleGPipe, 1), (Schedule1F1B, 1), (ScheduleInterleaved1F1B, 2)
    return {kind.__name__: trains_in_stages(kind, per_rank) for kind, per_rank in schedules}


def trains_in_stages(kind, per_rank):
    """Whether the gradients of this rank's stages are those of the whole model, and so is the loss."""
    rank, size = dist.get_rank(), dist.get_world_size()
    number, device = per_rank * size, torch.device(DEVICE)
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH).to(device) for _ in range(number)]
    x, plain = torch.randn(24, WIDTH).to(device), copy.deepcopy(layers)
    expected = nn.functional.mse_loss(nn.Sequential(*plain)(x), x)
    expected.backward()
    places = range(rank, number, size)
    stages = [PipelineStage(layers[place], place, number, device) for place in places]
    schedule = kind(stages if per_rank > 1 else stages[0], 2 * size, loss_fn=nn.functional.mse_loss)
    losses, is_last = [], rank == size - 1
    schedule.step(*([x] if rank == 0 else []), **({"target": x, "losses": losses} if is_last else {}))
    gradients = [[each.grad for place in places for each in of[place].parameters()] for of in (layers, plain)]
    return close(*gradients) and (not is_last or close([torch.stack(losses).mean()], [expected]))


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
