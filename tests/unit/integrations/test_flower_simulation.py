"""Flower's own simulation, clients in processes of their own: what comes back is the true weighted mean."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from conformance.oracle import rounded

pytest.importorskip("flwr", reason="flwr is not installed")
pytest.importorskip("ray", reason="ray, on which Flower simulates clients, is not installed")

from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation

from crossdevice.integrations.flower import FedAvg, arrays_of, record_of

pytestmark = pytest.mark.more("Flower")

EXAMPLES = [20, 50, 35, 80]
"""Of each client."""

INITIAL = {
    "weight": np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3),
    "brain": np.linspace(-3, 3, 33).astype(ml_dtypes.bfloat16),
    "steps": np.zeros(1, np.int64),
}


def true_model(arrays, num_rounds, trained):
    """What clients that never round a mean but once arrive at."""
    for _ in range(num_rounds):
        models = [trained(arrays, client) for client in range(len(EXAMPLES))]
        arrays = {
            name: np.array(
                [
                    rounded(
                        sum(n * Fraction(x) for n, x in zip(EXAMPLES, column, strict=True)) / sum(EXAMPLES),
                        array.dtype.name,
                    )
                    for column in zip(*(np.ravel(model[name]).tolist() for model in models), strict=True)
                ]
            ).astype(array.dtype)
            if array.dtype.kind != "i"
            else array + 1
            for name, array in ((name, np.ravel(array)) for name, array in arrays.items())
        }
    return arrays


@pytest.mark.filterwarnings("ignore")  # of Flower and Ray
@pytest.mark.timeout(240)
def test_a_simulation_of_flower_arrives_at_the_true_mean(monkeypatch):
    for name in ("FLWR_TELEMETRY_ENABLED", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, "0")
    examples, client, server, results = EXAMPLES, ClientApp(), ServerApp(), []

    def trained(arrays, number):
        random = np.random.default_rng([number, int(arrays["steps"][0])])
        return {
            name: array + 1
            if array.dtype.kind == "i"
            else (array + random.standard_normal(array.size).reshape(array.shape)).astype(array.dtype)
            for name, array in arrays.items()
        }

    @client.train()
    def train(message, context):
        number = context.node_config["partition-id"]
        arrays = trained(arrays_of(message.content["arrays"]), number)
        metrics = MetricRecord({"num-examples": examples[number]})
        return Message(RecordDict({"arrays": record_of(arrays), "metrics": metrics}), reply_to=message)

    @server.main()
    def main(grid, context):
        # Flower counts nodes before it has waited for all: a fraction of them may be fewer.
        everyone = len(examples)
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=everyone, min_available_nodes=everyone)
        results.append(strategy.start(grid, record_of(INITIAL), num_rounds=2))

    run_simulation(
        server,
        client,
        len(examples),
        backend_config={"init_args": {"include_dashboard": False, "num_cpus": 2}},
    )
    (result,) = results
    right = true_model(INITIAL, 2, trained)
    found = arrays_of(result.arrays)
    assert found.keys() == right.keys()
    for name, array in found.items():
        assert array.shape == INITIAL[name].shape
        assert array.tobytes() == right[name].tobytes(), name
