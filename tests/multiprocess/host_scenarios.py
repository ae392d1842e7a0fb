"""What becomes of forked ranks that think they are on several hosts: `host_scenarios.py SCENARIO`."""

import json
import re
import sys

import numpy as np

import crossdevice as cd
from crossdevice.process_groups.group import ProcessGroup
from multiprocess import shared_scenarios
from multiprocess.forked_ranks import Ranks, say_ready
from multiprocess.shared_scenarios import caught, total

UNEVEN = "abaca"
"""Ranks 0, 2 and 4 on one host, and two of them alone."""

SIZES = (40, 30_000, 1_300_000)
"""Elements: everybody gets everything, or shards, of which a window holds several or not one."""


def bits():
    """Every kind of reduction, and what it sends, on two levels and on one."""

    def program(group):
        engine = group._engine
        facts = {"hosts": group.hosts.ranks}
        with ProcessGroup(engine, shared_memory=False) as flat:
            levels = [cd.CollectiveAllReduce(group=each) for each in (group, flat)]
            for op, precision, dtype, size, num_replicas in cases(group.rank):
                source = np.random.default_rng([group.rank, size])
                arrays = [(source.standard_normal(size) * 100).astype(dtype) for _ in range(num_replicas)]
                value = cd.PerReplica(arrays)
                options = cd.CommunicationOptions(precision=precision)
                results = []
                for ops in levels:
                    ops.reduce(op, value, "cpu:0", options)  # the first time ranks compare what they do
                    before = engine.num_sent_bytes
                    results.append(ops.reduce(op, value, "cpu:0", options).tobytes())
                    results.append(engine.num_sent_bytes - before)
                two, two_sent, one, one_sent = results
                told = levels[0].explain(value, "cpu:0", options, reduce_op=op)
                name = f"{op} {precision} {dtype} {size} {num_replicas}"
                facts[name] = [two == one, two_sent, one_sent, int(re.findall(r", (\d+) bytes", told)[0])]
            facts["others"] = [others(ops, group.rank) for ops in levels]
        return facts

    return Ranks(5, program, UNEVEN).results()


def cases(rank):
    for precision in ("fast", "accurate", "exact"):
        for size in SIZES if precision == "accurate" else SIZES[:2]:
            yield "sum", precision, "float32", size, 1
    yield "mean", "accurate", "float64", SIZES[1], 1
    yield "max", "accurate", "int16", SIZES[1], 1
    yield "median", "accurate", "float32", SIZES[1], 1
    yield "mean", "accurate", "float32", SIZES[1], 3
    yield "sum", "fast", "float16", SIZES[1], 2


def others(ops, rank):
    """Calls that are no reductions, and a reduction to parts."""
    rows = np.arange(12.0).reshape(4, 3)[: rank + 1] + rank
    large = np.random.default_rng(rank).standard_normal(700_001)
    found = [
        ops.gather(rows, "cpu:0"),
        ops.broadcast(large, "cpu:0", from_rank=3),
        ops.reduce_scatter("sum", large),
        ops.all_to_all(np.arange(7) * rank),
        ops.reduce("sum", cd.IndexedSlices(rows, np.arange(len(rows)), (4, 3)), "cpu:0").values,
    ]
    return [np.asarray(array).tobytes().hex()[:2000] for array in found]


def late():
    """Others wait for the late rank directly, or for one who does."""
    return shared_scenarios.deadline(5, 1, UNEVEN)


def differ():
    return shared_scenarios.differ(5, 3, UNEVEN)


def kills(number):
    """A rank is killed at any moment of reductions, small and large."""

    def program(group):
        ops = cd.CollectiveAllReduce(group=group)
        arrays = [np.full(size, group.rank + 1.0) for size in (3, 30_000, 400_000)]

        def reduce_until_it_breaks():
            while True:
                for array in arrays:
                    assert set(np.unique(total(ops, array))) == {10.0}

        total(ops, arrays[2])
        say_ready(group)
        return {**caught(reduce_until_it_breaks), "members": group.members}

    return shared_scenarios.killed(number, 4, program, "aabb")


SCENARIOS = {each.__name__: each for each in (bits, late, differ, kills)}

if __name__ == "__main__":
    sys.stdout.write(json.dumps(SCENARIOS[sys.argv[1]](*sys.argv[2:])))
