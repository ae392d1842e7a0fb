"""Logical replicas in the memory of one GPU: measures every row below and fails if one is missed.

    python benchmarks/gpu.py [--rounds N] [--quick]

Competitors take turns, round after round, and medians are compared; all go through public calls and give
every replica results in memory of its own. "of the limit" compares the GPU's time, by its own events, with
that of a copy of as many bytes from one array to another in the same run. Times of calls are wall times:
with the GPU's end waited for, but for one element, where calls follow each other as in a training loop.
"ours" is bound to its arrays; plain calls, which read them each time, are printed beside it.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from resnet50 import gradient_shapes

import crossdevice as cd
from crossdevice.kernels.cuda.driver import kernels_unavailable
from crossdevice.kernels.cuda.families import MAX_ARRAYS
from crossdevice.values.quantities import time_text

NUM_REPLICAS = 8
MIB = 1 << 20
QUICK_DIVISOR = 64

HEAD_START_CYCLES = 20_000_000
"""For which the GPU is kept busy before it is timed, so that it never waits for Python."""

CALLS_IN_A_ROW = 200

Tensors = list[list["torch.Tensor"]]
"""For each replica its tensors."""

Call = Callable[[], Any]


class Row(NamedTuple):
    """One promise: ours against another as a share in %, as times faster, or alone in microseconds."""

    text: str
    figure: float
    unit: str
    floor: float
    aim: float

    @property
    def is_kept(self) -> bool:
        return self.figure <= self.floor if self.unit == "us" else self.figure >= self.floor

    def __str__(self) -> str:
        reaches_aim = self.figure <= self.aim if self.unit == "us" else self.figure >= self.aim
        verdict = "BELOW" if not self.is_kept else "aim reached" if reaches_aim else "ok"
        return (
            f"{self.text:<64} {self.figure:>7.4g} {self.unit:<2} {self.floor:>6g} {self.aim:>6g}  {verdict}"
        )


def gpu_seconds(call: Call) -> float:
    """How long the GPU works on one call, by its own clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START_CYCLES)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def wall_seconds(call: Call) -> float:
    """How long one call takes until its results are there."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def seconds_in_a_row(call: Call) -> float:
    """How long each of many calls takes, one after the other."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(CALLS_IN_A_ROW):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / CALLS_IN_A_ROW


def in_turns(calls: dict[str, Call], seconds_of: Callable[[Call], float], rounds: int) -> dict[str, float]:
    """The median of each call's times."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 3):
        for name, call in calls.items():
            seconds = seconds_of(call)
            if turn >= 3:
                times[name].append(seconds)
    return {name: statistics.median(found) for name, found in times.items()}


def copy_of(num_bytes: int) -> Call:
    """The limit: so many bytes in all, half of them read and half written."""
    source = torch.ones(num_bytes // 8, dtype=torch.float32, device="cuda")
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def replicas(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> Tensors:
    return [[torch.randn(shape, device="cuda").to(dtype) for shape in shapes] for _ in range(NUM_REPLICAS)]


def ours(tensors: Tensors, op: str) -> Call:
    """A bound batch, as in a loop that reduces the same arrays again; results have memory of their own."""
    return cd.DirectAllReduce().bind(op, _pairs_of(tensors))


def ours_plain(tensors: Tensors, op: str) -> Call:
    """`batch_reduce`, which reads its arrays in every call and gives new results."""
    ops, pairs = cd.DirectAllReduce(), _pairs_of(tensors)
    return lambda: ops.batch_reduce(op, pairs)


def _pairs_of(tensors: Tensors) -> list[tuple[cd.PerReplica, cd.PerReplica]]:
    values = [cd.PerReplica(column) for column in zip(*tensors, strict=True)]
    return [(value, value) for value in values]


def loop(tensors: Tensors) -> Tensors:
    """A mean, array by array."""
    columns = []
    for first, second, *others in zip(*tensors, strict=True):
        total = first + second
        for other in others:
            total += other
        total /= len(tensors)
        columns.append([total, *(total.clone() for _ in tensors[1:])])
    return [list(column) for column in zip(*columns, strict=True)]


def foreach(tensors: Tensors) -> Tensors:
    """A mean, all arrays of two replicas at a time."""
    total = torch._foreach_add(tensors[0], tensors[1])
    for others in tensors[2:]:
        torch._foreach_add_(total, others)
    torch._foreach_div_(total, len(tensors))
    return [list(total), *(list(torch._foreach_mul(total, 1)) for _ in tensors[1:])]


def flatten(tensors: Tensors) -> Tensors:
    """A mean of long arrays: each replica's are brought together, and cut apart at the end."""
    flat = [torch.cat([tensor.view(-1) for tensor in one]) for one in tensors]
    total = flat[0]
    for other in flat[1:]:
        total += other
    total /= len(tensors)
    lengths = [tensor.numel() for tensor in tensors[0]]
    return [
        [part.view(tensor.shape) for part, tensor in zip(one.split(lengths), tensors[0], strict=True)]
        for one in (total, *(total.clone() for _ in tensors[1:]))
    ]


def ours_in_place(tensors: Tensors) -> Call:
    """A mean into the arrays themselves."""
    pairs = _pairs_of(tensors)
    return cd.DirectAllReduce().bind("mean", pairs, out=[value for value, _ in pairs])


def loop_in_place(tensors: Tensors) -> None:
    """The same, array by array."""
    for first, *others in zip(*tensors, strict=True):
        for other in others:
            first += other
        first /= len(tensors)
        for other in others:
            other.copy_(first)


def foreach_in_place(tensors: Tensors) -> None:
    """The same, all arrays of two replicas at a time."""
    total, *others = tensors
    for other in others:
        torch._foreach_add_(total, other)
    torch._foreach_div_(total, len(tensors))
    for other in others:
        torch._foreach_copy_(other, total)


def check(tensors: Tensors, op: str, results: list[Any]) -> None:
    """Stops if a result is not the wide sum or mean, rounded once, or if two share memory."""
    for column, result in zip(zip(*tensors, strict=True), results, strict=True):
        wide = column[0].double()
        for tensor in column[1:]:
            wide += tensor
        if op == "mean":
            wide /= len(column)
        unit = torch.finfo(column[0].dtype).eps
        for part in result.values:
            if not ((part.double() - wide).abs() <= unit / 2 * wide.abs() + 1e-30).all():
                raise SystemExit("a result is wrong")
        if len({part.data_ptr() for part in result.values}) < len(column):
            raise SystemExit("results share memory")


def large_rows(dtype: torch.dtype, rounds: int, shrink: int) -> list[Row]:
    size = 256 * MIB // shrink // dtype.itemsize
    tensors = replicas([(size,)], dtype)
    call = ours(tensors, "sum")
    check(tensors, "sum", call())
    seconds = in_turns(
        {"ours": call, "limit": copy_of(2 * NUM_REPLICAS * size * dtype.itemsize)}, gpu_seconds, rounds
    )
    floor, aim = (85, 92) if dtype is torch.float32 else (80, 90)
    name = str(dtype).rpartition(".")[2]
    share = 100 * seconds["limit"] / seconds["ours"]
    return [Row(f"8 x 256 MiB {name}, accurate sum, of the limit", share, "%", floor, aim)]


def say_exact(rounds: int, shrink: int) -> None:
    """Prints what exact sums into one result take beside accurate ones, where there are any, and a copy."""
    exact, ops = cd.CommunicationOptions(precision="exact"), cd.DirectAllReduce()
    for dtype, count, mib, cancels in (
        (torch.float32, 8, 256, False),
        (torch.bfloat16, 8, 256, False),
        (torch.float64, 8, 256, False),
        (torch.float64, 100, 16, False),
        (torch.float64, 8, 16, True),
    ):
        size = mib * MIB // shrink // dtype.itemsize
        arrays = [torch.randn(size, device="cuda").to(dtype) for _ in range(count)]
        if cancels:  # down to what the errors of additions do not hold: all are added up as integers
            arrays[0] *= 2.0**300
            arrays[1] *= 2.0**-300
            arrays[-1] = -arrays[0]
        value = cd.PerReplica(arrays)
        calls = {"exact": ops.bind("sum", value, "cuda:0", exact)}
        if count <= MAX_ARRAYS:
            calls["accurate"] = ops.bind("sum", value, "cuda:0")
        calls["copy"] = copy_of((count + 1) * size * dtype.itemsize)
        name = str(dtype).rpartition(".")[2] + (", cancelling" if cancels else "")
        say_times(f"{count} x {mib} MiB {name}, kernel", in_turns(calls, gpu_seconds, rounds))
        del arrays, value, calls
        torch.cuda.empty_cache()


def resnet_rows(rounds: int, shrink: int) -> list[Row]:
    tensors = replicas(gradient_shapes()[::shrink], torch.float32)
    call = ours(tensors, "mean")
    check(tensors, "mean", call())
    num_bytes = 4 * sum(math.prod(tensor.shape) for tensor in tensors[0])
    gpu = in_turns({"ours": call, "limit": copy_of(2 * NUM_REPLICAS * num_bytes)}, gpu_seconds, rounds)
    peers = {"a plain loop": loop, "torch._foreach_*": foreach, "flatten, cat, split": flatten}
    calls = {name: (lambda peer=peer: peer(tensors)) for name, peer in peers.items()}
    plain = {"batch_reduce": ours_plain(tensors, "mean")}
    wall = in_turns({"ours": call, **plain, **calls}, wall_seconds, rounds)
    promises = {"a plain loop": (20, 35), "torch._foreach_*": (4, 6), "flatten, cat, split": (4, 6)}
    share = 100 * gpu["limit"] / gpu["ours"]
    say_times("ResNet-50 gradients, wall", wall)
    in_place = {"a plain loop": loop_in_place, "torch._foreach_*": foreach_in_place}
    calls = {name: (lambda peer=peer: peer(tensors)) for name, peer in in_place.items()}
    say_times("the same in place", in_turns({"ours": ours_in_place(tensors), **calls}, wall_seconds, rounds))
    return [
        Row("ResNet-50 gradients x 8, accurate mean, kernel, of the limit", share, "%", 80, 88),
        *(
            Row(f"ResNet-50 gradients x 8, wall, against {name}", wall[name] / wall["ours"], "x", *promise)
            for name, promise in promises.items()
        ),
    ]


def say_times(what: str, seconds: dict[str, float]) -> None:
    print(
        f"# {what}: {', '.join(f'{name} {time_text(found)}' for name, found in seconds.items())}",
        flush=True,
    )


def small_rows(rounds: int) -> list[Row]:
    tensors = replicas([(1,)], torch.float32)
    call = ours(tensors, "sum")
    check(tensors, "sum", call())
    calls = {"ours": call, "batch_reduce": ours_plain(tensors, "sum")}
    seconds = in_turns(calls, seconds_in_a_row, rounds)
    say_times("one element, wall", seconds)
    return [Row("one element, 8 replicas, wall time", seconds["ours"] * 1e6, "us", 60, 30)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=25, help="of which the median counts (25)")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that all runs")
    arguments = parser.parse_args()
    missing = kernels_unavailable() if torch.cuda.is_available() else "PyTorch sees no GPU"
    if missing is not None:
        print(f"nothing to measure: {missing}", file=sys.stderr)
        return 2
    rounds, shrink = (3, QUICK_DIVISOR) if arguments.quick else (arguments.rounds, 1)
    limit = 8 * MIB * 256
    speed = 2 * limit / in_turns({"copy": copy_of(2 * limit)}, gpu_seconds, rounds)["copy"] / 1e9
    print(f"# {torch.cuda.get_device_name()}, PyTorch {torch.__version__}, copy limit {speed:.0f} GB/s")
    print(f"# {'work':<62} {'measured':>10} {'floor':>6} {'aim':>6}", flush=True)
    missed = 0
    for rows in (
        lambda: large_rows(torch.float32, rounds, shrink),
        lambda: large_rows(torch.bfloat16, rounds, shrink),
        lambda: resnet_rows(rounds, 16 if arguments.quick else 1),
        lambda: small_rows(rounds),
    ):
        for row in rows():
            print(row, flush=True)
            missed += not row.is_kept
        torch.cuda.empty_cache()
    say_exact(rounds, shrink)
    print(f"# {missed} rows below their floor")
    return 1 if missed and not arguments.quick else 0


if __name__ == "__main__":
    sys.exit(main())
