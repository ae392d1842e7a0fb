"""One rank that trains with DistributedDataParallel and our hook, and reports the bits of its gradients."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import crossdevice as cd
from crossdevice.integrations.torch import ReproducibleMean, reproducible_hook
from crossdevice.process_groups.engines.torch_engine import form_group
from multiprocess import overlap
from multiprocess.gradients import batch, digest, gradients, network
from multiprocess.launching import FOLDER, report

WIDTHS = (64, 600, 700, 8)


def hooked(dtype, share, bucket_cap_mb, precision="accurate", group=None, **options):
    """Gradients of two steps: DDP lays out its buckets anew after the first."""
    model = torch.nn.parallel.DistributedDataParallel(
        network(WIDTHS, dtype), bucket_cap_mb=bucket_cap_mb, **options
    )
    model.register_comm_hook(ReproducibleMean(group, precision), reproducible_hook)
    return [gradients(model, batch(share + step, WIDTHS[0], dtype)) for step in (0, 10)]


def by_our_means(dtype, share, group):
    ops = cd.CollectiveAllReduce(group=group)
    own = gradients(network(WIDTHS, dtype), batch(share, WIDTHS[0], dtype))
    return ops.batch_reduce("mean", [(gradient, gradient) for gradient in own])


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    group = form_group(rank, size, name="test")
    facts = {}
    for dtype in (torch.float32, torch.bfloat16):
        small, large = hooked(dtype, rank, 0.2), hooked(dtype, rank, 25, group=group)
        ours = by_our_means(dtype, rank, group)
        plain = torch.nn.parallel.DistributedDataParallel(network(WIDTHS, dtype))
        near = zip(gradients(plain, batch(rank, WIDTHS[0], dtype)), small[0], strict=True)
        tolerance = {"rtol": 0.05, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-6}
        exact = hooked(dtype, rank, 25, "exact", group)
        turned = hooked(dtype, (rank + 1) % size, 25, "exact", group)
        facts[str(dtype)] = {
            "buckets make no difference": list(map(digest, small)) == list(map(digest, large)),
            "as CollectiveAllReduce": digest(small[0]) == digest(ours),
            "near those of plain DDP": all(
                torch.allclose(p.float(), h.float(), **tolerance) for p, h in near
            ),
            "the order of ranks makes no difference to exact": digest(exact[0]) == digest(turned[0]),
            "bits": digest(small[0]),
        }
    views = hooked(torch.float32, rank, 25, group=group, gradient_as_bucket_view=True)
    facts["in buckets"] = digest(views[0])
    folder = Path(os.environ[FOLDER])
    facts["inside, with the hook"] = overlap.with_our_hook(group, folder / f"hook {rank}.json")
    facts["inside, mirrored"] = overlap.with_a_mirrored_module(group, folder / f"mirrored {rank}.json")
    facts["sparse"] = sparse_means(rank, size, group)
    facts["error"] = error_of_a_broken_group(group)
    report(rank, facts)
    dist.barrier()
    dist.destroy_process_group()


def sparse_means(rank, size, group):
    """Gradients of an embedding table of which each rank uses row 0 and one of its own."""
    table = torch.nn.Embedding(size + 2, 2, sparse=True)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(table, torch.nn.Linear(2, 1)))
    torch.nn.init.ones_(model.module[1].weight)
    model.register_comm_hook(ReproducibleMean(group), reproducible_hook)
    found = []
    for _ in range(2):
        model.zero_grad()
        model(torch.tensor([0, rank + 1])).sum().backward()
        found.append((table.weight.grad.is_sparse, table.weight.grad.to_dense()[:, 0].tolist()))
    return found


def error_of_a_broken_group(group):
    model = torch.nn.parallel.DistributedDataParallel(network(WIDTHS, torch.float32))
    model.register_comm_hook(ReproducibleMean(group), reproducible_hook)
    group.give_up("it was told to")
    try:
        gradients(model, batch(0, WIDTHS[0], torch.float32))
    except RuntimeError as error:
        return str(error)
    return "none"


if __name__ == "__main__":
    sys.exit(main())
