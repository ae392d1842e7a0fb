"""Starts ranks as processes, ends all of them after a hard deadline, and finds those that are left."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import itertools
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest

import crossdevice
from multiprocess.rank_server import ForkedRank, RankServer

HERE = Path(__file__).parent
PACKAGE_PARENT = Path(crossdevice.__file__).parents[1]
FOLDER = "CROSSDEVICE_TEST_FOLDER"
MARK = "CROSSDEVICE_TEST_LAUNCH"
"""An environment variable by which every process of a launch is known, whoever has started it."""

TRAINING = (
    *("backend_rank.py", "exact_fsdp_rank.py", "fsdp_rank.py", "hook_groups_rank.py", "hook_rank.py"),
    *("training_rank.py", "workers_rank.py"),
)
"""Scripts whose ranks make a DistributedDataParallel or a mesh, which import the compiler of PyTorch."""

PORTS = range(20_000, 30_000)
"""Below those of Linux, which begin at 32768."""

ENDING_SECONDS = 60.0
LOST_SECONDS = 120.0
"""Survivors know of a death after this long at most, beside others that compute; deadlines are twice that."""


class Outcome(NamedTuple):
    """How a launch ended: its exit codes, what each rank has reported, and everything that was printed."""

    codes: list[int]
    reports: dict[int, Any]
    output: str
    left: list[int]


def report(rank: int, facts: Any) -> None:
    """Called by a rank: what the test wants to know from it."""
    path = Path(os.environ[FOLDER]) / f"rank {rank}.json"
    path.with_suffix(".part").write_text(json.dumps(facts))
    path.with_suffix(".part").rename(path)


def launch(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]],
    folder: Path,
    seconds: float,
    during: Callable[[Path], None] = lambda _: None,
) -> Outcome:
    """Runs commands, each with further variables, side by side until all have ended.

    Args:
        during: called with the folder once all have been started.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark = secrets.token_hex()
    output = folder / "output"
    processes: list[subprocess.Popen[bytes] | ForkedRank] = []
    end = time.monotonic() + seconds
    try:
        with open(output, "wb") as stream:
            for command, variables in commands:
                environment = {**_environment(), **variables, MARK: mark, FOLDER: str(folder)}
                # Open MPI does not remove the segment of a process that no launcher has started.
                environment["OMPI_MCA_btl_sm_backing_directory"] = tempfile.gettempdir()
                if command[0] == sys.executable and command[1].endswith("_rank.py"):
                    is_light = "local" in command and "laws_rank" not in command[1]  # laws import PyTorch
                    server = _rank_server("local" if is_light else "torch")
                    early = ("torch._dynamo",) if Path(command[1]).name in TRAINING else ()
                    processes.append(server.fork(command[1:], environment, str(output), early))
                else:
                    processes.append(_started(command, environment, stream))
            during(folder)
            for process in processes:
                process.wait(max(end - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        raise AssertionError(f"not done after {seconds:g} s; printed so far: {output.read_text()}") from None
    finally:
        left = _still_there(mark, {process.pid for process in processes})
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        for process in processes:
            process.wait()
    reports = {int(path.stem.split()[1]): json.loads(path.read_text()) for path in folder.glob("rank *.json")}
    return Outcome([process.returncode for process in processes], reports, output.read_text(), left)


def _rank_server(engine: str) -> RankServer:
    with _forming:  # launches of one test may be side by side
        return _formed_server(engine)


@functools.cache
def _formed_server(engine: str) -> RankServer:
    return RankServer(engine, _environment())


_forming = threading.Lock()


def _started(
    command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
    )


class Scenarios:
    """Forked processes that run a script, each with a scenario's name; what each has printed last is JSON."""

    def __init__(self, script: str, named: Mapping[str, Sequence[str]], folder: Path) -> None:
        self._outputs = {name: folder / name for name in named}
        self._running: dict[str, ForkedRank] = {}
        for name, words in named.items():
            self._outputs[name].touch()
            # In "kills" steps are compiled, if they can be; elsewhere they are in Python.
            variables = {} if name == "kills" else {"CROSSDEVICE_KERNELS": "numpy"}
            # Both import PyTorch.
            server = _rank_server("torch" if name in ("peers", "staged") else "local")
            self._running[name] = server.fork(
                [str(HERE / script), name, *words], {**_environment(), **variables}, str(self._outputs[name])
            )

    def __call__(self, name: str) -> Any:
        """Waits until a scenario has ended, and returns what it has found."""
        self._running[name].wait(800)
        printed = self._outputs[name].read_text()
        assert self._running[name].returncode == 0, printed
        return json.loads(printed.splitlines()[-1])

    def left_by(self, name: str) -> list[int]:
        """Lists the processes that a scenario has left."""
        return _processes_of(None, {self._running[name].pid})

    def end(self) -> None:
        """Ends all that run; another worker of pytest-xdist may have asked for their results."""
        for process in self._running.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the ranks it has forked
            process.wait()


@contextmanager
def scenarios(script: str, named: Mapping[str, Sequence[str]]) -> Iterator[Scenarios]:
    """Starts a script beside this file for each scenario, with its words."""
    with tempfile.TemporaryDirectory() as folder:
        started = Scenarios(script, named, Path(folder))
        try:
            yield started
        finally:
            started.end()


def check_survivors(kills: Mapping[str, Any], number: str) -> None:
    """All but the rank that was killed, in so many groups, have named it, and soon."""
    assert len(kills["trials"]) == int(number)
    for odd, results in kills["trials"]:
        assert results.pop(odd) is None
        for facts in results:
            assert facts["error"] == "ProcessGroupError", (kills["seed"], facts)
            assert facts["members"][odd] in facts["text"]
            assert facts["seconds"] < LOST_SECONDS


def ranks(script: str, *arguments: str, size: int) -> list[tuple[list[str], dict[str, str]]]:
    """Processes that know each other from RANK and WORLD_SIZE, so that nobody ends one with another.

    They are forked from one that has imported what their engine needs, so that they start at once.
    """
    port = str(free_port())
    return [
        (
            [sys.executable, str(HERE / script), *arguments],
            {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        )
        for rank in range(size)
    ]


def torchrun(script: str, *arguments: str, size: int) -> list[tuple[list[str], dict[str, str]]]:
    """Ranks under torchrun, which picks a port itself."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    return [([*command, _path(script), *arguments], {})]


def crossdevice_run(script: str, *arguments: str, size: int) -> list[tuple[list[str], dict[str, str]]]:
    """Ranks under our own launcher."""
    command = [sys.executable, "-m", "crossdevice", "run", "-n", str(size)]
    return [([*command, _path(script), *arguments], {})]


def mpirun(script: str, *arguments: str, size: int) -> list[tuple[list[str], dict[str, str]]]:
    """Ranks under the mpirun that came with this Python's packages, else the one on the path."""
    command = [str(find_mpirun()), "-n", str(size), sys.executable, _path(script), *arguments]
    return [
        (
            command,
            {
                # More ranks than cores are allowed (Open MPI 4, then 5), and in containers one often is root.
                "OMPI_MCA_rmaps_base_oversubscribe": "1",
                "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
                "OMPI_MCA_mpi_yield_when_idle": "1",
                "OMPI_ALLOW_RUN_AS_ROOT": "1",
                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            },
        )
    ]


def _path(script: str) -> str:
    """A script beside this file, or -m for the module that the next argument names."""
    return script if script == "-m" else str(HERE / script)


def find_mpirun() -> str | None:
    """Where mpirun is, if there is one."""
    beside = str(Path(sys.executable).parent)
    return shutil.which("mpirun", path=beside) or shutil.which("mpirun")


needs_mpi = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or find_mpirun() is None,
    reason="mpi4py and mpirun are not both here",
)


def free_port() -> int:
    """A port of this process: outside of the range from which the system gives ports to whoever asks for any.

    Other processes of the tests leave it alone, because this one keeps the port of that number for datagrams.
    """
    numbers = list(PORTS)
    random.SystemRandom().shuffle(numbers)
    for port in numbers:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            kept = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            try:
                kept.bind(("127.0.0.1", port))
            except OSError:
                kept.close()
                continue
            _kept.append(kept)
            return port
    raise OSError(f"none of the ports {PORTS.start} to {PORTS.stop - 1} is free")


_kept: list[socket.socket] = []


@atexit.register
def _give_ports_back() -> None:
    while _kept:
        _kept.pop().close()


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """One worker of pytest-xdist at a time, of those that ask for the same path."""
    import fcntl  # not on Windows, where nothing is launched

    with open(path.with_suffix(".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """Two workers of pytest-xdist at a time: a machine with few cores has no room for more launches."""
    import fcntl

    with open(folder / "launches 0.lock", "w") as one, open(folder / "launches 1.lock", "w") as other:
        for file in itertools.cycle((one, other)):
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.05)
        yield


def _environment() -> dict[str, str]:
    """This process's, without what its own launcher may have said."""
    paths = [str(PACKAGE_PARENT), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OMPI_", "PMI", "PRTE_", "SLURM_", "TORCHELASTIC_", "MASTER_"))
        and name
        not in ("CROSSDEVICE_RUN_FOLDER", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TF_CONFIG")
    }
    return {**inherited, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def _still_there(mark: str, sessions: set[int]) -> list[int]:
    """Processes of a launch that have not ended some time after it; those on their way out get that time."""
    end = time.monotonic() + ENDING_SECONDS
    while (found := _processes_of(mark, sessions)) and time.monotonic() < end:
        time.sleep(0.1)
    return found


def _processes_of(mark: str | None, sessions: set[int]) -> list[int]:
    """Those that have the mark, or belong to the session of a forked rank."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                is_marked = mark is not None and mark.encode() in (folder / "environ").read_bytes()
                state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue  # it ended meanwhile, or belongs to somebody else
            if is_marked or (int(session) in sessions and state != "Z"):
                found.append(int(folder.name))
    return found
