"""Reductions that a loop repeats on the same arrays: bound ones, plain calls, and what people write by hand.

    python benchmarks/hot_loops.py [--rounds N] [--gpu]

Competitors take turns, round after round, and medians are compared; all write the same results to the same
memory: every replica's arrays become the mean (in place). "of the limit" compares with a copy of as many
bytes. With --gpu the rows of one GPU are measured, by wall time, each call with the wait for the GPU. Beside
them: that wait after a kernel that does nothing, which nobody can be faster than, and bound calls one after
the other, waited for once: a reduction is ordered by the stream, and a program need not wait for it.

The rows of plain calls compare calls that make new results with a loop of the arrays' own library that does,
and calls with `out=` with the same loop: "x of the loop" is how many times as long a call takes. `all_reduce`
has a dict of arrays for each replica, also where there is one array, and takes it apart and makes new ones;
"bare" are calls with the arrays themselves.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from resnet50 import gradient_shapes

import crossdevice as cd
from crossdevice.values.quantities import time_text

NUM_REPLICAS = 8
SECONDS_PER_TURN = 0.02

Call = Callable[[], Any]
Replicas = list[list[Any]]
"""For each replica its arrays."""


class Row(NamedTuple):
    """What was measured, in microseconds, and the ratios that matter."""

    text: str
    microseconds: dict[str, float]

    def __str__(self) -> str:
        ours = self.microseconds["bound"]
        parts = [f"{name} {time_text(found / 1e6)}" for name, found in self.microseconds.items()]
        ratios = [
            f"{found / ours:.2f}x {name}" for name, found in self.microseconds.items() if name != "bound"
        ]
        return f"{self.text:<44} {', '.join(parts)}\n{'':<44} {', '.join(ratios)}"


def in_turns(calls: dict[str, Call], rounds: int, wait: Call = lambda: None) -> dict[str, float]:
    """The median time of each call in microseconds; short calls are made many times a turn."""
    repeats = {}
    for name, call in calls.items():
        call()
        wait()
        started = time.perf_counter()
        call()
        wait()
        repeats[name] = max(1, int(SECONDS_PER_TURN / (time.perf_counter() - started)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            started = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            wait()
            times[name].append((time.perf_counter() - started) / repeats[name] * 1e6)
    return {name: statistics.median(found) for name, found in times.items()}


def bound_and_plain(replicas: Replicas) -> dict[str, Call]:
    """Ours: bound once, and called anew each time."""
    ops = cd.DirectAllReduce()
    values = [cd.PerReplica(column) for column in zip(*replicas, strict=True)]
    pairs = [(value, value) for value in values]
    return {
        "bound": ops.bind("mean", pairs, out=values),
        "batch_reduce(out=)": lambda: ops.batch_reduce("mean", pairs, out=values),
    }


def loop_in_place(replicas: Replicas) -> None:
    """Array by array."""
    for first, *others in zip(*replicas, strict=True):
        for other in others:
            first += other
        first /= len(replicas)
        for other in others:
            other[...] = first


def foreach_in_place(replicas: Replicas) -> None:
    """PyTorch's own way: all arrays of two replicas at a time."""
    import torch

    total, *others = replicas
    for other in others:
        torch._foreach_add_(total, other)
    torch._foreach_div_(total, len(replicas))
    for other in others:
        torch._foreach_copy_(other, total)


def copy_of(num_bytes: int) -> Call:
    """The limit on the host: so many bytes are read and as many written, by our own threads."""
    source, target = np.ones(num_bytes // 4, np.float32), np.zeros(num_bytes // 4, np.float32)
    return cd.DirectAllReduce().bind("sum", cd.PerReplica([source]), "cpu:0", out=target)


def numpy_replicas(shapes: Sequence[tuple[int, ...]]) -> Replicas:
    random = np.random.default_rng(1)
    return [[random.standard_normal(shape, np.float32) for shape in shapes] for _ in range(NUM_REPLICAS)]


def host_rows(rounds: int) -> Iterator[Row]:
    import torch

    for text, shapes in (
        ("one element x 8", [(1,)]),
        ("4 KiB x 8", [(1024,)]),
        ("64 KiB x 8", [(1 << 14,)]),
        ("1 MiB x 8", [(1 << 18,)]),
        ("161 arrays of 1 KiB x 8", [(256,)] * 161),
        ("161 ResNet-50 gradients x 8", gradient_shapes()),
    ):
        replicas = numpy_replicas(shapes)
        tensors = [[torch.from_numpy(array.copy()) for array in one] for one in replicas]
        calls = bound_and_plain(replicas)
        calls["a NumPy loop"] = lambda replicas=replicas: loop_in_place(replicas)
        if len(shapes) > 1:
            calls["torch._foreach_*"] = lambda tensors=tensors: foreach_in_place(tensors)
        num_bytes = sum(array.nbytes for array in replicas[0]) * NUM_REPLICAS
        if num_bytes > 1 << 26:
            calls["a copy (the limit)"] = copy_of(num_bytes)
        yield Row(f"host, {text}", in_turns(calls, rounds))


class PlainRow(NamedTuple):
    """What plain calls took, in microseconds, and as multiples of the library's own loop."""

    text: str
    microseconds: dict[str, float]

    def __str__(self) -> str:
        loop = self.microseconds["loop"]
        parts = [
            f"{name} {time_text(found / 1e6)} ({found / loop:.2f}x)"
            for name, found in self.microseconds.items()
        ]
        return f"{self.text:<44} {', '.join(parts)}"


def loop_with_new_results(replicas: Replicas) -> list[list[Any]]:
    """Array by array; every replica gets a mean in its own memory."""
    results = []
    for first, second, *others in zip(*replicas, strict=True):
        total = first + second
        for other in others:
            total += other
        total /= len(replicas)
        copy = total.copy if isinstance(total, np.ndarray) else total.clone
        results.append([total, *(copy() for _ in replicas[1:])])
    return results


def plain_rows(rounds: int) -> Iterator[PlainRow]:
    import torch

    ops = cd.DirectAllReduce()
    for library, num_replicas, num_arrays in itertools.product(("NumPy", "PyTorch"), (4, 8), (1, 20, 161)):
        arrays = [numpy_replicas([(256,)] * num_arrays)[:num_replicas] for _ in range(2)]
        if library == "PyTorch":
            arrays = [[list(map(torch.from_numpy, one)) for one in replicas] for replicas in arrays]
        replicas, written = arrays
        trees, outs = ([{str(k): x for k, x in enumerate(one)} for one in these] for these in arrays)
        values = [cd.PerReplica(column) for column in zip(*replicas, strict=True)]
        targets = [cd.PerReplica(column) for column in zip(*written, strict=True)]
        pairs = [(value, value) for value in values]
        calls: dict[str, Call] = {
            "loop": functools.partial(loop_with_new_results, replicas),
            "all_reduce": functools.partial(cd.all_reduce, trees, "mean"),
            "all_reduce(out=)": functools.partial(cd.all_reduce, trees, "mean", out=outs),
            "batch_reduce": functools.partial(ops.batch_reduce, "mean", pairs),
            "batch_reduce(out=)": functools.partial(ops.batch_reduce, "mean", pairs, out=targets),
        }
        if num_arrays == 1:  # bare arrays; `all_reduce` above has each in a dict of its own, as trees
            bare, into = ([replica[0] for replica in these] for these in arrays)
            calls["all_reduce, bare"] = functools.partial(cd.all_reduce, bare, "mean")
            calls["all_reduce(out=), bare"] = functools.partial(cd.all_reduce, bare, "mean", out=into)
            calls["ops.reduce"] = functools.partial(ops.reduce, "mean", values[0], "cpu:0")
            calls["ops.reduce(out=)"] = functools.partial(ops.reduce, "mean", values[0], "cpu:0", out=into[0])
            calls["cd.reduce"] = functools.partial(cd.reduce, bare, "mean")
            calls["cd.reduce(out=)"] = functools.partial(cd.reduce, bare, "mean", out=into[0])
        text = f"{library}, {num_arrays} of 1 KiB x {num_replicas}"
        yield PlainRow(f"plain, {text}", in_turns(calls, rounds))


def gpu_rows(rounds: int) -> Iterator[Row]:
    import torch

    for text, shapes in (("one element x 8", [(1,)]), ("161 ResNet-50 gradients x 8", gradient_shapes())):
        replicas = [[torch.randn(shape, device="cuda") for shape in shapes] for _ in range(NUM_REPLICAS)]
        calls = bound_and_plain(replicas)
        calls["torch._foreach_*"] = lambda replicas=replicas: foreach_in_place(replicas)
        calls["a plain loop"] = lambda replicas=replicas: loop_in_place(replicas)
        calls["an empty kernel"] = lambda: torch.cuda._sleep(0)
        # One call, then the wait for it: as in a step that needs the result.
        waited = {name: lambda call=call: (call(), torch.cuda.synchronize()) for name, call in calls.items()}
        waited["bound, not waited for"] = calls["bound"]
        microseconds = in_turns(waited, rounds, torch.cuda.synchronize)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20_000_000)  # so that the GPU never waits for Python
        start.record()
        for _ in range(20):
            calls["bound"]()
        end.record()
        end.synchronize()
        microseconds["the kernel alone"] = start.elapsed_time(end) * 1e3 / 20
        yield Row(f"{torch.cuda.get_device_name()}, {text}", microseconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15, help="of which the median counts (15)")
    parser.add_argument("--gpu", action="store_true", help="measure one GPU instead of the host")
    arguments = parser.parse_args()
    for rows in [gpu_rows] if arguments.gpu else [plain_rows, host_rows]:
        for row in rows(arguments.rounds):
            print(row, flush=True)


if __name__ == "__main__":
    main()
