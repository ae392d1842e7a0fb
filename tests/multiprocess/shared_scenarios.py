"""What happens to forked ranks that share memory: `shared_scenarios.py SCENARIO` prints what it found."""

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


def off():
    """One rank does without."""

    def program(group):
        ops = cd.CollectiveAllReduce(group=group)
        explained = ops.explain(np.ones(4, np.float32), "cpu:0")
        return [group.shared is None, explained, total(ops, np.ones(4)).tolist(), memory_files()]

    return Ranks(3, program, of_ranks=[{}, {"shared_memory": False}, {}]).results()


def deadline():
    """The last rank comes too late, and then does not take for done what the others have given up."""

    def program(group):
        ops = cd.CollectiveAllReduce(group=group)
        total(ops, np.ones(4))
        if group.rank == 2:
            time.sleep(5)
        return caught(lambda: total(ops, np.ones(4)))

    return Ranks(3, program, timeout_seconds=1.5).results()


def interrupt():
    """A rank that waits for another one is interrupted, by a signal."""

    def program(group):
        ops = cd.CollectiveAllReduce(group=group)
        total(ops, np.ones(4))
        if group.rank == 0:
            time.sleep(1.5)
        else:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.5)
        return caught(lambda: total(ops, np.ones(4)))

    return Ranks(2, program, timeout_seconds=30).results()


def differ():
    """Calls that all ranks know, in another order."""

    def program(group):
        ops = cd.CollectiveAllReduce(group=group)
        shapes = [4, 5]
        for shape in shapes:
            total(ops, np.ones(shape))
        return caught(lambda: total(ops, np.ones(shapes[group.rank == 2])))

    return Ranks(3, program, timeout_seconds=30).results()


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
        facts = {}
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
        total(ops, np.ones(LARGE, np.float32))  # in which others are told what is gone
        total(ops, np.ones(LARGE, np.float32))
        explained = [ops.explain(np.ones(size, np.float32), "cpu:0").splitlines()[1] for size in (4, LARGE)]
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
    seed = random.randrange(1 << 30)
    source = random.Random(seed)
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

    def killed(odd):
        ranks = Ranks(3, program, timeout_seconds=60)
        ranks.wait_until_ready()
        time.sleep(source.random() * 0.05)
        os.kill(ranks.pids[odd], signal.SIGKILL)
        return odd, ranks

    # Nobody waits for the survivors before the next rank is killed: they find out where each is for seconds.
    trials = [killed(source.randrange(3)) for _ in range(int(number))]
    return {"seed": seed, "trials": [[odd, ranks.results()] for odd, ranks in trials]}


SCENARIOS = {each.__name__: each for each in (off, deadline, interrupt, differ, crowd, arrays, small, kills)}

if __name__ == "__main__":
    sys.stdout.write(json.dumps(SCENARIOS[sys.argv[1]](*sys.argv[2:])))
