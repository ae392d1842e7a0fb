"""The inside of a peer's process: connects to the benchmark and does what it is told, message by message.

    python -m crossdevice.cli.bench.peer NAME PORT NUM_DEVICES NUM_PROCESSES RANK FOLDER

A message is the name of a method and its arguments, by position and by name. The other side is `process`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from multiprocessing.connection import Client

from crossdevice.cli.bench import data
from crossdevice.cli.bench.calls import Competitor, Measurable
from crossdevice.cli.bench.peers import PeerSetup, peer_class
from crossdevice.cli.bench.workload import UnsupportedWorkError

TOKEN_VARIABLE = "CROSSDEVICE_BENCH_TOKEN"
"""What a peer says first, so that no other process is taken for it."""


def main(arguments: list[str]) -> int:
    """Serves until the benchmark hangs up."""
    name, port, num_devices, num_processes, rank, folder = arguments
    setup = PeerSetup(int(num_devices), int(num_processes), int(rank), folder)
    competitor: Competitor = peer_class(name)(setup)
    ready: Measurable | None = None
    with Client(("127.0.0.1", int(port))) as connection, contextlib.suppress(EOFError):
        connection.send_bytes(os.environ.get(TOKEN_VARIABLE, "").encode())
        while True:
            method, given, named = connection.recv()
            if method == "ready":
                ready = None  # lets go of the last work's arrays first
                (work,) = given
                inputs = [data.replica_arrays(work, replica) for replica in competitor.replicas(work)]
                try:
                    ready = competitor.ready(work, inputs)
                    connection.send(ready.places)
                except UnsupportedWorkError as error:
                    connection.send(error)
            else:
                connection.send(getattr(ready, method)(*given, **named))
    competitor.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
