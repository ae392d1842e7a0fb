"""A model soup: averages saved models of several trainings without loading them."""

import tempfile
from pathlib import Path

import numpy as np

import crossdevice as cd

generator = np.random.default_rng(0)
truth = generator.normal(size=(8, 3)).astype(np.float32)


def examples(number):
    inputs = generator.normal(size=(number, 8)).astype(np.float32)
    scores = inputs @ truth + generator.normal(size=(number, 3)).astype(np.float32)
    return inputs, scores.argmax(axis=1)


def trained(start, rate, num_steps=40):
    """Softmax regression, with batches of its own."""
    weights = start.copy()
    for _ in range(num_steps):
        inputs, labels = examples(24)
        scores = np.exp(inputs @ weights)
        error = (
            scores / scores.sum(axis=1, keepdims=True)
            - np.eye(3, dtype=np.float32)[labels]
        )
        weights -= np.float32(rate / 24) * (inputs.T @ error)
    return {"weights": weights, "steps": np.int64(num_steps)}


def accuracy(model):
    inputs, labels = test_set
    return float(((inputs @ model["weights"]).argmax(axis=1) == labels).mean())


test_set = examples(4000)
start = trained(np.zeros((8, 3), np.float32), rate=0.5)["weights"]
with tempfile.TemporaryDirectory() as folder:
    paths, weights = [], []
    for rate in (0.5, 1.0, 2.0, 4.0):
        model = trained(start, rate)
        paths.append(
            Path(folder) / f"rate_{rate}.npz"
        )  # .safetensors, sharded or not, and .pt work alike
        np.savez(paths[-1], **model)
        weights.append(accuracy(model))
        print(f"learning rate {rate}: accuracy {weights[-1]:.2f}")
    soup = Path(folder) / "soup.npz"
    cd.average_files(
        paths, soup, weights
    )  # the same: crossdevice average rate_*.npz -o soup.npz --weights ...
    model = dict(np.load(soup))
print(
    f"their mean, by accuracy: {accuracy(model):.2f} after {model['steps']} steps each"
)
