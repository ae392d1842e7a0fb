"""Federated averaging: each client's model is weighted by its number of examples."""

import random

import numpy as np

import crossdevice as cd

generator = np.random.default_rng(0)
truth = {"weights": np.float32([1.0, -2.0, 3.0]), "bias": np.float32(0.5)}
EXAMPLES = (20, 50, 35, 80, 10)
"""How many each client has."""


def trained_by_client(model, num_examples):
    """A few steps of gradient descent on examples that only this client has."""
    inputs = generator.normal(size=(num_examples, 3)).astype(np.float32)
    noise = generator.normal(size=num_examples).astype(np.float32)
    targets = inputs @ truth["weights"] + truth["bias"] + noise
    model = {name: array.copy() for name, array in model.items()}
    for _ in range(5):
        error = inputs @ model["weights"] + model["bias"] - targets
        model["weights"] -= np.float32(0.1) * (inputs.T @ error) / num_examples
        model["bias"] -= np.float32(0.1) * error.mean(dtype=np.float32)
    return model


def averaged(answers):
    """Uses the memory of one model, however many clients answer, in any order."""
    total = cd.Accumulator("exact")
    for model, num_examples in answers:
        total.add(model, weight=num_examples)
    return total.mean()


model = {"weights": np.zeros(3, np.float32), "bias": np.zeros((), np.float32)}
for turn in range(20):
    answers = [
        (trained_by_client(model, num_examples), num_examples)
        for num_examples in EXAMPLES
    ]
    model = averaged(answers)
    shuffled = averaged(random.sample(answers, len(answers)))
    assert all(model[name].tobytes() == shuffled[name].tobytes() for name in model), (
        "the order mattered"
    )
    if turn % 5 == 4:
        distance = np.abs(model["weights"] - truth["weights"]).max()
        print(f"after {turn + 1} turns: largest error of a weight {distance:.3f}")
