"""One rank whose engine reduces tensors on their devices, gloo on the host standing in for NCCL on GPUs."""

import sys

import torch
import torch.distributed as dist

import crossdevice as cd
from crossdevice.process_groups import cluster
from crossdevice.process_groups.torch_collectives import DeviceCollectives
from multiprocess.launching import report


def main():
    here = cluster.cluster_from_env()
    with here.form_group("torch", timeout_seconds=60.0) as group:
        engine = group._engine
        gloo = DeviceCollectives(
            dist.PrefixStore("device", engine._store), group.rank, group.size, dist.ProcessGroupGloo
        )
        engine.device_all_reduces = {"cpu": gloo.all_reduce_of}
        ops = cd.CollectiveAllReduce(group=group, options=cd.CommunicationOptions(precision="fast"))
        own = cd.PerReplica([torch.full((3, 2), group.rank * 2.0 + number) for number in range(2)])
        whole = cd.PerReplica([torch.tensor([group.rank, 7], dtype=torch.int32)] * 2)
        written = cd.PerReplica([torch.zeros(3, 2), torch.zeros(3, 2)])
        mixed = {"a": own.values[0], "b": torch.ones(4, dtype=torch.int16)}
        facts = {
            "sum": [tensor.tolist() for tensor in ops.reduce("sum", own, own).values],
            "mean of integers": ops.reduce("mean", whole, "cpu:0").tolist(),
            "max in place": [tensor.tolist() for tensor in ops.reduce("max", own, own, out=written).values],
            "is written": written.values[0].tolist() == written.values[1].tolist(),
            "by way of the host too": [leaf.tolist() for leaf in ops.reduce("sum", mixed, "cpu:0").values()],
            "explained": ops.explain(own, own).splitlines()[-1],
            "ring": ops.explain(own, own, cd.CommunicationOptions(implementation="ring")).splitlines()[-1],
        }
    report(here.rank, facts)


if __name__ == "__main__":
    main(*sys.argv[1:])
