"""A peer that runs in processes of its own, from both sides: the benchmark, and the inside of a process.

The benchmark starts them, and hands them work and turns one at a time. A message is the name of a method and
its arguments, by position and by name. As a program this file is the other side:

    python -m crossdevice.cli.bench.process NAME PORT NUM_DEVICES NUM_PROCESSES RANK FOLDER
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from crossdevice import runtime
from crossdevice.cli.bench import data
from crossdevice.cli.bench.measure import Competitor, Inspection, Measurable
from crossdevice.cli.bench.peers import PEERS, PeerSetup, Runs, launcher, peer_class
from crossdevice.cli.bench.workload import ResultPlace, UnsupportedWorkError, Workload
from crossdevice.errors import CrossDeviceError

TOKEN_VARIABLE = "CROSSDEVICE_BENCH_TOKEN"
"""The first message of a peer, so that no other process is taken for it."""

START_SECONDS = 120.0
ANSWER_SECONDS = 600.0


class PeerProcessError(CrossDeviceError, RuntimeError):
    """A peer's process that did not start, ended or went silent."""


class PeerProcesses(Competitor):
    """One peer's processes; between its turns they sleep, waiting for the next message.

    Args:
        name: that of a peer of the table, or the `module:class` of another one, for which also
        runs: says how it is run, and
        num_processes: in how many processes; otherwise there is one for each device.
    """

    def __init__(
        self, name: str, num_devices: int, *, runs: Runs | None = None, num_processes: int | None = None
    ) -> None:
        self.name = name
        self._runs = runs or PEERS[name].runs
        self._num_processes = num_processes or (1 if self._runs == "process" else num_devices)
        self._folder = tempfile.mkdtemp(prefix="crossdevice-bench-")
        self._complaints = Path(self._folder) / "stderr"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        try:
            self._start(num_devices)
        except BaseException:
            self.close()
            raise

    def ready(self, work: Workload, inputs: Sequence[data.Arrays]) -> PeerProcesses:  # noqa: ARG002
        """Prepares calls; the processes make the same inputs themselves."""
        answers = self._ask("ready", work)
        for answer in answers:
            if isinstance(answer, UnsupportedWorkError):
                raise answer
        self.places: tuple[ResultPlace, ...] = answers[0]
        return self

    def turn(self, place: ResultPlace, repeats: int) -> float:
        """Seconds per call as the slowest process measured them."""
        return float(max(self._ask("turn", place, repeats)))

    def inspect(self, place: ResultPlace, *, counts_wrong: bool) -> Inspection:
        """Has each process inspect its own results."""
        answers: list[Inspection] = self._ask("inspect", place, counts_wrong=counts_wrong)
        if len(answers) == 1:
            return answers[0]
        return Inspection("own", sum(answer.wrong or 0 for answer in answers) if counts_wrong else None)

    def close(self) -> None:
        """Hangs up, which ends the processes; kills those that remain."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
        self._connections, self._processes = [], []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, num_devices: int) -> None:
        runs, num_processes = self._runs, self._num_processes
        token = secrets.token_hex()
        environment = runtime.environment_of_child(**MPI_ENVIRONMENT, **{TOKEN_VARIABLE: token})
        with socket.create_server(("127.0.0.1", 0)) as server, open(self._complaints, "wb") as complaints:
            server.settimeout(0.2)
            port = server.getsockname()[1]
            for rank in range(1 if runs == "mpirun" else num_processes):
                given = (self.name, port, num_devices, num_processes, rank, self._folder)
                command = [sys.executable, "-m", "crossdevice.cli.bench.process", *map(str, given)]
                if runs == "mpirun":
                    command = [str(launcher()), "-n", str(num_processes), *command]
                process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=complaints, stderr=complaints
                )
                self._processes.append(process)
            self._connections = self._accept(server, num_processes, token)

    def _accept(self, server: socket.socket, number: int, token: str) -> list[Connection]:
        deadline = time.monotonic() + START_SECONDS
        connections: list[Connection] = []
        while len(connections) < number:
            try:
                accepted, _ = server.accept()
            except TimeoutError:
                if any(process.poll() is not None for process in self._processes):
                    raise PeerProcessError(f"{self.name} did not start: {self._last_words()}") from None
                if time.monotonic() > deadline:
                    raise PeerProcessError(
                        f"{self.name} did not start within {START_SECONDS:g} s: {self._last_words()}"
                    ) from None
                continue
            accepted.setblocking(True)
            connection = Connection(accepted.detach())
            if connection.poll(START_SECONDS) and connection.recv_bytes() == token.encode():
                connections.append(connection)
        return connections

    def _ask(self, method: str, *given: Any, **named: Any) -> list[Any]:
        """Tells all processes the same and waits for all of them."""
        try:
            for connection in self._connections:
                connection.send((method, given, named))
            for connection in self._connections:
                if not connection.poll(ANSWER_SECONDS):
                    raise PeerProcessError(f"{self.name} does not answer: {self._last_words()}")
            return [connection.recv() for connection in self._connections]
        except (EOFError, OSError) as error:
            raise PeerProcessError(f"{self.name} ended: {self._last_words()}") from error

    def _last_words(self) -> str:
        lines = self._complaints.read_text(errors="replace").split("\n") if self._complaints.exists() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


MPI_ENVIRONMENT = {
    # More ranks than cores are allowed (Open MPI 4, then 5), and then yield to each other while they wait.
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # In containers one often is root.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


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
