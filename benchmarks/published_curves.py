"""Predicted against published: all-reduces of NCCL on one node of 8 GPUs, and the errors of the model.

    python benchmarks/published_curves.py [--fit]

Exits with 1 if a machine misses its bounds. Each machine has one measured number, `engine.call_microseconds`
in its topology file; `--fit` finds the one with the least mean error. The other constants come from
NCCL's source; the form of the model (which of its hop latencies fills the pipe, four hops and (n - 1) / n of
the links' efficiency for a switch that adds) was chosen with these curves in view, and the number is fitted
to the same points, so this shows how well they are described, not how well others are foretold.
Sizes are powers of two, GB/s are 10^9, as nccl-tests prints them.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import NamedTuple

from crossdevice.costs.timing import engine_duration
from crossdevice.costs.topology import Topology, read_topology

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = (
    1 * KIB,
    32 * KIB,
    256 * KIB,
    1 * MIB,
    4 * MIB,
    16 * MIB,
    64 * MIB,
    256 * MIB,
    1 * GIB,
    8 * GIB,
    16 * GIB,
)
LARGE_BYTES = 256 * MIB
GIGA, MICRO = 1e9, 1e-6


class Curve(NamedTuple):
    """Published busbw in GB/s at each of SIZES (None where there is none), and the bounds on our errors."""

    topology: str
    source: str
    bus_bandwidths: tuple[float | None, ...]
    mean_bound: float = 0.15
    worst_bound: float = 1.5
    large_bound: float | None = 0.10


AZURE = "Azure/AI-benchmarking-guide, Azure_Results/ND_{}_results.md"
CURVES = (
    Curve(
        "dgx_a100",
        AZURE.format("A100_v4"),
        (0.04, 1.37, 10.11, 36.22, 71.43, 109.22, 166.63, 213.87, 228.10, 231.58, None),
    ),
    Curve(
        "hgx_h100",
        AZURE.format("H100_v5"),
        (0.07, 1.71, 10.86, 43.70, 128.73, 234.45, 361.78, 423.38, 466.35, 478.87, None),
    ),
    Curve(
        "hgx_h200",
        AZURE.format("H200_v5"),
        (0.06, 1.84, 14.75, 52.96, 138.44, 240.41, 368.11, 432.24, 467.58, 479.98, None),
    ),
    Curve(
        "hgx_b200",
        "stas00/ml-engineering, network/README.md",
        (None, 1.20, 9.54, 36.06, 76.48, 254.96, 400.60, 646.11, 723.34, 839.07, 845.67),
        mean_bound=0.20,
        large_bound=None,
    ),
)


class ClusterTime(NamedTuple):
    """Published time of one all-reduce on several nodes."""

    topology: str
    source: str
    num_devices: int
    size_bytes: int
    seconds: float


CLUSTER_TIMES = (ClusterTime("hgx_h100", "NVIDIA/nccl-tests#309", 64, GIB, 7.4e-3),)


class Point(NamedTuple):
    """One size: published and predicted busbw in GB/s."""

    size_bytes: int
    published: float
    predicted: float

    @property
    def factor(self) -> float:
        """How many times one is the other, 1 or more."""
        return max(self.predicted / self.published, self.published / self.predicted)


class Errors(NamedTuple):
    """What the bounds are about: the geometric mean and the worst factor, and the worst of large sizes."""

    mean: float
    worst: Point
    large: float


def bus_factor(num_devices: int) -> float:
    """What nccl-tests prints: what an all-reduce would ask of each link of a ring."""
    return 2 * (num_devices - 1) / num_devices


def published_times(curve: Curve, num_devices: int) -> dict[int, float]:
    """Published seconds by size."""
    return {
        size: size * bus_factor(num_devices) / (bandwidth * GIGA)
        for size, bandwidth in zip(SIZES, curve.bus_bandwidths, strict=True)
        if bandwidth is not None
    }


def points_of(curve: Curve, topology: Topology) -> list[Point]:
    """The model's curve beside the published one."""
    factor = bus_factor(topology.num_devices)
    return [
        Point(size, published, size / engine_duration(topology, size).seconds * factor / GIGA)
        for size, published in zip(SIZES, curve.bus_bandwidths, strict=True)
        if published is not None
    ]


def errors_of(points: list[Point]) -> Errors:
    """The errors of a curve; a mean of 0.15 says that predictions are off by 15 % on (geometric) average."""
    logs = [math.log(point.factor) for point in points]
    large = max(point.factor - 1 for point in points if point.size_bytes >= LARGE_BYTES)
    return Errors(math.exp(sum(logs) / len(logs)) - 1, max(points, key=lambda p: p.factor), large)


def failures_of(curve: Curve, errors: Errors) -> list[str]:
    """Which bounds are missed."""
    missed = []
    if errors.mean > curve.mean_bound:
        missed.append(f"mean error {errors.mean:.1%} is above {curve.mean_bound:.0%}")
    if errors.worst.factor > curve.worst_bound:
        missed.append(f"worst point x{errors.worst.factor:.2f} is above x{curve.worst_bound}")
    if curve.large_bound is not None and errors.large > curve.large_bound:
        missed.append(f"{errors.large:.1%} at 256 MiB and above is more than {curve.large_bound:.0%}")
    return missed


def fitted_microseconds(curve: Curve, topology: Topology) -> float:
    """The time of a call, to half a microsecond, with the least mean error."""
    assert topology.engine is not None
    engine = topology.engine
    return min(
        (half / 2 for half in range(20, 160)),
        key=lambda microseconds: (
            errors_of(
                points_of(
                    curve,
                    dataclasses.replace(
                        topology, engine=dataclasses.replace(engine, call_seconds=microseconds * MICRO)
                    ),
                )
            ).mean
        ),
    )


def size_text(num_bytes: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes // unit} {name}"
    return f"{num_bytes} B"


def main(arguments: list[str]) -> int:
    failed = False
    for curve in CURVES:
        topology = read_topology(curve.topology)
        assert topology.engine is not None
        points = points_of(curve, topology)
        errors = errors_of(points)
        print(f"# {curve.topology}: {topology.summary}")
        print(f"# published: {curve.source}")
        print(f"# calibration: one call takes {topology.engine.call_seconds / MICRO:g} us")
        if "--fit" in arguments:
            print(f"# best fit: {fitted_microseconds(curve, topology):g} us")
        print(f"{'size':>8} {'published':>10} {'predicted':>10}  busbw, GB/s")
        for point in points:
            off = point.predicted / point.published - 1
            size = size_text(point.size_bytes)
            print(f"{size:>8} {point.published:10.2f} {point.predicted:10.2f}  {off:+.0%}")
        print(
            f"geometric-mean error {errors.mean:.1%}, worst x{errors.worst.factor:.2f} "
            f"at {size_text(errors.worst.size_bytes)}, at 256 MiB and above {errors.large:.1%}"
        )
        for failure in failures_of(curve, errors):
            failed = True
            print(f"FAILED: {failure}")
        print()
    print("FAILED" if failed else "all bounds are kept")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
