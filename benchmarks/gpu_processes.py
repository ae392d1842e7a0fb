"""Reductions of GPU tensors between processes of one host: peer memory against the way through host memory.

    python benchmarks/gpu_processes.py [--processes N] [--rounds N]

They may share one GPU. All ways take turns, round after round; a round's time is that of the slowest
process, and medians are compared. NCCL is measured too if there is a GPU for each process. GB/s count what
all processes read and write: for all-reduces twice their number times the size, for reduce-scatters, whose
parts together are one array, their number and one times the size; for all-gathers of these parts twice their
number times the size.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist

import crossdevice as cd

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4, 64 * KIB, 1 * MIB, 16 * MIB, 256 * MIB)
FLOAT_BYTES = 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        measure(arguments.rounds)
        return 0
    if not torch.cuda.is_available():
        print("PyTorch sees no GPU")
        return 1
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={arguments.processes}",
    ]
    return subprocess.run([*command, __file__, "--rounds", str(arguments.rounds)], check=False).returncode


WAYS = {"peer memory": "1", "a shard each": "each", "host memory": "0"}
"""By the value of CROSSDEVICE_PEER_MEMORY: processes on one GPU leave it to one of them, or do not."""

SMALLEST_SCATTERED_BYTES = 64 * KIB
LARGEST_BOUND_BYTES = 64 * KIB
LARGEST_REPEATED_BYTES, REPEATS = 1 * MIB, 20
"""Small messages are sent one after the other: ranks leave a barrier further apart than they take."""


def measure(rounds: int) -> None:
    """One rank: the first prints."""
    here = cd.cluster_from_env()
    gpu = here.rank % torch.cuda.device_count()
    torch.cuda.set_device(gpu)
    ops_of = {}
    for name, variable in WAYS.items():
        os.environ["CROSSDEVICE_PEER_MEMORY"] = variable
        group = here.form_group("torch", timeout_seconds=100.0)
        ops = ops_of[name] = cd.CollectiveAllReduce(group=group)
        ops.reduce("sum", torch.zeros(1, device="cuda"), f"cuda:{gpu}")  # in which ranks find out which way
        if here.rank == 0:
            print(f"{name}: {ops.explain(torch.zeros(1, device='cuda'), f'cuda:{gpu}').splitlines()[-1]}")
    has_nccl = here.size <= torch.cuda.device_count()
    dist.init_process_group("nccl" if has_nccl else "gloo")
    if here.rank == 0 and not has_nccl:
        print("NCCL: not measured, it refuses two ranks on one GPU")
    for size in SIZES:
        tensor = torch.full((size // FLOAT_BYTES,), float(here.rank + 1), device="cuda")
        out = torch.empty_like(tensor)
        ways = {
            name: functools.partial(ops.reduce, "sum", tensor, f"cuda:{gpu}", out=out)
            for name, ops in ops_of.items()
        }
        if size <= LARGEST_BOUND_BYTES:
            ways["bound"] = ops_of["peer memory"].bind("sum", tensor, f"cuda:{gpu}", out=out)
        if has_nccl:
            ways["NCCL, its own bits"] = functools.partial(dist.all_reduce, out)
        compare(f"{here.size} x {size:>9} bytes", ways, rounds, size, 2 * here.size * size, here.rank)
        if size >= SMALLEST_SCATTERED_BYTES:
            part = torch.empty_like(tensor[: len(tensor) // here.size])
            ways = {
                name: functools.partial(ops.reduce_scatter, "sum", tensor, out=part)
                for name, ops in ops_of.items()
            }
            if has_nccl:
                ways["NCCL, its own bits"] = functools.partial(dist.reduce_scatter_tensor, part, tensor)
            what = f"{here.size} x {size:>9} bytes, reduce_scatter"
            compare(what, ways, rounds, size, (here.size + 1) * size, here.rank)
            del ways["a shard each"]  # each copies what it wants in any case
            ways |= {
                name: functools.partial(ops_of[name].all_gather, part) for name in ways if name in ops_of
            }
            if has_nccl:
                ways["NCCL, its own bits"] = functools.partial(dist.all_gather_into_tensor, out, part)
            what = f"{here.size} x {size:>9} bytes, all_gather"
            compare(what, ways, rounds, size, 2 * here.size * size, here.rank)
    dist.barrier()
    dist.destroy_process_group()


def compare(what, ways, rounds, size, num_bytes, rank) -> None:
    """Has all ways take turns; the first rank prints their medians."""
    times = {name: [] for name in ways}
    repeats = REPEATS if size <= LARGEST_REPEATED_BYTES else 1
    for _ in range(rounds + 2):
        for name, way in ways.items():
            times[name].append(slowest(way, repeats))
    if rank == 0:
        medians = {name: statistics.median(seconds[2:]) for name, seconds in times.items()}
        row = [
            f"{name} {median * 1e3:8.3f} ms ({num_bytes / median / 1e9:.0f} GB/s)"
            for name, median in medians.items()
        ]
        print(f"{what}: " + ", ".join(row), flush=True)


def slowest(call, repeats) -> float:
    """The seconds that the slowest process takes for one of so many calls that all of them make at once."""
    torch.cuda.synchronize()
    dist.barrier()
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    torch.cuda.synchronize()
    seconds = torch.tensor(
        [(time.perf_counter() - started) / repeats], device="cuda" if dist.get_backend() == "nccl" else "cpu"
    )
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


if __name__ == "__main__":
    sys.exit(main())
