"""The inside of a peer's process: connects to the benchmark and does what it is told, message by message.

    python -m crossdevice.cli.bench.peer NAME PORT NUM_DEVICES NUM_PROCESSES RANK FOLDER

A message is the name of a method and its arguments. The other side is `process`.
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
from crossdevice.cli.bench.ranks import Rank
from crossdevice.cli.bench.workload import UnsupportedWorkError, Workload

TOKEN_VARIABLE = "CROSSDEVICE_BENCH_TOKEN"
"""What a peer says first, so that no other process is taken for it."""


def main(arguments: list[str]) -> int:
    """Serves until the benchmark hangs up."""
    name, port, num_devices, num_processes, rank, folder = arguments
    competitor: Competitor = peer_class(name)(
        PeerSetup(int(num_devices), int(num_processes), int(rank), folder)
    )
    with Client(("127.0.0.1", int(port))) as connection, contextlib.suppress(EOFError):
        connection.send_bytes(os.environ.get(TOKEN_VARIABLE, "").encode())
        desk = _Desk(competitor)
        while True:
            method, *given = connection.recv()
            connection.send(getattr(desk, method)(*given))
    competitor.close()
    return 0


class _Desk:
    """Answers messages; holds what is ready between them."""

    def __init__(self, competitor: Competitor) -> None:
        self._competitor = competitor
        self._ready: Measurable | None = None

    def ready(self, work: Workload) -> Any:
        """The places of results, or why there are none."""
        self._ready = None  # lets go of the last work's arrays first
        if isinstance(self._competitor, Rank):
            inputs = [data.replica_arrays(work, replica) for replica in self._competitor.replicas(work)]
        else:
            inputs = data.all_arrays(work)
        try:
            self._ready = self._competitor.ready(work, inputs)
        except UnsupportedWorkError as error:
            return error
        return self._ready.places

    def turn(self, *given: Any) -> Any:
        assert self._ready is not None, "told to run before being told what"
        return self._ready.turn(*given)

    def inspect(self, place: Any, counts_wrong: bool) -> Any:
        assert self._ready is not None, "told to look before being told at what"
        return self._ready.inspect(place, counts_wrong=counts_wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
