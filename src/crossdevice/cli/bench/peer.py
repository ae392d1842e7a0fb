"""The inside of a peer's process: connects to the benchmark and does what it is told, message by message.

    python -m crossdevice.cli.bench.peer NAME PORT NUM_DEVICES NUM_PROCESSES RANK FOLDER

Messages are lines of JSON. The other side is `process`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

from crossdevice.cli.bench import data
from crossdevice.cli.bench.calls import Competitor, Measurable
from crossdevice.cli.bench.peers import Seat, peer_class
from crossdevice.cli.bench.ranks import Rank
from crossdevice.cli.bench.workload import UnsupportedWorkError, Workload

TOKEN_VARIABLE = "CROSSDEVICE_BENCH_TOKEN"
"""What a peer says first, so that no other process is taken for it."""

Message = dict[str, Any]


def main(arguments: list[str]) -> int:
    """Serves until the benchmark hangs up."""
    name, port, num_devices, num_processes, rank, folder = arguments
    seat = Seat(int(num_devices), int(num_processes), int(rank), folder)
    competitor: Competitor = peer_class(name)(seat)
    with socket.create_connection(("127.0.0.1", int(port))) as connection:
        stream = connection.makefile("rw", encoding="utf-8", newline="\n")

        def send(message: Message) -> None:
            stream.write(json.dumps(message) + "\n")
            stream.flush()

        send({"token": os.environ.get(TOKEN_VARIABLE)})
        desk = _Desk(competitor)
        for line in stream:
            send(desk.answer_to(json.loads(line)))
    competitor.close()
    return 0


class _Desk:
    """Answers messages; holds what is ready between them."""

    def __init__(self, competitor: Competitor) -> None:
        self._competitor = competitor
        self._ready: Measurable | None = None

    def answer_to(self, message: Message) -> Message:
        if "work" in message:
            return self._get_ready(Workload.from_message(message["work"]))
        assert self._ready is not None, "told to run before being told what"
        if "repeats" in message:
            return {"seconds": self._ready.turn(message["place"], message["repeats"])}
        return self._ready.inspect(message["place"], counts_wrong=message["counts_wrong"])._asdict()

    def _get_ready(self, work: Workload) -> Message:
        self._ready = None  # lets go of the last work's arrays first
        if isinstance(self._competitor, Rank):
            inputs = [data.replica_arrays(work, replica) for replica in self._competitor.replicas(work)]
        else:
            inputs = data.all_arrays(work)
        try:
            self._ready = self._competitor.ready(work, inputs)
        except UnsupportedWorkError as error:
            return {"unsupported": str(error)}
        return {"places": self._ready.places}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
