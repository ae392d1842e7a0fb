"""One rank whose engine reduces tensors on their devices, gloo on the host standing in for NCCL on GPUs."""

import itertools
import sys

import torch
import torch.distributed as dist

import crossdevice as cd
from crossdevice.process_groups import cluster
from crossdevice.process_groups.engines.torch_engine import TorchCollectives
from multiprocess.launching import report

DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.int32,
    torch.uint8,
)


def main():
    here = cluster.cluster_from_env()
    with here.form_group("torch", timeout_seconds=60.0, shared_memory=False) as group:
        engine = group._engine
        gloo = TorchCollectives(
            dist.PrefixStore("device", engine._store), group.rank, group.size, dist.ProcessGroupGloo
        )
        engine.device_collectives = {"cpu": gloo}
        moves, all_to_all_of = [], gloo.all_to_all_of
        gloo.all_to_all_of = lambda *tensors: moves.append(tensors) or all_to_all_of(*tensors)
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
            "explained": told(ops, own, own),
            "ring": told(ops, own, own, cd.CommunicationOptions(implementation="ring")),
        }
        facts["shards"] = {**shards(group), "all-to-alls": len(moves)}
    report(here.rank, facts)


def shards(group):
    """Whether tensors that are combined on their devices get the bits of those that go through the host."""
    ops = cd.CollectiveAllReduce(group=group)
    same = []
    for precision in ("accurate", "exact"):
        options = cd.CommunicationOptions(precision=precision, implementation="nccl")
        ring = cd.CommunicationOptions(precision=precision)
        for op, dtype in itertools.product(("sum", "mean", "max", "prod"), DTYPES):
            if op == "max" and dtype.is_complex:
                continue
            torch.manual_seed(group.rank)
            tree = [(torch.randn(size) * 40).to(dtype) for size in (1, 7, 1000)]
            tree.append((torch.randn(3, 5).t() * 40).to(dtype))
            ours, theirs = ops.reduce(op, tree, "cpu:0", options), ops.reduce(op, tree, "cpu:0", ring)
            same += [
                torch.equal(one, other) and one.dtype == other.dtype
                for one, other in zip(ours, theirs, strict=True)
            ]
            even = [torch.cat([tensor] * group.size) for tensor in tree]
            ours, theirs = (ops.reduce_scatter(op, even, 0, each) for each in (options, ring))
            same += list(map(torch.equal, ours, theirs))
    counters = [torch.tensor([3 + group.rank, 8]), torch.ones(2)]
    integers = {}
    for policy in ("mean", "max", "min"):
        ours, theirs = (
            ops.reduce(
                "mean", counters, "cpu:0", cd.CommunicationOptions(implementation=way, integers=policy)
            )
            for way in ("nccl", "auto")
        )
        integers[policy] = [str(ours[0].dtype), ours[0].tolist() == theirs[0].tolist()]
    whole, out = torch.arange(5.0) + group.rank, torch.zeros(5)
    options = cd.CommunicationOptions(implementation="nccl")
    is_out = ops.reduce("sum", whole, "cpu:0", options, out=out) is out
    several = cd.PerReplica([whole, whole])
    return {
        "same bits": all(same),
        "compared": len(same),
        "integers": integers,
        "in out": [is_out, out.tolist()],
        "several replicas": ops.reduce("sum", several, "cpu:0", options).tolist(),
        "explained": told(ops, whole, "cpu:0", options),
    }


def told(ops, *args):
    """The last line of an explanation that has no details."""
    return [line for line in ops.explain(*args).splitlines() if not line.startswith(" ")][-1]


if __name__ == "__main__":
    main(*sys.argv[1:])
