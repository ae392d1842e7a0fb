"""Trains a sharded model on 1, 2 and 3 workers in turn, and reports the bits of its gradients and errors.

All workers are forked from one process: to import FSDP takes a process longer than everything it does here.
"""

import multiprocessing
import os
import sys
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import crossdevice as cd
from crossdevice.integrations.torch import ExactGradients, ExactReduceScatter, clip_grad_norm_
from multiprocess.gradients import batch, digest, network
from multiprocess.launching import FOLDER, report

WIDTHS = (33, 60, 70, 3)
PER_STEP, STEPS = 5, 2


def run(model, number):
    model(batch(number, WIDTHS[0], torch.float32)).float().square().mean().backward()


def plain(optimizer, model):
    """What one process without FSDP comes to."""
    exact, found = ExactGradients(model.parameters()), []
    for step in range(STEPS):
        for number in range(PER_STEP):
            run(model, step * PER_STEP + number)
            exact.add(weight=number + 1)
        exact.finish()
        found.append(clip_grad_norm_(model.parameters(), 0.1))
        found += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return digest([each.reshape(-1) for each in (*found, *model.state_dict().values())])


def sharded(rank, size, *, layer_by_layer, policy):
    mesh = init_device_mesh("cpu", (size,))
    model = network(WIDTHS, torch.float32)
    for layer in (model[0], model[2], model[3]) if layer_by_layer else ():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    model = fully_shard(model, mesh=mesh, mp_policy=policy)
    exact = ExactReduceScatter(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for step in range(STEPS):
        mine = range(rank, PER_STEP, size)
        most = -(-PER_STEP // size)
        for turn in range(most):
            number = mine[min(turn, len(mine) - 1)]  # workers without a micro-batch repeat one
            weight = number + 1 if turn < len(mine) else 0
            with exact.micro_batch(weight, is_last=turn == most - 1):
                run(model, step * PER_STEP + number)
        found.append(clip_grad_norm_(model.parameters(), 0.1, group=exact.group))
        found += [parameter.grad.full_tensor().clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    state = [parameter.full_tensor().detach() for parameter in model.parameters()]
    return digest([each.reshape(-1) for each in (*found, *state)]), errors(exact, model, rank)


def errors(exact, model, rank):
    """What is said of wrong calls, after which the next step works."""
    said = []

    def tried(call):
        try:
            call()
        except (cd.errors.CrossDeviceError, RuntimeError) as error:
            said.append(str(error))
        exact.clear()
        model.zero_grad()

    def differing():
        with exact.micro_batch(is_last=rank == 0):
            run(model, 0)

    def twice():
        for _ in range(2):
            with exact.micro_batch(is_last=True):
                run(model, 0)

    def nothing():
        with exact.micro_batch(0, is_last=True):
            run(model, 0)

    for call in (twice, nothing, *((differing,) if dist.get_world_size() > 1 else ())):
        tried(call)
    with exact.micro_batch(is_last=True):  # the model is as good as before
        run(model, 0)
    assert model[0].weight.grad is not None
    model.zero_grad()
    tried(lambda: run(model, 0))
    return said


def main(rank, size):
    torch.set_num_threads(1)  # not before forks: threads of new processes would race for its pool
    place = Path(os.environ[FOLDER]) / f"store {size}"
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=size)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)
    facts = {
        "layers": sharded(rank, size, layer_by_layer=True, policy=MixedPrecisionPolicy()),
        "whole": sharded(rank, size, layer_by_layer=False, policy=MixedPrecisionPolicy()),
        "half": sharded(rank, size, layer_by_layer=True, policy=half),
    }
    if size == 1:
        model = network(WIDTHS, torch.float32)
        facts["plain"] = plain(torch.optim.SGD(model.parameters(), lr=0.01), model)
    report(10 * size + rank, facts)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    forking = multiprocessing.get_context("fork")
    for size in (1, 2, 3):
        processes = [forking.Process(target=main, args=(rank, size)) for rank in range(size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            sys.exit(1)
