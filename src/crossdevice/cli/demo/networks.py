"""The demo's network (64 inputs, one hidden layer, 10 digits) and its optimizer, in NumPy and in PyTorch.

Devices compute gradients of whole micro-batches; their number in a step does not depend on the devices.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from crossdevice.strategies.mirrored import MirroredStrategy
from crossdevice.values.distributed import Mirrored

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
