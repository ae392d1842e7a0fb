"""The inside of a peer's process: connects to the benchmark and does what it is told, message by message.

    python -m crossdevice.cli.bench.peer NAME PORT NUM_DEVICES NUM_PROCESSES RANK FOLDER

A message is the name of a method and its arguments, by position and by name. The other side is `process`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from multiprocessing.connection import Client
from typing import Any

from crossdevice.cli.bench import data
from crossdevice.cli.bench.calls import Competitor, Measurable
from crossdevice.cli.bench.peers import PeerSetup, peer_class
from crossdevice.cli.bench.workload import UnsupportedWorkError, Workload

TOKEN_VARIABLE = "CROSSDEVICE_BENCH_TOKEN"
"""What a peer says first, so that no other process is taken for it."""


def main(arguments: list[str]) -> int:
    """Serves until the benchmark hangs up."""
    name, port, num_devices, num_processes, rank, folder = arguments
    competitor: Competitor = peer_class(name)(
        PeerSetup(int(num_devices), int(num_processes), int(rank), folder)
    )
    ready: Measurable | None = None
    with Client(("127.0.0.1", int(port))) as connection, contextlib.suppress(EOFError):
        connection.send_bytes(os.environ.get(TOKEN_VARIABLE, "").encode())
        while True:
            method, given, named = connection.recv()
            if method == "ready":
                ready = None  # lets go of the last work's arrays first
                ready, answer = _ready(competitor, *given)
            else:
                assert ready is not None, "told to run before being told what"
                answer = getattr(ready, method)(*given, **named)
            connection.send(answer)
    competitor.close()
    return 0


def _ready(competitor: Competitor, work: Workload) -> tuple[Measurable | None, Any]:
    """What is ready, and the places of its results; or why there are none."""
    inputs = [data.replica_arrays(work, replica) for replica in competitor.replicas(work)]
    try:
        ready = competitor.ready(work, inputs)
    except UnsupportedWorkError as error:
        return None, error
    return ready, ready.places


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
