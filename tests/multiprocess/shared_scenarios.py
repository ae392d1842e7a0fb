"""What happens to forked ranks that share memory: `shared_scenarios.py SCENARIO` prints what it found."""

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import crossdevice as cd
from crossdevice.errors import CrossDeviceError
from crossdevice.kernels.host.meeting import compiled_meeting
from crossdevice.process_groups.protocol import Message
from crossdevice.testing import faults
from multiprocess.forked_ranks import Ranks, say_ready

LARGE = 1_500_000
"""Elements: more than fit into a window at once."""


def total(ops, array):
    return ops.reduce("sum", array, "cpu:0")


def caught(calls):
    """The error of a call, how long it took, and whether the group is broken."""
    start = time.monotonic()
    try:
        calls()
    except (CrossDeviceError, KeyboardInterrupt) as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - start}
    return {"error": None}


def memory_files():
    """The files without names of this process, as it has mapped them."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[4] for line in lines if "/memfd:crossdevice-" in line})


def memory_descriptors():
    """Those of files without names that this process keeps open."""
    number = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            number += os.readlink(path).startswith("/memfd:crossdevice-")
    return number


def off():
    """One rank does without."""

    def program(group):
        ops = cd.CollectiveAllReduce(group=group)
        explained = ops.explain(np.ones(4, np.float32), "cpu:0")
        return [group.shared is None, explained, total(ops, np.ones(4)).tolist(), memory_files()]

    return Ranks(3, program, of_ranks=[{}, {"shared_memory": False}, {}]).results()


def deadline(size=3, odd=2, hosts=None):
    """A rank comes too late, and then does not take for done what the others have given up."""

    def program(group):
        ops = cd.CollectiveAllReduce(group=group)
        total(ops, np.ones(4))
        if group.rank == odd:
            time.sleep(12.0)
        options = cd.CommunicationOptions(timeout_seconds=1.5)
        return caught(lambda: ops.reduce("sum", np.ones(4), "cpu:0", options))

    return Ranks(size, program, hosts, timeout_seconds=240).results()


def interrupt():
    """A rank that waits for another one is interrupted, by a signal."""

    def program(group):
        ops = cd.CollectiveAllReduce(group=group)
        total(ops, np.ones(4))
        if group.rank == 0:
            time.sleep(8.0)
            return caught(lambda: total(ops, np.ones(4)))
        signal.signal(signal.SIGALRM, signal.default_int_handler)

        def interrupted():
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            total(ops, np.ones(4))

        return caught(interrupted)

    return Ranks(2, program, timeout_seconds=240).results()


def differ(size=3, odd=2, hosts=None):
    """Calls that all ranks know, in another order."""

    def program(group):
        ops = cd.CollectiveAllReduce(group=group)
        shapes = [4, 5]
        for shape in shapes:
            total(ops, np.ones(shape))
        return caught(lambda: total(ops, np.ones(shapes[group.rank == odd])))

    return Ranks(size, program, hosts, timeout_seconds=240).results()


def faulty():
    """What the second rank shows in one call of each kind is wrong; then the length that it announces."""

    def program(group):
        ops = cd.CollectiveAllReduce(group=group)
        small, large, shared = (
            np.ones(5, np.uint8),
            np.ones(5 << 20, np.uint8),
            group.empty(5 << 20, np.uint8),
        )
        shared[:] = 1
        bound = ops.bind("sum", small, "cpu:0")
        facts = {}
        for name, call in {
            "small": lambda: total(ops, small),
            "bound": bound,
            "large": lambda: total(ops, large),
            "shared": lambda: total(ops, shared),
            "mean": lambda: ops.reduce("mean", cd.PerReplica([large, large]), "cpu:0"),
            "gather": lambda: ops.gather(small, "cpu:0"),
        }.items():
            call()
            with faults(group, rank=1, corrupt=inverted, calls=[1]) as injected:
                found = [np.unique(call()).tolist() for _ in range(3)]
            facts[name] = [found, injected.count]
        with faults(group, rank=1, corrupt=np.invert):
            facts["length"] = caught(lambda: ops.gather(small, "cpu:0"))
        return facts

    def inverted(sent):
        """Lengths, which come with another number before what is gathered, stay as they are."""
        return sent if sent.size == 16 else ~sent

    return Ranks(2, program).results()


def dropped():
    """Nothing that the last rank shows is seen."""

    def program(group):
        ops = cd.CollectiveAllReduce(group=group)
        facts = []
        for array in (np.ones(4), np.ones(LARGE)):
            total(ops, array)
        options = cd.CommunicationOptions(timeout_seconds=1.0)
        with faults(group, rank=2, drop=True):
            facts.append(caught(lambda: ops.reduce("sum", np.ones(4), "cpu:0", options)))
        say_ready(group)
        while len(list(group._engine.folder.glob("ready ?"))) < group.size:
            time.sleep(0.01)
        return facts

    return Ranks(3, program).results()


def short():
    """The first rank sends less than the second expects."""

    def exchange(group):
        with group.call("exchange", b"the same") as call:
            other, mine = 1 - group.rank, np.zeros(8 if group.rank else 5, np.uint8)
            call.exchange([Message(other, mine)], [Message(other, np.empty(8, np.uint8))])

    return Ranks(2, lambda group: caught(lambda: exchange(group))).results()


def crowd():
    """More ranks than any machine of ours has cores."""

    def program(group):
        ops = cd.CollectiveAllReduce(group=group)
        expected = sum(range(1, group.size + 1))
        results = {float(total(ops, np.full(3, group.rank + 1, np.float32))[0]) for _ in range(200)}
        large = np.full(LARGE, group.rank + 1, np.float32)
        results |= {float(value) for _ in range(3) for value in np.unique(total(ops, large))}
        return results == {expected}

    return Ranks(8, program).results()


def arrays():
    """Arrays in shared memory, of all ranks or of some, and what is left of them."""

    def program(group):
        ops = cd.CollectiveAllReduce(group=group)
        before = memory_files()
        facts = {"descriptors": [memory_descriptors()]}
        for who in ("all", "one", "none"):
            is_shared = who == "all" or (who == "one" and group.rank == 1)
            empty = group.empty if is_shared else np.empty
            array, out = empty(LARGE, np.float32), empty(LARGE, np.float32)
            expected = np.zeros(LARGE, np.float64)
            for rank in range(group.size):
                values = np.random.default_rng(rank).standard_normal(LARGE, np.float32)
                expected += values
                if rank == group.rank:
                    array[:] = values
            bits = expected.astype(np.float32).tobytes()
            facts[who] = [
                ops.reduce("sum", array, "cpu:0").tobytes() == bits,
                ops.reduce("sum", array, "cpu:0", out=out) is out and out.tobytes() == bits,
                ops.bind("sum", array, "cpu:0")().tobytes() == bits,
            ]
            ops.reduce("sum", array, "cpu:0", out=array)
            facts[who].append(array.tobytes() == bits)
        del array, out, empty
        array = group.empty(3)
        facts["descriptors"].append(memory_descriptors())
        del array
        total(ops, np.ones(LARGE, np.float32))  # in which others are told what is gone
        total(ops, np.ones(LARGE, np.float32))
        explained = [ops.explain(np.ones(size, np.float32), "cpu:0") for size in (4, LARGE)]
        return facts | {"left": memory_files() - before, "explained": explained}

    return Ranks(3, program).results()


def small():
    """Small arrays of any layout, in place, and into memory that becomes read-only while a rank waits."""

    def program(group):
        ops, one = cd.CollectiveAllReduce(group=group), np.arange(1, 7)
        layouts = [
            np.float32(3).reshape(()),
            one.astype(np.float32).reshape(2, 3),
            np.asfortranarray(one.astype(np.float64).reshape(2, 3)),
            one.astype(">i4")[::2],
            (one * (1 + 2j)).astype(np.complex64).reshape(3, 2),
            one.astype(np.int8),
        ]
        factor = sum(range(1, group.size + 1))
        facts = []
        for layout in layouts:
            value, out = layout * (group.rank + 1), np.empty(layout.shape, layout.dtype.newbyteorder("="))
            for _ in range(3):
                facts.append((total(ops, value) == layout * factor).all())
                ops.reduce("sum", value, "cpu:0", out=out)
                facts.append((out == layout * factor).all())
        place = np.full(4, group.rank + 1, np.float32)
        for times in range(3):
            facts.append(ops.reduce("sum", place, "cpu:0", out=place) is place)
            facts.append((place == factor * group.size**times).all())
        if group.rank == 0:
            threading.Timer(0.1, lambda: place.setflags(write=False)).start()
        else:
            time.sleep(0.5)
        error = caught(lambda: ops.reduce("sum", place, "cpu:0", out=place))["error"]
        again = total(ops, np.ones(4, np.float32)).tolist()
        return {"error": error, "right": all(map(bool, facts)), "again": again}

    return Ranks(2, program).results()


def kills(number="20"):
    """Ranks that are killed at random moments: the others say who, and no number is wrong."""
    compiled_meeting()  # all is compiled before ranks are forked
    cd.bind([np.ones(3, np.float32)] * 3, "sum", "cpu:0")()

    def program(group):
        ops = cd.CollectiveAllReduce(group=group)
        sizes = [3, 40_000, 700_000]
        inputs = [np.full(size, group.rank + 1, np.float32) for size in sizes]
        shared = group.empty(sizes[-1])
        shared[:] = group.rank + 1
        bound = ops.bind("sum", shared, "cpu:0")
        expected = group.size * (group.size + 1) / 2

        def loop():
            bound()
            say_ready(group)
            while True:
                for result in (*(total(ops, array) for array in inputs), bound()):
                    if not (result == expected).all():
                        raise AssertionError("a number is wrong")

        return {**caught(loop), "members": group.members}

    return killed(number, 3, program)


def killed(number, size, program, hosts=None):
    """Of so many groups one rank each is killed, at any moment once all are ready."""
    seed = random.SystemRandom().randrange(1 << 30)
    source = random.Random(seed)

    def one_killed(odd):
        ranks = Ranks(size, program, hosts, timeout_seconds=240)
        ranks.wait_until_ready()
        time.sleep(source.random() * 0.1)
        os.kill(ranks.pids[odd], signal.SIGKILL)
        return odd, ranks

    # Nobody waits for the survivors before the next rank is killed: they find out where each is for seconds.
    trials = [one_killed(source.randrange(size)) for _ in range(int(number))]
    return {"seed": seed, "trials": [[odd, ranks.results()] for odd, ranks in trials]}


def peers():
    """How ranks tell each other where their GPU arrays are; numbers stand in for a GPU's memory."""
    from crossdevice.execution.processes.gpu_peers import MAX_TOLD, PeerAddresses, meet
    from crossdevice.kernels.cuda import peer_memory

    class Mapped:
        """Finds an address of another rank at that address, with the number of its allocation."""

        def address_of(self, place):
            return [place.offset, place.handle[0]]

        def forget_old(self):
            return False

    def program(group):
        allocations = {}
        peer_memory.allocation_of = lambda address: allocations[address]
        peer_memory.exported = lambda address: peer_memory.Exported(
            bytes([allocations[address]]) * peer_memory.HANDLE_BYTES, address
        )
        addresses = PeerAddresses(group.rank, [Mapped() for _ in range(group.size)])

        def met(number, allocation):
            """The numbers found, and how many exchanges that took; rank 0 moves only with new allocations."""
            own = [100 * group.rank + number * (group.rank > 0), 7 + number * (group.rank > 0)]
            allocations.update(dict.fromkeys(own, allocation))
            with group.call("reduce", b"the same") as call:
                found = addresses.met(call, own)
                num_exchanges = call.num_exchanges
                meet(call)
            others = [each for each in found if isinstance(each, list)]
            return [others, num_exchanges]

        first = [met(1, 5), met(1, 5), met(2, 5), met(1, 5), met(1, 6)]
        for number in range(MAX_TOLD):  # so that the first ones are forgotten, by all ranks at once
            met(10 + number, 5)
        return [*first, met(1, 6), met(1, 5)]

    return Ranks(3, program).results(200)  # each imports PyTorch, on a machine that may be busy


def staged():
    """Chunks of GPU arrays go through shared memory; PyTorch's tensors on the host stand in for a GPU's."""
    import torch

    from crossdevice.backends.registry import backend_named
    from crossdevice.execution.processes.reduced_batch import LeafParts, ReducedBatch
    from crossdevice.execution.processes.transports.staged import StagedReduction
    from crossdevice.execution.reading.leaf_spec import LeafSpec
    from crossdevice.execution.reading.shards import part_lengths
    from crossdevice.values.device import host_device
    from crossdevice.values.reduce_op import ReduceOp

    host, backend = host_device(0), backend_named("torch")
    cases = [
        ("float32", ((5,), (3, 40)), (1, 1, 1), "sum", "accurate"),
        ("float32", ((7,), (LARGE,), (33, 31), ()), (1, 1, 1), "mean", "exact"),
        ("bfloat16", ((LARGE,),), (1, 2, 1), "sum", "exact"),
        ("int64", ((300_001,),), (2, 1, 1), "mean", "accurate"),
        ("complex64", ((100_000,),), (1, 1, 1), "sum", "fast"),
    ]

    def program(group):
        torch.set_num_threads(1)
        facts = []
        for dtype, shapes, counts, op, precision in cases:
            options = cd.CommunicationOptions(precision=precision)
            source = torch.Generator().manual_seed(1)
            replicas = [
                [(torch.randn(shape, generator=source) * 99).to(getattr(torch, dtype)) for shape in shapes]
                for _ in range(sum(counts))
            ]
            first = sum(counts[: group.rank])
            own = replicas[first : first + counts[group.rank]]
            specs = [LeafSpec(backend, dtype, shape, (host,) * len(own), (host, host)) for shape in shapes]
            batch = ReducedBatch(specs, ReduceOp(op), options, [counts] * len(shapes), group, None)
            reduction = StagedReduction(batch)
            expected = [
                cd.reduce(list(column), op, options=options) for column in zip(*replicas, strict=True)
            ]
            for _ in range(2):  # windows that were used before
                with group.call("reduce", b"the same") as call:
                    delivery = reduction.run(call, list(zip(*own, strict=True)), [None] * len(shapes))
                pairs = zip(delivery(), expected, strict=True)
                facts.append([torch.equal(copy, total) for copies, total in pairs for copy in copies])
            parts = [
                LeafParts(
                    LeafSpec(backend, dtype, shape, *[(host,) * len(own)] * 2),
                    len(shape) - 1,
                    part_lengths(shape[-1], sum(counts)),
                    counts,
                    group.rank,
                )
                for shape in shapes
                if shape
            ]
            columns = [column for column in zip(*own, strict=True) if column[0].ndim]
            specs = [leaf.spec for leaf in parts]
            batch = ReducedBatch(
                specs, ReduceOp(op), options, [counts] * len(parts), group, None, parts=parts
            )
            reduction = StagedReduction(batch)
            with group.call("reduce_scatter", b"the same") as call:
                delivery = reduction.run(call, columns, [None] * len(parts))
            totals = [total for total in expected if total.ndim]
            for leaf, total, found in zip(parts, totals, delivery(), strict=True):
                rights = total.tensor_split(sum(counts), leaf.axis)
                facts.append(list(map(torch.equal, found, rights[first : first + len(own)])))
        return facts

    return Ranks(3, program).results(200)


SCENARIOS = {
    each.__name__: each
    for each in (
        *(off, deadline, interrupt, differ, faulty, dropped, short),
        *(crowd, arrays, small, kills, peers, staged),
    )
}

if __name__ == "__main__":
    sys.stdout.write(json.dumps(SCENARIOS[sys.argv[1]](*sys.argv[2:])))
