"""A federated server of its own process: it aggregates ten models of ResNet-50's size whenever it is told to.

    python benchmarks/flower_server.py KIND SCALE

Each line it reads is a round; it answers with wall seconds, CPU seconds and page faults. Kinds: `aggregate`
(Flower's function on arrays fresh from bytes), `reduce` (ours on the same), `train` (the whole
`aggregate_train` of Flower's FedAvg, from messages to a record) and `exact`, `accurate` (that of ours).
crossdevice is imported by our kinds only.
"""

from __future__ import annotations

import logging
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from resnet50 import gradient_shapes

NUM_CLIENTS = 10


class Times(NamedTuple):
    """Of one call, as it was measured where it was made."""

    wall: float
    cpu: float
    page_faults: float


class Server:
    """A process that makes a call whenever it is told to."""

    def __init__(self, kind: str, scale: int) -> None:
        self.rounds: list[Times] = []
        self._process = subprocess.Popen(
            [sys.executable, __file__, kind, str(scale)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self) -> Times:
        """One round."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self.rounds.append(Times(*map(float, self._process.stdout.readline().split())))
        return self.rounds[-1]

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


def models(scale: int) -> Iterator[tuple[list[Any], int]]:
    """Clients' arrays and numbers of examples."""
    random = np.random.default_rng(1)
    for number in random.integers(10, 900, NUM_CLIENTS):
        shapes = gradient_shapes()[:: max(scale // 4, 1)]
        yield [random.standard_normal(shape, np.float32) for shape in shapes], int(number)


def call_of(kind: str, scale: int) -> Callable[[], Any]:
    """What the server does in a round."""
    if kind in ("aggregate", "reduce"):
        from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays

        clients = [(ndarrays_to_parameters(arrays), number) for arrays, number in models(scale)]
        results = [(parameters_to_ndarrays(parameters), number) for parameters, number in clients]
        if kind == "aggregate":
            from flwr.server.strategy.aggregate import aggregate

            return lambda: aggregate(results)
        import crossdevice as cd

        arrays, weights = zip(*results, strict=True)
        return lambda: cd.reduce(list(arrays), "mean", weights=list(weights))
    replies = [reply_of(arrays, number) for arrays, number in models(scale)]
    if kind == "train":
        from flwr.serverapp.strategy import FedAvg

        return lambda: FedAvg().aggregate_train(2, replies)
    from crossdevice.integrations import flower

    return lambda: flower.FedAvg(precision=kind).aggregate_train(2, replies)


def reply_of(arrays: list[Any], number: int) -> Any:
    """What a client answers."""
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_node_id", "_task_id"):  # Flower sets them when it starts a ServerApp
        setattr(TaskIdentity, name, 1)
    logging.disable(logging.CRITICAL)
    record = ArrayRecord({str(place): Array(array) for place, array in enumerate(arrays)})
    content = RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": number})})
    return Message(content, reply_to=Message(RecordDict(), dst_node_id=1, message_type="train"))


def page_faults() -> int:
    """Of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def main() -> None:
    call = call_of(sys.argv[1], int(sys.argv[2]))
    for _ in sys.stdin:
        faults, cpu, wall = page_faults(), time.process_time(), time.perf_counter()
        result = call()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        del result
        print(wall, cpu, page_faults() - faults, flush=True)


if __name__ == "__main__":
    main()
