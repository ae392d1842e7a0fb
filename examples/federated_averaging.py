"""Federated averaging: clients train apart, then their models are averaged as whole trees."""

import numpy as np

import crossdevice as cd

generator = np.random.default_rng(0)
truth = {"weights": np.float32([1.0, -2.0, 3.0]), "bias": np.float32(0.5)}


def trained_by_client(model, num_examples):
    """A few steps of gradient descent on examples that only this client has."""
    inputs = generator.normal(size=(num_examples, 3)).astype(np.float32)
    targets = inputs @ truth["weights"] + truth["bias"]
    model = {name: array.copy() for name, array in model.items()}
    for _ in range(5):
        error = inputs @ model["weights"] + model["bias"] - targets
        model["weights"] -= np.float32(0.1) * (inputs.T @ error) / num_examples
        model["bias"] -= np.float32(0.1) * error.mean(dtype=np.float32)
    return model


exact = cd.CommunicationOptions(precision="exact")  # the same bits, in whichever order clients answer
model = {"weights": np.zeros(3, np.float32), "bias": np.zeros((), np.float32)}
for turn in range(20):
    clients = [trained_by_client(model, num_examples) for num_examples in (20, 50, 35, 80, 10)]
    model = cd.reduce(clients, "mean", options=exact)
    backwards = cd.reduce(clients[::-1], "mean", options=exact)
    assert all(model[name].tobytes() == backwards[name].tobytes() for name in model)
    if turn % 5 == 4:
        distance = np.abs(model["weights"] - truth["weights"]).max()
        print(f"after {turn + 1} turns: largest error of a weight {distance:.4f}")
