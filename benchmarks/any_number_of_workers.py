"""What gradients cost that have the same bits on any number of workers, and what those of DDP have.

    python benchmarks/any_number_of_workers.py [--rounds N] [--quick] [--width N] [--texts N]
                                               [--workers 1 2 4]
    python benchmarks/any_number_of_workers.py --matrix [--workers 1 2 3 4 6]
    python benchmarks/any_number_of_workers.py --gpu

Without a flag: exact accumulation of a micro-batch, for gradients of a real backward pass, beside a copy that
moves as many bytes (36 a parameter), in turns; then whole steps of a training, beside plain accumulation (for
several workers with DistributedDataParallel under `no_sync`), in turns. `--matrix` trains a small transformer
for 50 steps in every cell of workers and bucket sizes, in both ways, and prints the digests. `--gpu` adds the
gradients of ResNet-50 on a GPU. Run it on a quiet machine; ratios of medians are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from resnet50 import gradient_shapes
from small_transformer import LEARNING_RATE, NUM_STEPS, PER_STEP, Transformer, train
from torch.nn.parallel import DistributedDataParallel

from crossdevice.cli.bench.report import machine
from crossdevice.integrations.torch import ExactGradients

BYTES_OF_A_PARAMETER = 36
"""A gradient is read, two float64 are read and written."""

BUCKETS = (4096, 25 << 20)
STEP_WIDTH, STEP_LENGTH = 192, 64
STEP_MICRO_BATCHES = 4
COPY_SHARE, STEP_RATIO, GPU_MILLISECONDS = 0.8, 1.10, 0.30
"""Targets."""

WORKER = "CROSSDEVICE_BENCHMARK_WORKER"


def seconds(call: Callable[[], object]) -> float:
    """Of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def verdict(is_kept: bool) -> str:
    return "" if is_kept else "  BELOW"


def measure_accumulation(width: int, rounds: int) -> None:
    """Prints what it takes to add the gradients of one micro-batch."""
    model = Transformer(width, num_words=2 * width)
    exact = ExactGradients(model.parameters())
    text = torch.randint(width, (2, 16))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    source = torch.ones(num_parameters * BYTES_OF_A_PARAMETER // 2, dtype=torch.uint8)
    target = torch.empty_like(source).copy_(source)
    times: dict[str, list[float]] = {"add": [], "copy": []}
    for turn in range(rounds + 2):
        model(text).backward()
        taken = {"add": seconds(exact.add), "copy": seconds(lambda: target.copy_(source))}
        for name, found in taken.items() if turn >= 2 else ():
            times[name].append(found)
        if exact.micro_batches == 8:
            exact.clear()
    add, copy = (statistics.median(times[name]) for name in ("add", "copy"))
    print(
        f"a micro-batch of {num_parameters:,} parameters in {len(list(model.parameters()))} tensors: "
        f"{add * 1e3:.1f} ms, {add / num_parameters * 1e9:.2f} ns a parameter, "
        f"{copy / add:.0%} of a copy of as many bytes (at least {COPY_SHARE:.0%})"
        f"{verdict(copy / add >= COPY_SHARE)}"
    )


def worker_steps(rounds: int, texts: int) -> None:
    """Times steps of both ways in turns, as one of the workers; the first prints medians."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain, ours = (Transformer(STEP_WIDTH, STEP_WIDTH, STEP_LENGTH) for _ in range(2))
    called = DistributedDataParallel(plain) if size > 1 else plain
    exact = ExactGradients(ours.parameters())
    optimizers = [torch.optim.Adam(model.parameters(), lr=LEARNING_RATE) for model in (plain, ours)]
    text = torch.randint(STEP_WIDTH, (texts, STEP_LENGTH))
    numbers = range(rank, STEP_MICRO_BATCHES, size)

    def plain_step() -> None:
        optimizers[0].zero_grad()
        for number in numbers:
            is_last = number == numbers[-1]
            quiet = called.no_sync() if size > 1 and not is_last else nullcontext()  # type: ignore[operator]
            with quiet:
                (called(text) / len(numbers)).backward()
        optimizers[0].step()

    def exact_step() -> None:
        optimizers[1].zero_grad()
        for _ in numbers:
            ours(text).backward()
            exact.add(texts)
        exact.finish()
        optimizers[1].step()

    times: dict[str, list[float]] = {"plain": [], "exact": []}
    for turn in range(rounds + 2):
        for name, step in (("plain", plain_step), ("exact", exact_step)):
            dist.barrier()
            taken = seconds(step)
            if turn >= 2:
                times[name].append(taken)
    if rank == 0:
        medians = {name: statistics.median(found) for name, found in times.items()}
        print(json.dumps([sum(p.numel() for p in plain.parameters()), medians]))
    dist.destroy_process_group()


def worker_matrix() -> None:
    """Trains in every cell, as one of the workers; the first prints digests and parameters."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for way in ("exact", "ddp"):
        for bucket_bytes in BUCKETS:
            training = train(way, bucket_bytes)  # type: ignore[arg-type]
            found[f"{way} {bucket_bytes}"] = [
                training.digest,
                training.first_gradient.tolist(),  # type: ignore[union-attr]
                training.first_parameters.tolist(),  # type: ignore[union-attr]
                training.parameters.tolist(),
            ]
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def launched(size: int, mode: str, rounds: int = 0, texts: int = 0) -> Any:
    """What the first of several workers prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    answer = subprocess.run(
        [*command, __file__, "--rounds", str(rounds), "--texts", str(texts)],
        env={**os.environ, WORKER: mode, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(answer.stdout.splitlines()[-1])


def measure_steps(sizes: Sequence[int], rounds: int, texts: int) -> None:
    """Prints what a step of a training takes."""
    for size in sizes:
        num_parameters, medians = launched(size, "steps", rounds, texts)
        ratio = medians["exact"] / medians["plain"]
        print(
            f"a step on {size} workers, {num_parameters:,} parameters, {STEP_MICRO_BATCHES} micro-batches of "
            f"{texts} x {STEP_LENGTH} words: {medians['exact'] * 1e3:.0f} ms, plain "
            f"{medians['plain'] * 1e3:.0f} ms, ratio {ratio:.2f} (at most {STEP_RATIO:.2f})"
            f"{verdict(ratio <= STEP_RATIO)}"
        )


def print_matrix(sizes: Sequence[int]) -> None:
    """Prints the digests of all cells, and how far those of DDP are from one worker's."""
    cells = {size: launched(size, "matrix") for size in sizes}
    first = {name: map(torch.tensor, facts[1:]) for name, facts in cells[sizes[0]].items()}
    known = {name: tuple(tensors) for name, tensors in first.items()}
    print(f"{NUM_STEPS} steps of {PER_STEP} micro-batches, Adam; SHA-256 of all parameters and its state")
    for size, cell in cells.items():
        for name, (digest, *numbers) in cell.items():
            gradient, stepped, parameters = map(torch.tensor, numbers)
            base = known[name]
            signs = int((torch.sign(gradient) != torch.sign(base[0])).sum())
            apart = float((stepped - base[1]).abs().max()) / LEARNING_RATE
            last = float((parameters - base[2]).abs().max())
            print(
                f"  {size} workers, {name:>14} bytes: {digest[:16]}, {signs} of {gradient.numel()} signs of "
                f"the first gradient differ, parameters then by up to {apart:.2g} learning rates, in the end "
                f"by {last:.2g}"
            )
    for way in ("exact", "ddp"):
        digests = {facts[0] for cell in cells.values() for name, facts in cell.items() if way in name}
        print(f"{way}: {len(digests)} digests in {len(BUCKETS) * len(cells)} cells")


def measure_gpu(rounds: int) -> None:
    """Prints what the gradients of ResNet-50 take on a GPU."""
    parameters = [torch.nn.Parameter(torch.zeros(shape, device="cuda")) for shape in gradient_shapes()]
    num_parameters = sum(parameter.numel() for parameter in parameters)
    source = torch.ones(num_parameters * BYTES_OF_A_PARAMETER // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    exact = ExactGradients(parameters)
    gradients = [torch.randn_like(parameter) for parameter in parameters]

    def add() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        exact.add(weight=32)

    def timed(call: Callable[[], object]) -> tuple[float, float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(50_000_000)  # so that the GPU never waits for Python
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        on_gpu = start.elapsed_time(end)
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return on_gpu, (time.perf_counter() - began) * 1e3

    times: dict[str, list[tuple[float, float]]] = {"add": [], "copy": []}
    for turn in range(rounds + 3):
        for name, call in (("add", add), ("copy", lambda: target.copy_(source))):
            taken = timed(call)
            if turn >= 3:
                times[name].append(taken)
    (add_ms, wall_ms), (copy_ms, _) = (
        tuple(map(statistics.median, zip(*times[name], strict=True))) for name in ("add", "copy")
    )
    print(
        f"{torch.cuda.get_device_name()}: a micro-batch of {num_parameters:,} parameters in "
        f"{len(parameters)} tensors: {add_ms:.3f} ms of the GPU, {wall_ms:.3f} ms of the call, "
        f"{copy_ms / add_ms:.0%} of a copy of as many bytes (at most {GPU_MILLISECONDS:.2f} ms)"
        f"{verdict(add_ms <= GPU_MILLISECONDS)}"
    )
    finish_ms = seconds(exact.finish) * 1e3
    print(f"the end of the step, with sums copied to the host and rounded there: {finish_ms:.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="few rounds of a small network")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--texts", type=int, default=16, help="of a micro-batch of the training (16)")
    parser.add_argument("--workers", type=int, nargs="+")
    parser.add_argument("--matrix", action="store_true")
    parser.add_argument("--gpu", action="store_true")
    arguments = parser.parse_args()
    rounds = 3 if arguments.quick else arguments.rounds
    mode = os.environ.get(WORKER)
    if mode is not None:
        worker_steps(arguments.rounds, arguments.texts) if mode == "steps" else worker_matrix()
        return
    print(f"# {machine()}")
    if arguments.matrix:
        print_matrix(arguments.workers or (1, 2, 3, 4, 6))
    elif arguments.gpu:
        measure_gpu(rounds)
    else:
        measure_accumulation(64 if arguments.quick else arguments.width, rounds)
        measure_steps(arguments.workers or (1, 2, 4), rounds, arguments.texts)


if __name__ == "__main__":
    main()
