"""One rank that forms a group as its launcher says, and reports it: `meeting_rank.py [engine] [twist]`."""

import os
import sys
import warnings

from crossdevice.process_groups import cluster
from multiprocess.launching import report


def main(engine="", twist=""):
    warnings.simplefilter("error")
    here = cluster.cluster_from_env()
    if twist == "beside DDP":
        train = data_parallel_training()
        train()
    with here.form_group(engine or None, timeout_seconds=240.0) as group:
        with group.call("gather", b"ranks") as call:
            met = call.all_gather(b"%d" % group.rank)
        if twist == "fails once" and here.restart == 0:
            raise SystemExit(f"rank {here.rank} fails, so the launcher starts all ranks again")
        if twist == "beside DDP":
            train()
            with group.call("gather", b"ranks") as call:
                assert call.all_gather(b"%d" % group.rank) == met
    report(
        here.rank,
        {
            "recognised": here.recognised,
            "engine": group.engine_name,
            "met": [record.decode() for record in met],
            "restart": here.restart,
            "libraries": sorted({"torch", "mpi4py"} & set(sys.modules)),
            "pid": os.getpid(),
        },
    )


def data_parallel_training():
    """A user's own training on torch.distributed's default group."""
    import torch

    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))

    def step():
        model(torch.ones(3, 4)).sum().backward()

    return step


if __name__ == "__main__":
    main(*sys.argv[1:])
