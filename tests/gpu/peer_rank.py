"""One of several processes on a GPU: peer memory gives the bits that tensors on the host give."""

from __future__ import annotations

import collections
import itertools
import os
import sys

import torch

import crossdevice as cd
from crossdevice.execution.processes.host_reduction import HostReduceScatter
from crossdevice.execution.processes.transports.peer_memory import PeerCopies, PeerReduceScatter
from crossdevice.execution.processes.transports.staged import StagedReduction
from crossdevice.process_groups import cluster
from multiprocess.launching import report

DTYPES = ("float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8", "complex64")
# Without peer memory `fast` is NCCL's, which refuses processes that share a GPU.
PRECISIONS = (
    ("accurate", "exact")
    if os.environ.get("CROSSDEVICE_PEER_MEMORY") == "0"
    else ("fast", "accurate", "exact")
)
LENGTHS = (1, 7, 64, 1000, 100_003)


def values_of(rank, dtype, shape, seed):
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64) * 50
    if dtype == "complex64":
        numbers = torch.complex(numbers, -numbers)
    elif dtype == "uint8":
        numbers = numbers.abs()
    return numbers.to(getattr(torch, dtype))


def same(result, expected):
    if (result.dtype, result.shape) != (expected.dtype, expected.shape):
        return False
    one, other = (array.cpu().contiguous().reshape(-1).view(torch.uint8) for array in (result, expected))
    return torch.equal(one, other)


def laws(group, facts, dtypes=DTYPES, lengths=LENGTHS):
    ops = cd.CollectiveAllReduce(group=group)
    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda")
    ops.reduce("sum", torch.ones(3, device="cuda"), "cuda:0")  # in which ranks find out about each other
    told = ops.explain(torch.ones(3, device="cuda"), "cuda:0").splitlines()
    facts["explained"] = [line for line in told if not line.startswith(" ")][-1]
    wrong = []
    cases = 0
    for seed, (dtype, op, precision) in enumerate(
        itertools.product(dtypes, ("sum", "mean", "max", "min"), PRECISIONS)
    ):
        if dtype == "complex64" and op in ("max", "min"):
            continue
        options = cd.CommunicationOptions(precision=precision)
        for length in lengths:
            mine = values_of(group.rank, dtype, (length,), seed)
            expected = ops.reduce(op, mine, "cpu:0", options)
            found = ops.reduce(op, mine.cuda(), "cuda:0", options)
            cases += 1
            if not found.is_cuda or not same(found, expected):
                wrong.append([dtype, op, precision, length])
    facts["cases"], facts["wrong"] = cases, wrong


def parts(group, facts, dtypes=DTYPES):
    """Reduce-scatters: the parts of this rank, and by which way they came."""
    ops = cd.CollectiveAllReduce(group=group)
    ways = collections.Counter()
    for kind in (PeerReduceScatter, StagedReduction, HostReduceScatter):
        kind.run = counted(kind.run, ways)
    wrong = []
    sizes = [3 * (rank % 2) for rank in range(group.size)]
    sizes[-1] = 40 - sum(sizes[:-1])  # the first has no elements
    cases = [((5003,), 0, None), ((1, 3), 0, None), ((64, 9), 0, None), ((3, 40), 1, sizes)]
    for seed, (dtype, op, precision) in enumerate(itertools.product(dtypes, ("sum", "mean"), PRECISIONS)):
        options = cd.CommunicationOptions(precision=precision)
        for shape, axis, lengths in cases:
            mine = values_of(group.rank, dtype, shape, seed)
            expected = ops.reduce_scatter(op, mine, axis, options, sizes=lengths)
            found = ops.reduce_scatter(op, mine.cuda(), axis, options, sizes=lengths)
            if not found.is_cuda or not found.is_contiguous() or not same(found, expected):
                wrong.append([dtype, op, precision, *shape])
    facts["wrong parts"], facts["ways"] = wrong, [[*way, number] for way, number in sorted(ways.items())]
    replicas = [values_of(10 * group.rank + k, "float32", (33, 8), 5) for k in range(2)]
    gpu = cd.PerReplica([array.cuda() for array in replicas], ["cuda:0"] * 2)
    expected = ops.reduce_scatter("mean", cd.PerReplica(replicas)).values
    facts["two parts"] = list(map(same, ops.reduce_scatter("mean", gpu).values, expected))
    tree = {"a": replicas[0], "b": [torch.arange(7) + group.rank]}
    placed = {"a": replicas[0].cuda(), "b": [(torch.arange(7) + group.rank).cuda()]}
    on_host, on_gpu = ops.reduce_scatter("mean", tree), ops.reduce_scatter("mean", placed)
    facts["tree of parts"] = [same(on_gpu["a"], on_host["a"]), same(on_gpu["b"][0], on_host["b"][0])]
    facts["parts in out"] = []
    mine = values_of(group.rank, "float32", (100_003,), 9)
    expected = ops.reduce_scatter("sum", mine)
    for _ in range(3):
        for whole in (torch.zeros(200_000), mine):  # the second is an input that others read
            whole = whole.cuda()
            into = whole[: len(expected)]
            value = whole if whole.shape == mine.shape else mine.cuda()
            is_out = ops.reduce_scatter("sum", value, out=into) is into
            facts["parts in out"] += [is_out, same(into, expected)]
    late = torch.zeros(1 << 20, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        late += group.rank + 1
        total = ops.reduce_scatter("sum", late)
        facts["late parts"] = bool((total == sum(range(1, group.size + 1))).all())


def moves(group, facts):
    """Sparse rows, gathers, broadcasts and parts that change places, and how often GPU memory was copied."""
    ops, wrong, number = cd.CollectiveAllReduce(group=group), [], 0

    def counting(*arguments):
        nonlocal number
        number += 1
        copy_from_all(*arguments)

    copy_from_all = PeerCopies.run
    PeerCopies.run = counting
    dtypes = ("float32", "float64", "bfloat16", "int32")
    for seed, (dtype, op, precision) in enumerate(itertools.product(dtypes, ("sum", "mean"), PRECISIONS)):
        options = cd.CommunicationOptions(precision=precision)
        rows = values_of(group.rank, dtype, (2 * group.rank, 5), seed)
        indices, shape = torch.arange(len(rows)) * 3 % 11, (11, 5)
        expected = ops.reduce(op, cd.IndexedSlices(rows, indices, shape), "cpu:0", options)
        found = ops.reduce(op, cd.IndexedSlices(rows.cuda(), indices.cuda(), shape), "cuda:0", options)
        pairs = ((found.values, expected.values), (found.indices, expected.indices))
        if not all(array.is_cuda and same(array, right) for array, right in pairs):
            wrong.append(["sparse", dtype, op, precision])
    mine = values_of(group.rank, "bfloat16", (6, 5 + group.rank), 7)
    calls = {
        "gather": lambda array: ops.all_gather(array, axis=1),
        "to the host": lambda array: ops.gather(array, "cpu:0", axis=1).cuda(),
        "all_to_all": lambda array: ops.all_to_all(array[:, :5]),
        "parts of columns": lambda array: ops.all_to_all(array[:, :5].t(), axis=1),
        "broadcast": lambda array: ops.broadcast(array[:, :5], "cuda:0", from_rank=group.size - 1),
    }
    for name, call in calls.items():
        expected = (
            call(mine)
            if name != "broadcast"
            else values_of(group.size - 1, "bfloat16", (6, 4 + group.size), 7)[:, :5]
        )
        found = call(mine.cuda())
        if not found.is_cuda or not same(found, expected):
            wrong.append([name])
    with torch.cuda.stream(torch.cuda.Stream()):
        late = torch.zeros(1 << 20, device="cuda")
        torch.cuda._sleep(50_000_000)
        late += group.rank
        whole = ops.all_gather(late).reshape(group.size, -1)
        if not bool((whole == torch.arange(group.size, device="cuda")[:, None]).all()):
            wrong.append(["late"])
    facts["wrong moves"], facts["copies of GPU memory"] = wrong, number
    PeerCopies.run = copy_from_all


def counted(run, ways):
    """The same, counted by what it is and where its inputs are."""

    def counting(self, call, columns, outs, weights=None):
        ways[type(self).__name__, columns[0][0].device.type] += 1
        return run(self, call, columns, outs, weights)

    return counting


def shapes_and_outs(group, facts):
    ops = cd.CollectiveAllReduce(group=group)
    replicas = [values_of(10 * group.rank + k, "float32", (33, 31), 5) for k in range(2)]
    host = cd.PerReplica(replicas)
    gpu = cd.PerReplica([array.cuda() for array in replicas], ["cuda:0"] * 2)
    expected = ops.reduce("mean", host, host).values[0]
    facts["two replicas"] = [same(array, expected) for array in ops.reduce("mean", gpu, gpu).values]
    out = cd.PerReplica([torch.zeros(33, 31, device="cuda") for _ in range(2)], ["cuda:0"] * 2)
    ops.reduce("mean", gpu, gpu, out=out)
    facts["out"] = [same(array, expected) for array in out.values]
    transposed = replicas[0].cuda().t()
    expected_t = ops.reduce("sum", replicas[0].t().contiguous(), "cpu:0")
    facts["transposed"] = same(ops.reduce("sum", transposed, "cuda:0"), expected_t)
    ops.reduce("mean", gpu, gpu, out=gpu)
    facts["in place"] = [same(array, expected) for array in gpu.values]
    tree = {"a": replicas[0], "b": [replicas[1], torch.arange(5) + group.rank]}
    placed = {"a": replicas[0].cuda(), "b": [replicas[1].cuda(), (torch.arange(5) + group.rank).cuda()]}
    on_host, on_gpu = ops.reduce("sum", tree, "cpu:0"), ops.reduce("sum", placed, "cuda:0")
    facts["tree"] = [same(on_gpu["a"], on_host["a"]), *map(same, on_gpu["b"], on_host["b"])]
    repeated = []
    for turn in range(30):  # new memory in each call, some of it freed
        mine = values_of(group.rank, "float32", (1 + 9973 * turn,), turn)
        repeated.append(same(ops.reduce("sum", mine.cuda(), "cuda:0"), ops.reduce("sum", mine, "cpu:0")))
    torch.cuda.empty_cache()
    facts["repeated"] = all(repeated)
    mine = values_of(group.rank, "float32", (5000,), 8).cuda()
    bound, in_place = ops.bind("mean", mine, "cuda:0"), mine.clone()
    bound_in_place = ops.bind("mean", in_place, "cuda:0", out=in_place)
    facts["bound"] = []
    for _ in range(2):
        mine *= 3
        in_place.copy_(mine)
        expected = ops.reduce("mean", mine.cpu(), "cpu:0")
        facts["bound"] += [same(bound(), expected), same(bound_in_place(), expected)]
    started, other = torch.full((1000,), group.rank + 1.0, device="cuda"), torch.zeros(1000, device="cuda")
    ops.start_reduce("sum", started, "cuda:0", out=other).wait()  # by a thread that has not used CUDA before
    facts["thread"] = bool((other == sum(range(1, group.size + 1))).all())
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        late = torch.zeros(1 << 20, device="cuda")
        torch.cuda._sleep(50_000_000)
        late += group.rank + 1
        total = ops.reduce("sum", late, "cuda:0") + 0
        started, other = torch.zeros(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
        for _ in range(2):  # the first time memory is mapped, for which CUDA waits for everything
            started.zero_()
            torch.cuda._sleep(200_000_000)
            started += group.rank + 1
            ops.start_reduce("sum", started, "cuda:0", out=other).wait()
    expected = sum(range(1, group.size + 1))
    facts["late"] = [bool((total == expected).all()), bool((other == expected).all())]


def main(what):
    here = cluster.cluster_from_env()
    facts = {}
    with here.form_group("torch", timeout_seconds=100.0) as group:
        torch.zeros(1, device="cuda")
        if what == "few":
            laws(group, facts, dtypes=("float32", "bfloat16", "int32"), lengths=(1, 1000, 5003))
            parts(group, facts, dtypes=("float32", "bfloat16", "int32"))
            moves(group, facts)
        else:
            laws(group, facts)
            shapes_and_outs(group, facts)
            parts(group, facts)
            moves(group, facts)
    report(here.rank, facts)


if __name__ == "__main__":
    main(*sys.argv[1:])
