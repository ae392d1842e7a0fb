"""Training steps on logical CPU devices: gradients reduced after the backward pass, or in buckets during it.

    python benchmarks/training_steps.py [--rounds N] [--devices 2 4]

Ways to make one step take turns, round after round, and medians are compared, as ratios to plain PyTorch with
as many micro-batches, one after another. All make the same step with the same optimizer. Run it on a quiet
machine; on one with few cores there is little to overlap, since PyTorch's kernels use all of them.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch

import crossdevice as cd
from crossdevice.integrations.torch import DataParallel, MirroredModule

BUCKET_BYTES = 4 << 20
EXAMPLES_PER_DEVICE = 4

Step = Callable[[], object]


class Residual(torch.nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(
            *(torch.nn.Conv2d(channels, channels, 3, padding=1), torch.nn.ReLU()),
            torch.nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.inner(x))


def convolutional() -> tuple[torch.nn.Module, torch.Tensor]:
    """As deep as a ResNet-18, at 32 x 32."""
    layers: list[torch.nn.Module] = [torch.nn.Conv2d(3, 64, 3, padding=1)]
    for channels in (64, 128, 256, 512):
        layers += [Residual(channels), Residual(channels)]
        if channels < 512:
            layers.append(torch.nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1))
    layers += [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(512, 10)]
    return torch.nn.Sequential(*layers), torch.randn(EXAMPLES_PER_DEVICE, 3, 32, 32)


def transformer() -> tuple[torch.nn.Module, torch.Tensor]:
    """As large as a small GPT's blocks: 4 layers of 256."""
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    blocks = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return torch.nn.Sequential(blocks, torch.nn.Linear(256, 1000)), torch.randn(EXAMPLES_PER_DEVICE, 64, 256)


def plain(module: torch.nn.Module, shares: list[torch.Tensor]) -> Step:
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, foreach=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        for share in shares:
            (module(share).square().mean() / len(shares)).backward()
        optimizer.step()

    return step


def data_parallel(module: torch.nn.Module, shares: list[torch.Tensor]) -> Step:
    model = DataParallel(module, devices=devices_of(shares), bucket_bytes=BUCKET_BYTES)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
    batch = torch.cat(shares)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def mirrored(**settings: object) -> Callable[[torch.nn.Module, list[torch.Tensor]], Step]:
    def make(module: torch.nn.Module, shares: list[torch.Tensor]) -> Step:
        strategy = cd.MirroredStrategy(devices_of(shares))
        model = MirroredModule(module, strategy, **settings)  # type: ignore[arg-type]
        optimizers = model.optimizers(lambda own: torch.optim.SGD(own, lr=1e-3, foreach=True))

        def replica(share: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
            optimizer.zero_grad(set_to_none=False)
            model(share).square().mean().backward()
            model.reduce_gradients("mean")
            optimizer.step()

        return lambda: strategy.run(replica, (cd.PerReplica(shares), optimizers))

    return make


WAYS = {
    "plain micro-batches": plain,
    "DataParallel": data_parallel,
    "MirroredModule": mirrored(),
    "with arenas": mirrored(arenas=True),
    "with overlap": mirrored(overlap="mean", bucket_bytes=BUCKET_BYTES),
}


def devices_of(shares: list[torch.Tensor]) -> list[str]:
    return [f"cpu:{number}" for number in range(len(shares))]


def medians(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Seconds; one step of each way in turn."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            if number:  # the first one warms up
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4])
    arguments = parser.parse_args()
    for network in (convolutional, transformer):
        for count in arguments.devices:
            torch.manual_seed(0)
            module, share = network()
            shares = [share.clone() for _ in range(count)]
            steps = {name: make(copy.deepcopy(module), shares) for name, make in WAYS.items()}
            found = medians(steps, arguments.rounds)
            base = found["plain micro-batches"]
            print(f"{network.__name__} on {count} devices")
            for name, seconds in found.items():
                print(f"  {name:<20} {seconds * 1e3:8.1f} ms  {seconds / base:5.2f} x plain")


if __name__ == "__main__":
    main()
