"""The demo's network (64 inputs, one hidden layer, 10 digits) and its optimizer, in NumPy and in PyTorch.

Both train as replicas of a strategy. A replica's loss is divided by the size of the whole batch and
gradients are summed, so that shares of a batch may differ in size without changing what is learned.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from crossdevice.strategies.current import get_replica_context
from crossdevice.strategies.mirrored import MirroredStrategy
from crossdevice.values.distributed import Mirrored

Arrays = dict[str, NDArray[np.float32]]

NUM_HIDDEN = 64
LEARNING_RATE = 0.2
MOMENTUM = 0.9


class Network(Protocol):
    """A network on several devices, as the demo needs it."""

    def train(self, images: Any, labels: Any, batch_size: int) -> float:
        """One step on a distributed batch; returns the batch's mean loss."""

    def accuracy(self, images: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
        """The share of images whose digit the first replica recognises."""

    def digests(self) -> list[str]:
        """A fingerprint of each replica's parameters."""


class NumpyNetwork:
    """Forward and backward pass by hand, on arrays that live on logical devices."""

    def __init__(self, strategy: MirroredStrategy, initial: Arrays) -> None:
        self._strategy = strategy
        devices = strategy.extended.worker_devices
        copies = [{name: array.copy() for name, array in initial.items()} for _ in devices]
        still = [{name: np.zeros_like(array) for name, array in initial.items()} for _ in devices]
        self._parameters = Mirrored.of(tuple(copies), devices)
        self._velocities = Mirrored.of(tuple(still), devices)

    def train(self, images: Any, labels: Any, batch_size: int) -> float:
        """One step: every replica on its share, gradients summed, every copy updated alike."""
        arguments = (self._parameters, self._velocities, images, labels, batch_size)
        losses = self._strategy.run(_numpy_step, args=arguments)
        return float(self._strategy.experimental_local_results(losses)[0])

    def accuracy(self, images: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
        """The share of images recognised."""
        _, scores = _forward(self._parameters.values[0], images)
        return float(np.mean(scores.argmax(axis=1) == labels))

    def digests(self) -> list[str]:
        """SHA-256 of each replica's parameters."""
        return [_digest(list(parameters.values())) for parameters in self._parameters.values]


def _numpy_step(parameters: Arrays, velocities: Arrays, images: Any, labels: Any, batch_size: int) -> Any:
    hidden, scores = _forward(parameters, images)
    scores -= scores.max(axis=1, keepdims=True, initial=0.0)
    exponentials = np.exp(scores)
    probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    loss = -np.log(probabilities[rows, labels]).sum(dtype=np.float32) / np.float32(batch_size)
    probabilities[rows, labels] -= 1.0
    of_scores = probabilities / np.float32(batch_size)
    of_hidden = (of_scores @ parameters["w2"].T) * (1.0 - hidden**2)
    gradients = {
        "w1": images.T @ of_hidden,
        "b1": of_hidden.sum(axis=0),
        "w2": hidden.T @ of_scores,
        "b2": of_scores.sum(axis=0),
    }
    context = get_replica_context()
    assert context is not None, "steps run as replicas"
    total, mean_loss = context.all_reduce("sum", (gradients, np.float32(loss)))
    for name, gradient in total.items():
        velocities[name] *= np.float32(MOMENTUM)
        velocities[name] -= np.float32(LEARNING_RATE) * gradient
        parameters[name] += velocities[name]
    return mean_loss


def _forward(parameters: Arrays, images: NDArray[np.float32]) -> tuple[Any, Any]:
    hidden = np.tanh(images @ parameters["w1"] + parameters["b1"])
    return hidden, hidden @ parameters["w2"] + parameters["b2"]


class TorchNetwork:
    """The same network as a mirrored PyTorch module."""

    def __init__(self, strategy: MirroredStrategy, initial: Arrays) -> None:
        torch = self._torch = importlib.import_module("torch")
        integration = importlib.import_module("crossdevice.integrations.torch")
        nn = torch.nn
        module = nn.Sequential(nn.Linear(64, NUM_HIDDEN), nn.Tanh(), nn.Linear(NUM_HIDDEN, 10))
        with torch.no_grad():
            for parameter, name in zip(module.parameters(), ("w1", "b1", "w2", "b2"), strict=True):
                parameter.copy_(torch.from_numpy(initial[name].T))
        self._strategy = strategy
        self._model = integration.MirroredModule(module, strategy)
        self._optimizers = self._model.optimizers(
            lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)
        )

    def train(self, images: Any, labels: Any, batch_size: int) -> float:
        """One step: backward pass and optimizer run as replicas too."""
        losses = self._strategy.run(self._step, args=(images, labels, self._optimizers, batch_size))
        return float(self._strategy.reduce("sum", losses, axis=None))

    def _step(self, images: Any, labels: Any, optimizer: Any, batch_size: int) -> Any:
        torch = self._torch
        optimizer.zero_grad()
        scores = self._model(torch.from_numpy(images))
        entropy = torch.nn.functional.cross_entropy(scores, torch.from_numpy(labels), reduction="sum")
        loss = entropy / batch_size
        loss.backward()
        self._model.reduce_gradients("sum")
        optimizer.step()
        return loss.detach()

    def accuracy(self, images: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
        """The share of images recognised."""
        with self._torch.no_grad():
            scores = self._model(self._torch.from_numpy(images)).numpy()
        return float(np.mean(scores.argmax(axis=1) == labels))

    def digests(self) -> list[str]:
        """SHA-256 of each replica's parameters."""
        return [
            _digest([parameter.detach().numpy() for parameter in replica.parameters()])
            for replica in self._model.replicas
        ]


NETWORKS: dict[str, Callable[..., Network]] = {"numpy": NumpyNetwork, "torch": TorchNetwork}


def initial_parameters(seed: int) -> Arrays:
    """The same start for every network."""
    generator = np.random.default_rng(seed)
    return {
        "w1": (generator.normal(size=(64, NUM_HIDDEN)) / 8.0).astype(np.float32),
        "b1": np.zeros(NUM_HIDDEN, np.float32),
        "w2": (generator.normal(size=(NUM_HIDDEN, 10)) / 8.0).astype(np.float32),
        "b2": np.zeros(10, np.float32),
    }


def _digest(arrays: list[NDArray[Any]]) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
