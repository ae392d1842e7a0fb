"""All-reduces of GPU tensors between processes of one host: peer memory against the way through host memory.

    python benchmarks/gpu_processes.py [--processes N] [--rounds N]

They may share one GPU. Both ways take turns, round after round; a round's time is that of the slowest
process, and medians are compared. NCCL is measured too if there is a GPU for each process. GB/s count what
all processes read and write: twice their number times the size.
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


def measure(rounds: int) -> None:
    """One rank: the first prints."""
    here = cd.cluster_from_env()
    gpu = here.rank % torch.cuda.device_count()
    torch.cuda.set_device(gpu)
    ways = {}
    for name, variable in (("peer memory", "1"), ("host memory", "0")):
        os.environ["CROSSDEVICE_PEER_MEMORY"] = variable
        group = here.form_group("torch", timeout_seconds=100.0)
        ops = cd.CollectiveAllReduce(group=group)
        ops.reduce("sum", torch.zeros(1, device="cuda"), f"cuda:{gpu}")  # in which ranks find out which way
        if here.rank == 0:
            print(f"{name}: {ops.explain(torch.zeros(1, device='cuda'), f'cuda:{gpu}').splitlines()[1]}")
        ways[name] = ours(ops, gpu)
    dist.init_process_group("nccl" if here.size <= torch.cuda.device_count() else "gloo")
    if dist.get_backend() == "nccl":
        ways["NCCL, its own bits"] = lambda _, out: dist.all_reduce(out)
    for size in SIZES:
        tensor = torch.full((size // FLOAT_BYTES,), float(here.rank + 1), device="cuda")
        out = torch.empty_like(tensor)
        times = {name: [] for name in ways}
        for _ in range(rounds + 2):
            for name, way in ways.items():
                times[name].append(slowest(functools.partial(way, tensor, out)))
        if here.rank == 0:
            row = []
            for name, seconds in times.items():
                median = statistics.median(seconds[2:])
                gigabytes = 2 * here.size * size / median / 1e9
                row.append(f"{name} {median * 1e3:8.3f} ms ({gigabytes:.0f} GB/s)")
            print(f"{here.size} x {size:>9} bytes: " + ", ".join(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def ours(ops, gpu):
    """Our all-reduce into given memory."""
    return lambda tensor, out: ops.reduce("sum", tensor, f"cuda:{gpu}", out=out)


def slowest(call) -> float:
    """The seconds that the slowest process takes for a call that all of them make at once."""
    torch.cuda.synchronize()
    dist.barrier()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    seconds = torch.tensor(
        [time.perf_counter() - started], device="cuda" if dist.get_backend() == "nccl" else "cpu"
    )
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


if __name__ == "__main__":
    sys.exit(main())
