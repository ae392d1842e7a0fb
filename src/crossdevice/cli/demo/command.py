"""`crossdevice demo`: trains a classifier of digits on logical devices, and shows that it worked."""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.algorithms.registry import ALGORITHMS
from crossdevice.backends.registry import BACKENDS
from crossdevice.cli.demo.networks import NETWORKS, initial_parameters
from crossdevice.cli.output_file import check_ending, output_file
from crossdevice.cli.svg import Chart, Line, charts_svg
from crossdevice.cli.terminal import progress
from crossdevice.errors import OptionError
from crossdevice.execution.reading.shards import part_lengths
from crossdevice.process_groups.cluster import Cluster, cluster_from_env
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.strategies.mirrored import MirroredStrategy
from crossdevice.strategies.multi_worker import MultiWorkerMirroredStrategy
from crossdevice.values.device import host_device
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.quantities import counted
from crossdevice.values.reduce_op import ReduceOp

BATCH_SIZE = 96
SEED = 7


class Digits(NamedTuple):
    """Images of 8 x 8 pixels between 0 and 1, and the digits they show."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]
    held_out_images: NDArray[np.float32]
    held_out_labels: NDArray[np.int64]


class Training(NamedTuple):
    """Results of one training run."""

    losses: list[float]
    accuracies: list[float]
    step_milliseconds: list[float]
    digests: list[str]

    @property
    def seconds(self) -> float:
        """Time in training steps."""
        return sum(self.step_milliseconds) / 1000


Runs = dict[str, Training]
"""Trainings by how many devices they had, in words."""

ALONE = counted(1, "device")


class TimedOps(CrossDeviceOps):
    """Another algorithm, with a clock on its reductions."""

    def __init__(self, ops: CrossDeviceOps) -> None:
        self.ops = ops
        self.microseconds: list[float] = []

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Sequence[Any], options: CommunicationOptions
    ) -> list[Any]:
        """One batch of the other algorithm."""
        start = time.perf_counter()
        results = self.ops.batch_reduce(reduce_op, value_destination_pairs, options)
        self.microseconds.append((time.perf_counter() - start) * 1e6)
        return results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The demo's options."""
    add = parser.add_argument
    add("--backend", choices=sorted(NETWORKS), default="numpy", help="array library (numpy)")
    add("--devices", type=int, default=4, metavar="N", help="logical CPU devices in all processes (4)")
    add("--algorithm", "--ops", metavar="NAME", help=f"{', '.join(ALGORITHMS)} (chosen by devices)")
    add("--epochs", type=int, default=30, metavar="N", help="number of passes over the training data (30)")
    curves = "crossdevice-demo.svg"
    add("--picture", type=output_file, default=curves, metavar="FILE", help=f"file for the curves ({curves})")


def run(arguments: argparse.Namespace) -> int:
    """Trains on the devices asked for and on one, and compares; with other processes under a launcher.

    Processes share the same devices, so that they get the bits of one process; only the first speaks.
    """
    for name in ("devices", "epochs"):
        if getattr(arguments, name) < 1:
            raise OptionError(f"--{name} must be 1 or more; got {getattr(arguments, name)}")
    check_ending(arguments.picture, "picture", ".svg")
    BACKENDS.load(arguments.backend)
    digits, cluster = load_digits(), cluster_from_env()
    strategy = _strategy(arguments, cluster)
    group = strategy.group if isinstance(strategy, MultiWorkerMirroredStrategy) else None
    title = counted(arguments.devices, "device")
    if cluster.rank > 0:
        _digests_of_all(_train(digits, arguments, strategy, title, lambda _: None), group)
        return 0
    print(strategy.explain())
    print(
        f"{len(digits.labels)} digits for training, {len(digits.held_out_labels)} held out; "
        f"{arguments.epochs} epochs in batches of {BATCH_SIZE}, {arguments.backend}"
    )
    timed = None
    if group is None:
        timed = TimedOps(strategy.extended.cross_device_ops)
        strategy = MirroredStrategy(strategy.extended.worker_devices, timed)
    with progress((1 if title == ALONE else 2) * arguments.epochs, lines_every=10) as advance:
        runs = {title: _digests_of_all(_train(digits, arguments, strategy, title, advance), group)}
        if title != ALONE:
            runs[ALONE] = _train(digits, arguments, MirroredStrategy(["cpu:0"]), ALONE, advance)
    names = ", ".join(map(str, strategy.extended.worker_devices))
    _report(runs, runs[title], names if group is None else f"{title} of {cluster.size} processes", timed)
    arguments.picture.write_text(_picture(runs), encoding="utf-8")
    print(f"curves of loss, accuracy and time per step: {arguments.picture}")
    return 0 if len(set(runs[title].digests)) == 1 else 1


def _strategy(arguments: argparse.Namespace, cluster: Cluster) -> MirroredStrategy:
    shares = part_lengths(arguments.devices, cluster.size)
    devices = [host_device(index) for index in range(shares[cluster.rank])]
    if cluster.size == 1:
        return MirroredStrategy(
            devices, ALGORITHMS.load(arguments.algorithm)() if arguments.algorithm else None
        )
    if arguments.algorithm is not None:
        raise OptionError("--algorithm is for one process; several use CollectiveAllReduce")
    if not shares[-1]:
        raise OptionError(f"{cluster.size} processes need as many devices; got --devices {arguments.devices}")
    return MultiWorkerMirroredStrategy(cluster, devices=devices)


def _digests_of_all(training: Training, group: ProcessGroup | None) -> Training:
    """The same with the digests of all processes."""
    if group is None:
        return training
    with group.call("compare parameters", b"digests") as call:
        of_ranks = call.all_gather_uneven("\n".join(training.digests).encode())
    return training._replace(digests=[line for text in of_ranks for line in text.decode().split("\n")])


def load_digits() -> Digits:
    """scikit-learn's handwritten digits, every fifth of a fixed shuffle held out."""
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ImportError as error:
        raise OptionError(
            "the demo's digits come with scikit-learn: pip install 'crossdevice[demo]'"
        ) from error
    images, labels = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(SEED).permutation(len(labels))
    images, labels = (images[order] / 16.0).astype(np.float32), labels[order].astype(np.int64)
    held_out = np.arange(len(labels)) % 5 == 0
    return Digits(images[~held_out], labels[~held_out], images[held_out], labels[held_out])


def _train(
    digits: Digits,
    arguments: argparse.Namespace,
    strategy: MirroredStrategy,
    title: str,
    advance: Callable[[str], None],
) -> Training:
    network = NETWORKS[arguments.backend](strategy, initial_parameters(SEED))
    generator = np.random.default_rng(SEED)
    training = Training([], [], [], [])
    for epoch in range(arguments.epochs):
        order = generator.permutation(len(digits.labels))
        batches = [order[start : start + BATCH_SIZE] for start in range(0, len(order), BATCH_SIZE)]
        pairs = [(digits.images[batch], digits.labels[batch]) for batch in batches]
        dataset = strategy.experimental_distribute_dataset(pairs)
        for batch, (images, labels) in zip(batches, dataset, strict=True):
            start = time.perf_counter()
            training.losses.append(network.train(images, labels, len(batch)))
            training.step_milliseconds.append((time.perf_counter() - start) * 1e3)
        training.accuracies.append(network.accuracy(digits.held_out_images, digits.held_out_labels))
        advance(f"{title}: epoch {epoch + 1}, accuracy {training.accuracies[-1]:.3f}")
    training.digests.extend(network.digests())
    return training


def _report(runs: Runs, many: Training, places: str, timed: TimedOps | None) -> None:
    print()
    print(f"{'':<12} accuracy on held-out digits   training, seconds")
    for title, training in runs.items():
        print(f"{title:<12} {training.accuracies[-1]:>27.4f}   {training.seconds:>17.2f}")
    if len(set(many.digests)) == 1:
        print(f"all replicas hold the same bits: sha256 {many.digests[0][:16]}... on {places}")
    else:
        print(f"REPLICAS DIFFER: {[digest[:16] for digest in many.digests]}")
    if timed is not None and timed.microseconds:
        median, total = np.median(timed.microseconds), sum(timed.microseconds) / 1e6
        reductions = f"{len(timed.microseconds)} reductions by {type(timed.ops).__name__}"
        print(f"{reductions}: {median:.0f} us each (median), {total:.2f} s in all")


def _picture(runs: Runs) -> str:
    def lines(numbers: Callable[[Training], Sequence[float]]) -> list[Line]:
        return [
            Line(title, list(enumerate(numbers(training), 1)), is_dashed=title != ALONE)
            for title, training in runs.items()
        ]

    losses, accuracies = lines(lambda training: training.losses), lines(lambda training: training.accuracies)
    return charts_svg(
        [
            Chart("loss", "step", losses),
            Chart("accuracy on held-out digits", "epoch", accuracies, shows_zero=False),
            Chart("milliseconds per step, median", "epoch", lines(_median_milliseconds)),
        ]
    )


def _median_milliseconds(training: Training) -> list[float]:
    """For each epoch; the very first step also loads the kernels."""
    epochs = np.array_split(np.array(training.step_milliseconds), len(training.accuracies))
    return [float(np.median(epoch)) for epoch in epochs]
