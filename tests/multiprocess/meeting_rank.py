"""One rank that forms a group as its launcher says, and reports it: `meeting_rank.py [engine] [twist]`."""

import os
import sys
import warnings

from crossdevice.process_groups import cluster
from multiprocess.launching import report


def main(engine="", twist=""):
    warnings.simplefilter("error")
    here = cluster.cluster_from_env()
    if twist == "beside a default group":
        sum_up = sums_on_the_default_group()
        sum_up()
    with here.form_group(engine or None, timeout_seconds=240.0) as group:
        with group.call("gather", b"ranks") as call:
            met = call.all_gather(b"%d" % group.rank)
        if twist == "fails once" and here.restart == 0:
            raise SystemExit(f"rank {here.rank} fails, so the launcher starts all ranks again")
        if twist == "beside a default group":
            sum_up()
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


def sums_on_the_default_group():
    """A user's own calls of torch.distributed, whose ranks are those of the launch."""
    import torch

    torch.distributed.init_process_group("gloo")

    def sum_up():
        ones = torch.ones(4)
        torch.distributed.all_reduce(ones)
        assert ones.tolist() == [torch.distributed.get_world_size()] * 4

    return sum_up


if __name__ == "__main__":
    main(*sys.argv[1:])
