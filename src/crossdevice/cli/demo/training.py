"""One training of the demo, by exact sums, or by plain ones for comparison: its network and its optimizer.

The network has 64 inputs, one hidden layer and 10 digits, in NumPy and in PyTorch. Devices compute gradients
of whole micro-batches; their number in a step does not depend on the devices.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from crossdevice.errors import OptionError
from crossdevice.execution.reading.shards import part_lengths
from crossdevice.process_groups.cluster import Cluster, cluster_from_env
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.strategies.mirrored import MirroredStrategy
from crossdevice.strategies.multi_worker import MultiWorkerMirroredStrategy
from crossdevice.values.device import Device, host_device
from crossdevice.values.distributed import Mirrored, PerReplica, destinations_on
from crossdevice.values.options import CommunicationOptions

Array = NDArray[Any]
Arrays = dict[str, NDArray[np.float32]]

NUM_HIDDEN = 64
NUM_DIGITS = 10
LEARNING_RATE = 0.1
MOMENTUM = 0.9

WEIGHT_BITS, HIDDEN_BITS, ERROR_BITS = 18, 12, 16
"""Bits after the point that products see of weights, of hidden values and of errors.

Pixels have 4. A product of any two is a number of less than 48 bits, also summed over a layer or over a
micro-batch: float64 holds all of them, so nothing is rounded, in whatever order a BLAS adds them.
"""


class Network(Protocol):
    """A network on several devices, as the demo needs it."""

    def gradients(self, images: Any, labels: Any) -> list[list[Array]]:
        """Computes for each local device and parameter all micro-batches' gradients, stacked; losses last."""

    def update(self, gradients: Sequence[Mirrored]) -> None:
        """Applies the mean gradient of each parameter to every copy."""

    def accuracy(self, images: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
        """Returns the share of images with a digit that the first replica recognises."""

    def parameters(self) -> list[list[NDArray[np.float32]]]:
        """Returns the parameters of each replica."""


class NumpyNetwork:
    """Forward and backward pass by hand, on arrays that live on logical devices.

    All its products are exact (`WEIGHT_BITS`), and nothing else rounds in another way on another processor:
    it has no exponential functions.
    """

    def __init__(self, strategy: MirroredStrategy, initial: Arrays) -> None:
        self._strategy = strategy
        devices = strategy.extended.worker_devices
        copies = [{name: array.copy() for name, array in initial.items()} for _ in devices]
        still = [{name: np.zeros_like(array) for name, array in initial.items()} for _ in devices]
        self._parameters = Mirrored.of(tuple(copies), devices)
        self._velocities = Mirrored.of(tuple(still), devices)

    def gradients(self, images: Any, labels: Any) -> list[list[Array]]:
        """Computes for each local device and parameter all micro-batches' gradients, stacked; losses last."""
        found = self._strategy.run(_numpy_gradients, args=(self._parameters, images, labels))
        local = map(self._strategy.experimental_local_results, found)
        return [list(of_device) for of_device in zip(*local, strict=True)]

    def update(self, gradients: Sequence[Mirrored]) -> None:
        """Applies the mean gradient of each parameter to every copy."""
        self._strategy.run(_numpy_update, args=(self._parameters, self._velocities, *gradients))

    def accuracy(self, images: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
        """Returns the share of images recognised."""
        _, scores = _forward(self._parameters.values[0], images.astype(np.float64))
        return float(np.mean(scores.argmax(axis=1) == labels))

    def parameters(self) -> list[list[NDArray[np.float32]]]:
        """Returns the parameters of each replica."""
        return [list(parameters.values()) for parameters in self._parameters.values]


def _numpy_gradients(parameters: Arrays, images: Array, labels: Array) -> tuple[Any, ...]:
    """Computes gradients and losses of one device's micro-batches, which lie along the first axis."""
    images = images.astype(np.float64)
    hidden, scores = _forward(parameters, images)
    errors = _cut(scores - _one_hot(labels), ERROR_BITS)
    of_hidden = errors @ _cut(parameters["w2"], WEIGHT_BITS).T
    of_hidden = _cut(of_hidden * (hidden > 0), ERROR_BITS)
    found = (
        images.transpose(0, 2, 1) @ of_hidden,
        of_hidden.sum(axis=1),
        hidden.transpose(0, 2, 1) @ errors,
        errors.sum(axis=1),
        0.5 * np.square(errors).sum(axis=(1, 2))[:, None],
    )
    return tuple(each.astype(np.float32) for each in found)


def _forward(parameters: Arrays, images: Array) -> tuple[Array, Array]:
    w1, b1, w2, b2 = (_cut(array, WEIGHT_BITS) for array in parameters.values())
    hidden = _cut(np.maximum(images @ w1 + b1, 0.0), HIDDEN_BITS)
    return hidden, hidden @ w2 + b2


def _cut(values: Array, bits: int) -> Array:
    """Rounds float64 to this many bits after the point."""
    scaled: Array = np.rint(values * np.float64(2.0**bits))
    return scaled * 2.0**-bits


def _one_hot(labels: Array) -> Array:
    return np.eye(NUM_DIGITS)[labels]


def _numpy_update(parameters: Arrays, velocities: Arrays, *gradients: Array) -> None:
    for name, gradient in zip(parameters, gradients, strict=True):
        velocities[name] *= np.float32(MOMENTUM)
        velocities[name] -= np.float32(LEARNING_RATE) * gradient
        parameters[name] += velocities[name]


class TorchNetwork:
    """The same network as PyTorch modules, with PyTorch's own products."""

    def __init__(self, strategy: MirroredStrategy, initial: Arrays) -> None:
        torch = self._torch = importlib.import_module("torch")
        nn = torch.nn
        self._strategy = strategy
        devices = strategy.extended.worker_devices
        replicas = []
        for _ in devices:
            module = nn.Sequential(nn.Linear(64, NUM_HIDDEN), nn.ReLU(), nn.Linear(NUM_HIDDEN, NUM_DIGITS))
            with torch.no_grad():
                for parameter, name in zip(module.parameters(), ("w1", "b1", "w2", "b2"), strict=True):
                    parameter.copy_(torch.from_numpy(initial[name].T))
            optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
            replicas.append((module, optimizer))
        self._replicas = Mirrored.of(tuple(replicas), devices)

    def gradients(self, images: Any, labels: Any) -> list[list[Array]]:
        """Computes for each local device and parameter all micro-batches' gradients, stacked; losses last."""
        found = self._strategy.run(self._gradients_of_device, args=(self._replicas, images, labels))
        local = map(self._strategy.experimental_local_results, found)
        return [list(of_device) for of_device in zip(*local, strict=True)]

    def _gradients_of_device(self, replica: Any, images: Array, labels: Array) -> tuple[Any, ...]:
        torch, (module, _) = self._torch, replica
        parameters, of_batches = list(module.parameters()), []
        for micro_batch, digits in zip(images, labels, strict=True):
            errors = module(torch.from_numpy(micro_batch)) - torch.from_numpy(_one_hot(digits)).float()
            loss = errors.square().sum() / 2
            of_batches.append((*torch.autograd.grad(loss, parameters), loss.detach().reshape(1)))
        return tuple(torch.stack(each) for each in zip(*of_batches, strict=True))

    def update(self, gradients: Sequence[Mirrored]) -> None:
        """Applies the mean gradient of each parameter to every copy, by PyTorch's optimizer."""
        self._strategy.run(self._update_replica, args=(self._replicas, *gradients))

    def _update_replica(self, replica: Any, *gradients: Any) -> None:
        module, optimizer = replica
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()

    def accuracy(self, images: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
        """Returns the share of images recognised."""
        module, _ = self._replicas.values[0]
        with self._torch.no_grad():
            scores = module(self._torch.from_numpy(images)).numpy()
        return float(np.mean(scores.argmax(axis=1) == labels))

    def parameters(self) -> list[list[NDArray[np.float32]]]:
        """Returns the parameters of each replica."""
        return [
            [parameter.detach().numpy() for parameter in module.parameters()]
            for module, _ in self._replicas.values
        ]


NETWORKS: dict[str, Callable[..., Network]] = {"numpy": NumpyNetwork, "torch": TorchNetwork}


def initial_parameters(seed: int) -> Arrays:
    """Returns the same start for every network, on any processor."""
    generator = np.random.default_rng(seed)
    return {
        "w1": ((generator.random((64, NUM_HIDDEN)) - 0.5) / 4.0).astype(np.float32),
        "b1": np.zeros(NUM_HIDDEN, np.float32),
        "w2": ((generator.random((NUM_HIDDEN, NUM_DIGITS)) - 0.5) / 4.0).astype(np.float32),
        "b2": np.zeros(NUM_DIGITS, np.float32),
    }


def digest(arrays: Sequence[NDArray[Any]]) -> str:
    """Returns the SHA-256 of the elements of all arrays."""
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


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
