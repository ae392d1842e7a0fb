"""One training of the demo: by exact sums, or by plain ones for comparison."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crossdevice.cli.demo.networks import NETWORKS, Array, digest, initial_parameters
from crossdevice.errors import OptionError
from crossdevice.execution.reading.shards import part_lengths
from crossdevice.process_groups.cluster import Cluster, cluster_from_env
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.strategies.mirrored import MirroredStrategy
from crossdevice.strategies.multi_worker import MultiWorkerMirroredStrategy
from crossdevice.values.device import Device, host_device
from crossdevice.values.distributed import Mirrored, PerReplica, destinations_on
from crossdevice.values.options import CommunicationOptions

MICRO_BATCHES, MICRO_BATCH_SIZE = 8, 12
SEED = 7

EXACT, PLAIN = "exact", "fast"
"""Precisions: correctly rounded sums of all micro-batches; float32 sums, first on each device."""


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
    reduction_milliseconds: list[float]
    parameters: list[NDArray[np.float32]]
    """The first replica's, after each epoch."""
    digests: list[str]
    """Final parameters of all replicas; one entry if all are the same."""

    @property
    def seconds(self) -> float:
        """Seconds in training steps."""
        return sum(self.step_milliseconds) / 1000


def load_digits() -> Digits:
    """Loads scikit-learn's handwritten digits; every fifth of a fixed shuffle is held out."""
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


def strategy_in(cluster: Cluster, num_devices: int) -> MultiWorkerMirroredStrategy:
    """Returns the strategy of a process that has its share of all devices."""
    shares = part_lengths(num_devices, cluster.size)
    if not shares[-1]:
        raise OptionError(f"{cluster.size} processes need as many devices; got --devices {num_devices}")
    devices = [host_device(index) for index in range(shares[cluster.rank])]
    return MultiWorkerMirroredStrategy(cluster, devices=devices)


def write_trainings(path: Path, trainings: Mapping[str, Training]) -> None:
    """Writes trainings by name to an .npz file."""
    arrays = {
        f"{name}/{field}": np.array(values)
        for name, training in trainings.items()
        for field, values in training._asdict().items()
    }
    np.savez(path, allow_pickle=False, **arrays)


def read_trainings(path: Path) -> dict[str, Training]:
    """Reads the output of `write_trainings`."""
    with np.load(path) as file:
        found: dict[str, dict[str, list[Any]]] = {}
        for key in file.files:
            name, field = key.split("/")
            values = file[key]
            found.setdefault(name, {})[field] = list(values) if values.ndim > 1 else values.tolist()
    return {name: Training(**fields) for name, fields in found.items()}


def train(
    digits: Digits,
    backend: str,
    epochs: int,
    strategy: MirroredStrategy,
    precision: str,
    advance: Callable[[], object] = lambda: None,
) -> Training:
    """Trains on the strategy's devices, with as many micro-batches a step on any number of them."""
    network = NETWORKS[backend](strategy, initial_parameters(SEED))
    group = strategy.group if isinstance(strategy, MultiWorkerMirroredStrategy) else None
    add_up = _SUMS[precision]
    training = Training([], [], [], [], [], [])
    dataset = strategy.experimental_distribute_dataset
    generator = np.random.default_rng(SEED)
    for _ in range(epochs):
        for images, labels in dataset(list(_batches(digits, generator))):
            start = time.perf_counter()
            gradients = network.gradients(images, labels)
            between = time.perf_counter()
            *mean, loss = add_up(strategy, gradients)
            added = time.perf_counter()
            network.update(mean)
            training.step_milliseconds.append((time.perf_counter() - start) * 1e3)
            training.reduction_milliseconds.append((added - between) * 1e3)
            training.losses.append(float(loss.values[0][0]))
        training.accuracies.append(network.accuracy(digits.held_out_images, digits.held_out_labels))
        training.parameters.append(np.concatenate([each.ravel() for each in network.parameters()[0]]))
        advance()
    own = [digest(parameters) for parameters in network.parameters()]
    training.digests.extend(dict.fromkeys(_of_all_processes(own, group)))
    return training


def _batches(digits: Digits, generator: np.random.Generator) -> Iterator[tuple[Array, Array]]:
    """Yields whole batches in random order: micro-batches along the first axis, shared among devices."""
    order = generator.permutation(len(digits.labels))
    size = MICRO_BATCHES * MICRO_BATCH_SIZE
    for start in range(0, len(order) - size + 1, size):
        rows = order[start : start + size].reshape(MICRO_BATCHES, MICRO_BATCH_SIZE)
        yield digits.images[rows], digits.labels[rows]


def _exact_means(strategy: MirroredStrategy, gradients: Sequence[Sequence[Array]]) -> list[Mirrored]:
    """Returns for each parameter the mean over all micro-batches, each a replica, rounded once."""
    devices = strategy.extended.worker_devices
    places = [device for device, own in zip(devices, gradients, strict=True) for _ in own[0]]
    columns = [
        [gradient for own in of_devices for gradient in own] for of_devices in zip(*gradients, strict=True)
    ]
    return _reduced(strategy, columns, places, EXACT)


def _plain_means(strategy: MirroredStrategy, gradients: Sequence[Sequence[Array]]) -> list[Mirrored]:
    """Returns float32 means: each device adds its micro-batches, then the devices' sums are added."""
    devices = strategy.extended.worker_devices
    columns = [[_added(own) for own in of_devices] for of_devices in zip(*gradients, strict=True)]
    return _reduced(strategy, columns, devices, PLAIN)


def _added(gradients: Array) -> Array:
    total: Array = gradients[0] + 0
    for gradient in gradients[1:]:
        total += gradient
    return total


def _reduced(
    strategy: MirroredStrategy, columns: Sequence[Sequence[Array]], places: Sequence[Device], precision: Any
) -> list[Mirrored]:
    extended, share = strategy.extended, 1.0 / (MICRO_BATCHES * MICRO_BATCH_SIZE)
    destinations = destinations_on(extended.worker_devices)
    pairs = [(PerReplica(column, places), destinations) for column in columns]
    options = CommunicationOptions(precision=precision)
    sums = extended.cross_device_ops.batch_reduce("sum", pairs, options)
    local = map(strategy.experimental_local_results, sums)
    return [Mirrored.of(tuple(each * share for each in total), extended.worker_devices) for total in local]


_SUMS = {EXACT: _exact_means, PLAIN: _plain_means}


def _of_all_processes(own: Sequence[str], group: ProcessGroup | None) -> list[str]:
    if group is None:
        return list(own)
    with group.call("compare parameters", b"digests") as call:
        of_ranks = call.all_gather_uneven("\n".join(own).encode())
    return [line for text in of_ranks for line in text.decode().split("\n")]


def main(backend: str, num_devices: str, num_epochs: str, path: str) -> None:
    """Trains as one process of a launch, by each kind of sum; rank 0 writes the trainings."""
    digits, cluster = load_digits(), cluster_from_env()
    strategy = strategy_in(cluster, int(num_devices))
    trainings = {
        precision: train(digits, backend, int(num_epochs), strategy, precision)
        for precision in (EXACT, PLAIN)
    }
    if cluster.rank == 0:
        write_trainings(Path(path), trainings)


if __name__ == "__main__":
    main(*sys.argv[1:])
