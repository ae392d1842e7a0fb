"""Collectives of torch.distributed on the backend "crossdevice", as ratios to gloo in the same processes.

    crossdevice run -n 2 benchmarks/torch_backend.py [--rounds N] [--sizes 4 65536] [--only all_reduce]
    crossdevice run -n 2 benchmarks/torch_backend.py --sizes --steps 5 10

Both backends take turns, round after round, and medians are compared; a time is that of rank 0. Before
anything is measured, calls are made until all ranks have loaded their kernels: meanwhile a call takes ten
times as long. Run it on a quiet machine with a core for each rank; the load is printed. `--steps` measures
training steps of DDP and FSDP2 with so many million parameters.
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import crossdevice.integrations.torch  # noqa: F401 - registers the backend
from crossdevice.integrations.torch.distributed.reductions import late_kernels

CALL_BYTES = 64 << 20
"""How much is moved in one turn, at most."""

LARGEST_TURN = 50
STEPS_PER_TURN = 3

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


LAYERS = 8
EXAMPLES_PER_RANK = 8


def network(millions: int) -> torch.nn.Sequential:
    """Layers of one width, with about so many million parameters."""
    torch.manual_seed(0)
    width = round((millions * 1e6 / LAYERS) ** 0.5)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS)))


def training_steps(millions: int, group: dist.ProcessGroup) -> dict[str, Call]:
    """A step with SGD: forward and backward pass, and the update."""
    sharded, mesh = network(millions), DeviceMesh.from_group(group, "cpu")
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    models = {
        "DDP": DistributedDataParallel(network(millions), process_group=group),
        "FSDP2": fully_shard(sharded, mesh=mesh),
    }

    def step_of(model: torch.nn.Module, width: int) -> Call:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        examples = torch.randn(EXAMPLES_PER_RANK, width)

        def step() -> None:
            optimizer.zero_grad()
            model(examples).square().mean().backward()
            optimizer.step()

        return step

    return {name: step_of(model, network(millions)[0].in_features) for name, model in models.items()}


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


def compared(calls: dict[str, Call], rounds: int, repeats: int) -> dict[str, float]:
    """Medians, in microseconds, of turns that are taken round after round; the first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            seconds = seconds_per_call(call, repeats)
            if number:
                times[name].append(seconds)
    return {name: 1e6 * statistics.median(found) for name, found in times.items()}


def show(is_first: bool, what: str, times: dict[str, float]) -> None:
    """Prints a row on the first rank."""
    ours, theirs = times["crossdevice"], times["gloo"]
    if is_first:
        print(f"{what}{ours:>11.0f} us{theirs:>9.0f} us   {ours / theirs:.2f}", flush=True)


def main() -> None:
    """Prints a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", type=int, nargs="*", default=[4, 64 << 10, 4 << 20, 100 << 20])
    parser.add_argument("--steps", type=int, nargs="*", default=[], help="millions of parameters")
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
        calls = {name: collectives(num_bytes, group) for name, group in groups.items()}
        for kind in options.only or calls["gloo"]:
            if kind == "barrier" and num_bytes != options.sizes[0]:
                continue
            repeats = max(1, min(LARGEST_TURN, CALL_BYTES // num_bytes))
            times = compared({name: calls[name][kind] for name in groups}, options.rounds, repeats)
            show(is_first, f"{kind:<24}{num_bytes:>12}", times)
    for millions in options.steps:
        steps = {name: training_steps(millions, group) for name, group in groups.items()}
        for kind in steps["gloo"]:
            times = compared({name: steps[name][kind] for name in groups}, options.rounds, STEPS_PER_TURN)
            show(is_first, f"{f'a step of {kind}, {millions} M parameters':<36}", times)
    dist.barrier(group=groups["gloo"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
