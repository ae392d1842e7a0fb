"""`crossdevice demo`: trains a classifier on 1, 2 and 4 devices and in 2 processes, to the same bits."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from crossdevice import runtime
from crossdevice.algorithms.registry import ALGORITHMS
from crossdevice.backends.registry import BACKENDS
from crossdevice.cli.demo.training import (
    EXACT,
    MICRO_BATCH_SIZE,
    MICRO_BATCHES,
    NETWORKS,
    PLAIN,
    Digits,
    Training,
    load_digits,
    read_trainings,
    strategy_in,
    train,
)
from crossdevice.cli.run import run_quietly
from crossdevice.cli.svg import Chart, Line, charts_svg
from crossdevice.cli.terminal import Section, check_ending, output_file, progress, show, write_file
from crossdevice.errors import OptionError
from crossdevice.process_groups.cluster import cluster_from_env
from crossdevice.strategies.mirrored import MirroredStrategy
from crossdevice.values.device import host_device
from crossdevice.values.quantities import counted

NUM_PROCESSES = 2
"""Number that the demo itself starts."""


ALONE = counted(1, "device")

DEPENDS_ON = {
    "numpy": "It depends on the program alone: all products are exact, by any BLAS and processor.",
    "torch": "It depends on PyTorch's products, too: on its version, its threads and the processor.",
}

Runs = dict[str, dict[str, Training]]
"""Training of each precision, by a description of where it ran."""


class _Curve(NamedTuple):
    """One line in all charts; narrower ones are drawn upon wider ones, so that all of them are seen."""

    name: str
    training: Training
    width: float
    is_dashed: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the demo's options."""
    add = parser.add_argument
    add("--backend", choices=sorted(NETWORKS), default="numpy", help="array library (numpy)")
    add("--devices", type=int, default=4, metavar="N", help="logical CPU devices in all processes (4)")
    add("--algorithm", "--ops", metavar="NAME", help=f"{', '.join(ALGORITHMS)} (chosen by devices)")
    add("--epochs", type=int, default=20, metavar="N", help="number of passes over the training data (20)")
    curves = "crossdevice-demo.svg"
    add("--picture", type=output_file, default=curves, metavar="FILE", help=f"file for the curves ({curves})")


def run(arguments: argparse.Namespace) -> int:
    """Trains on several numbers of devices and in two processes, and compares; exit status 1 if bits differ.

    Under a launcher the processes share the devices; only the first speaks, and trains on one device besides.
    """
    epochs, devices, backend = arguments.epochs, arguments.devices, arguments.backend
    if epochs < 1:
        raise OptionError(f"--epochs must be 1 or more; got {epochs}")
    if not 1 <= devices <= MICRO_BATCHES:
        raise OptionError(
            f"--devices must be 1 to {MICRO_BATCHES}, the micro-batches of a step; got {devices}"
        )
    check_ending(arguments.picture, "picture", ".svg")
    BACKENDS.load(backend)
    digits, cluster = load_digits(), cluster_from_env()
    if cluster.size > 1:
        if arguments.algorithm is not None:
            raise OptionError("--algorithm is for one process; several use CollectiveAllReduce")
        jointly = strategy_in(cluster, devices)
        if cluster.rank > 0:
            for precision in (EXACT, PLAIN):
                train(digits, backend, epochs, jointly, precision)
            return 0
        places = {f"{cluster.size} processes": jointly, ALONE: MirroredStrategy(["cpu:0"])}
    else:
        algorithm = ALGORITHMS.load(arguments.algorithm) if arguments.algorithm else None
        counts = sorted({1, max(devices // 2, 1), devices}, reverse=True)
        places = {
            counted(count, "device"): MirroredStrategy(
                [host_device(index) for index in range(count)], algorithm() if algorithm else None
            )
            for count in counts
        }
    print(next(iter(places.values())).explain())
    print(
        f"{len(digits.labels)} digits for training, {len(digits.held_out_labels)} held out; {epochs} epochs, "
        f"steps of {MICRO_BATCHES} micro-batches of {MICRO_BATCH_SIZE} on any number of devices, {backend}"
    )
    runs = _trained(places, digits, backend, epochs)
    if cluster.size == 1 and devices > 1:
        runs = {f"{NUM_PROCESSES} processes": _launched(backend, devices, epochs), **runs}
    is_one = _report(runs, backend)
    write_file(arguments.picture, _picture(runs))
    print(f"curves of loss, accuracy and differing parameters: {arguments.picture}")
    return 0 if is_one else 1


def _trained(places: dict[str, MirroredStrategy], digits: Digits, backend: str, epochs: int) -> Runs:
    with progress(2 * epochs * len(places)) as advance:
        return {
            title: {
                precision: train(
                    digits,
                    backend,
                    epochs,
                    strategy,
                    precision,
                    lambda word=f"{title}, {precision}": advance(word),  # type: ignore[misc]
                )
                for precision in (EXACT, PLAIN)
            }
            for title, strategy in places.items()
        }


def _launched(backend: str, devices: int, epochs: int) -> dict[str, Training]:
    """Runs the same in separate processes, which `crossdevice run` starts."""
    environment = runtime.environment_of_child()
    with tempfile.TemporaryDirectory(prefix="crossdevice-demo-") as folder:
        path = Path(folder) / "trainings.npz"
        command = [sys.executable, "-m", "crossdevice", "run", "-n", str(NUM_PROCESSES), "-m"]
        command += ["crossdevice.cli.demo.training", backend, str(devices), str(epochs), str(path)]
        run_quietly(f"{NUM_PROCESSES} processes", command, path, environment)
        return read_trainings(path)


def _report(runs: Runs, backend: str) -> bool:
    """Prints all results; returns whether exact sums gave the same bits everywhere."""
    rows = []
    for title in sorted(runs, key=lambda title: (title.endswith("processes"), title)):
        exact, plain = runs[title][EXACT], runs[title][PLAIN]
        rows.append([title, *_cells(exact), *_cells(plain)])
    headings = ("", "exact sum", "accuracy", "seconds", "float32 sum", "accuracy", "seconds")
    show(["after the last step:"], [Section("SHA-256 of all parameters", headings, rows)])
    exact_digests = {digest for trainings in runs.values() for digest in trainings[EXACT].digests}
    is_one = len(exact_digests) == 1
    if not is_one:
        print(f"DIGESTS DIFFER: {', '.join(sorted(digest[:16] for digest in exact_digests))}")
    else:
        print(f"one digest for all with exact sums: {min(exact_digests)[:16]}... {DEPENDS_ON[backend]}")
        num_plain = len({digest for trainings in runs.values() for digest in trainings[PLAIN].digests})
        if len(runs) > 1:
            digests = counted(num_plain, "digest")
            print(f"{digests} with float32 sums: they depend on where micro-batches are added.")
    print(_about_times(runs))
    return is_one


def _cells(training: Training) -> list[str]:
    digests = " ".join(f"{digest[:16]}..." for digest in training.digests)
    return [digests, f"{training.accuracies[-1]:.4f}", f"{training.seconds:.2f}"]


def _about_times(runs: Runs) -> str:
    steps = {title: _median(trainings[EXACT].step_milliseconds) for title, trainings in runs.items()}
    added = _median(runs[ALONE][EXACT].reduction_milliseconds)
    cores = os.cpu_count() or 1
    others = ", ".join(f"{time:.2f} in {title}" for title, time in steps.items() if "processes" in title)
    most = next(title for title in steps if "processes" not in title)
    many = f", {steps[most]:.2f} on {most}" if most != ALONE else ""
    return (
        f"Milliseconds of a step: {steps[ALONE]:.2f} on {ALONE} ({added:.2f} of them to add {MICRO_BATCHES} "
        f"gradients){many}{f', {others}' if others else ''}. All do the same products on the same {cores} "
        "cores, and these are far too small to gain by threads or processes: the rest is what it costs to "
        "share them out."
    )


def _median(milliseconds: Sequence[float]) -> float:
    """Returns the median: the very first step also loads kernels."""
    return float(np.median(milliseconds))


def _picture(runs: Runs) -> str:
    curves = [
        _Curve(f"{title}, exact", runs[title][EXACT], 2.0 * (len(runs) - number), is_dashed=False)
        for number, title in enumerate(runs)
    ]
    most = next(iter(runs))
    curves.append(_Curve(f"{most}, float32", runs[most][PLAIN], 2.0, is_dashed=True))
    reference = runs[ALONE][EXACT]

    def lines(numbers: Callable[[Training], Sequence[float]]) -> list[Line]:
        return [
            Line(curve.name, list(enumerate(numbers(curve.training), 1)), curve.is_dashed, width=curve.width)
            for curve in curves
        ]

    def differing(training: Training) -> list[float]:
        pairs = zip(training.parameters, reference.parameters, strict=True)
        return [100.0 * float(np.mean(own != others)) for own, others in pairs]

    losses, accuracies = lines(lambda training: training.losses), lines(lambda training: training.accuracies)
    return charts_svg(
        [
            Chart("loss", "step", losses),
            Chart("accuracy on held-out digits", "epoch", accuracies, shows_zero=False),
            Chart(f"% of parameters unlike those of {ALONE}", "epoch", lines(differing)),
        ]
    )
