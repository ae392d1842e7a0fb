"""One rank of four whose models are on groups of their own; it reports gradients that name who took part."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from crossdevice.integrations.torch import ReproducibleMean, reproducible_hook
from crossdevice.process_groups.engines.torch_engine import form_group
from multiprocess.launching import report


def weight():
    linear = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(linear.weight)
    return linear


def hooked(state, **where):
    model = torch.nn.parallel.DistributedDataParallel(weight(), **where)
    model.register_comm_hook(state, reproducible_hook)
    return model


def gradient(model):
    """The mean of the numbers of the ranks (from 1) that share the model; the same in the second step."""
    found = []
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 1), float(dist.get_rank() + 1))).sum().backward()
        found.append(model.module.weight.grad.item())
    assert found[0] == found[1]
    return found[0]


def error_of(model):
    try:
        gradient(model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def main():
    torch.set_num_threads(1)
    early = ReproducibleMean()  # before init_process_group, as Lightning makes it
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    alone = [dist.new_group([number]) for number in range(4)][rank]
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "along"))
    shared = ReproducibleMean()
    facts = {
        "all": gradient(hooked(early)),
        "alone": gradient(hooked(ReproducibleMean(), process_group=alone)),
        "pairs": gradient(hooked(ReproducibleMean(), process_group=pairs)),
        "pairs, given": gradient(hooked(ReproducibleMean(pairs), process_group=pairs)),
        "mesh, across": gradient(hooked(ReproducibleMean(), device_mesh=mesh["across"])),
        "mesh, along": gradient(hooked(ReproducibleMean(), device_mesh=mesh["along"])),
        "one state for two models": [gradient(hooked(shared, process_group=pairs)) for _ in range(2)],
        "one state for two groups": error_of(hooked(shared)),
        "another group given": error_of(hooked(ReproducibleMean(pairs))),
        "a group of another size given": error_of(hooked(ReproducibleMean(form_group(0, 1, name=str(rank))))),
    }
    report(rank, facts)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
