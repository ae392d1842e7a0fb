"""Collectives of torch.distributed on the backend "crossdevice", as ratios to gloo in the same processes.

    crossdevice run -n 2 benchmarks/torch_backend.py [--rounds N] [--sizes 4 65536] [--only all_reduce]

Both backends take turns, round after round, and medians are compared; a time is that of rank 0. Before
anything is measured, calls are made until all ranks have loaded their kernels: meanwhile a call takes ten
times as long. Run it on a quiet machine with a core for each rank; the load is printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist

import crossdevice.integrations.torch  # noqa: F401 - registers the backend
from crossdevice.integrations.torch.distributed.kernels import late_kernels

CALL_BYTES = 64 << 20
"""How much is moved in one turn, at most."""

LARGEST_TURN = 50

Call = Callable[[], object]


def collectives(num_bytes: int, group: dist.ProcessGroup) -> dict[str, Call]:
    """Each on float32 tensors of so many bytes per rank; `started` is waited for at once."""
    size = dist.get_world_size()
    whole = torch.ones(max(num_bytes // 4, 1))
    even = torch.ones(-(-whole.numel() // size) * size)
    part, gathered, target = torch.ones(even.numel() // size), torch.empty(even.numel()), even.clone()

    def started() -> None:
        dist.all_reduce(whole, group=group, async_op=True).wait()

    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_reduce, started": started,
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(part, even, group=group),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(gathered, part, group=group),
        "all_to_all_single": lambda: dist.all_to_all_single(target, even, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "barrier": lambda: dist.barrier(group=group),
    }


def warm_up(groups: dict[str, dist.ProcessGroup]) -> None:
    """Makes calls until no rank is still loading kernels."""
    tensor, are_loading = torch.ones(1 << 18), torch.ones(1)
    while are_loading.item():
        for group in groups.values():
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
        are_loading.fill_(float(not late_kernels.is_settled))
        dist.all_reduce(are_loading, dist.ReduceOp.MAX, group=groups["gloo"])


def seconds_per_call(call: Call, repeats: int) -> float:
    """One turn."""
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats


def main() -> None:
    """Prints a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 64 << 10, 4 << 20, 100 << 20])
    parser.add_argument("--only", nargs="+", help="the names of some collectives")
    options = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)  # names that PyTorch 2.13 deprecates
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {name: dist.new_group(backend=name) for name in ("gloo", "crossdevice")}
    begin = time.perf_counter()
    dist.barrier(group=groups["crossdevice"])
    first = time.perf_counter() - begin
    warm_up(groups)
    is_first = dist.get_rank() == 0
    if is_first:
        load = os.getloadavg()[0]
        print(
            f"{dist.get_world_size()} ranks; first barrier {1e3 * first:.1f} ms; load {load:.1f}", flush=True
        )
        print(f"{'collective':<24}{'bytes':>12}{'crossdevice':>14}{'gloo':>12}   ratio", flush=True)
    for num_bytes in options.sizes:
        repeats = max(1, min(LARGEST_TURN, CALL_BYTES // num_bytes))
        calls = {name: collectives(num_bytes, group) for name, group in groups.items()}
        for kind in options.only or calls["gloo"]:
            if kind == "barrier" and num_bytes != options.sizes[0]:
                continue
            times: dict[str, list[float]] = {name: [] for name in groups}
            for number in range(options.rounds + 1):
                for name in groups:
                    seconds = seconds_per_call(calls[name][kind], repeats)
                    if number:
                        times[name].append(seconds)
            ours, theirs = (1e6 * statistics.median(times[name]) for name in ("crossdevice", "gloo"))
            if is_first:
                shown = f"{kind:<24}{num_bytes:>12}{ours:>11.0f} us{theirs:>9.0f} us   {ours / theirs:.2f}"
                print(shown, flush=True)
    dist.barrier(group=groups["gloo"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
