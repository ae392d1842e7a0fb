"""What a record of bits costs a training step: only marks of its gradients, and marks of every submodule.

`python benchmarks/recording.py` trains a perceptron on one thread, steps of all kinds in turn, and prints the
share by which the fastest recorded steps take longer than the fastest plain ones.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import crossdevice as cd
from crossdevice.integrations.torch import ModuleBits
from crossdevice.values.quantities import time_text

ROUNDS = 25


def seconds(step: Callable[[], None]) -> float:
    """Duration of one step."""
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def compare(width: int, num_layers: int, batch: int) -> None:
    """Prints a line for one size."""
    layers = [layer for _ in range(num_layers) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    model, value = torch.nn.Sequential(*layers), torch.randn(batch, width)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(value).square().mean().backward()
        optimizer.step()

    def marked_step() -> None:
        step()
        cd.mark_bits("gradients", {name: each.grad for name, each in model.named_parameters()})

    times: dict[str, list[float]] = {"plain": [], "gradients": [], "submodules": []}
    # In one record, in which a plain step marks nothing: what events have in common is written once.
    with tempfile.TemporaryDirectory() as folder, cd.record_bits(Path(folder, "run.bits")):
        for _ in range(ROUNDS):
            times["plain"].append(seconds(step))
            times["gradients"].append(seconds(marked_step))
            with ModuleBits(model):
                times["submodules"].append(seconds(step))
    plain, *recorded = (min(each[3:]) for each in times.values())
    shares = "   ".join(
        f"{name} {each / plain - 1:+.1%}" for name, each in zip(list(times)[1:], recorded, strict=True)
    )
    print(f"{num_layers} layers of {width}, batch {batch}: {time_text(plain)} plain   {shares}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for size in ((512, 8, 64), (1024, 6, 256), (1024, 6, 1024)):
        compare(*size)
