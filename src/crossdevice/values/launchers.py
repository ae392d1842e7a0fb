"""Environment variables by which launchers tell processes their rank and number."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from crossdevice import runtime
from crossdevice.errors import OptionError

USUAL_PORT = 29500
"""The default port of torch.distributed, for launchers that name no port and no job."""

LARGEST_PORT = 65535


@dataclasses.dataclass(frozen=True)
class Launch:
    """One process among those of a launch."""

    rank: int = 0
    size: int = 1
    local_rank: int | None = 0
    """Its number among those on its host; None if the launcher does not say."""
    local_size: int | None = 1
    launcher: str = "nothing"
    address: str | None = None
    """Address of rank 0; None if it is not known."""
    port: int | None = None
    variables: tuple[str, ...] = ()
    """The environment variables that this was read from."""
    has_mpi: bool = False
    """True if the launcher is one of MPI's, which has connected its processes already."""
    has_store: bool = False
    """True if the launcher itself keeps a store at address and port, in place of rank 0."""
    restart: int = 0
    """Number of times the launcher has started the processes again."""
    folder: str | None = None
    """Folder in which processes of one host meet, made by the launcher for them alone."""

    @property
    def recognised(self) -> str:
        """Describes the variables that were found."""
        if not self.variables:
            return "nothing: one process"
        local = "" if self.local_rank is None else f", local rank {self.local_rank}"
        if self.local_rank is not None and self.local_size is not None:
            local += f" of {self.local_size}"
        place = "" if self.address is None else f", meeting at {self.address}:{self.port}"
        where = f"rank {self.rank} of {self.size}{local}{place}"
        return f"{self.launcher}: {where}, from {', '.join(self.variables)}"


class Variables:
    """Environment variables that remembers which of them were used."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.used: list[str] = []

    def text(self, *names: str) -> str | None:
        """Returns the first of these that is set and not empty."""
        for name in names:
            if self._environ.get(name):
                if name not in self.used:
                    self.used.append(name)
                return self._environ[name]
        return None

    def number(self, *names: str) -> int | None:
        """Returns the first of these that is set, as a whole number that is not negative."""
        text = self.text(*names)
        if text is None:
            return None
        if not re.fullmatch(r"\d+", text.strip()):
            name = next(name for name in names if self._environ.get(name))
            raise OptionError(f"{name} must be a whole number, 0 or more; got {text!r}")
        return int(text)

    def port(self) -> int | None:
        """Returns MASTER_PORT, if it is set."""
        port = self.number("MASTER_PORT")
        if port is not None and not 0 < port <= LARGEST_PORT:
            raise OptionError(f"MASTER_PORT must be a number from 1 to {LARGEST_PORT}; got {port}")
        return port

    def rank_and_size(self, rank_name: str, *size_names: str) -> tuple[int, int] | None:
        """Returns rank and size, or None if neither is set."""
        rank, size = self.local(rank_name, *size_names, noun="rank")
        sizes = " or ".join(size_names)
        if rank is not None and size is not None:
            return rank, size
        if rank is not None:
            raise OptionError(
                f"{rank_name} is set ({rank}), but {sizes} is not: how many processes are there?"
            )
        if size is not None:
            raise OptionError(f"{sizes} is set ({size}), but {rank_name} is not: which process is this?")
        return None

    def local(
        self, rank_name: str, *size_names: str, noun: str = "local rank"
    ) -> tuple[int | None, int | None]:
        """Returns the local rank and the number of local ranks, as far as the launcher says."""
        rank, size = self.number(rank_name), self.number(*size_names)
        if rank is not None and size is not None and rank >= size:
            raise OptionError(
                f"{rank_name} must be below {' or '.join(size_names)}, since ranks count from 0; "
                f"got {noun} {rank} of {size}"
            )
        return rank, size


def launched(environ: Mapping[str, str]) -> Launch:
    """Reads the variables of the first launcher in the table below that has left any."""
    for read in READERS:
        variables = Variables(environ)
        launch = read(variables)
        if launch is not None:
            return dataclasses.replace(launch, variables=tuple(variables.used))
    return Launch()


def is_of_launcher(name: str) -> bool:
    """Returns True if torchrun or TensorFlow's launcher sets this variable beside RANK and WORLD_SIZE."""
    return name.startswith("TORCHELASTIC_") or name in ("TF_CONFIG", "GROUP_RANK")


def local_processes(environ: Mapping[str, str]) -> int:
    """Returns the number of processes of this launch on the host, if the launcher says it; else 1.

    >>> local_processes({"RANK": "3", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"})
    8
    """
    try:
        return launched(environ).local_size or 1
    except OptionError:  # told when a group is formed; a program that forms none may have such variables
        return 1


def _torchrun(variables: Variables) -> Launch | None:
    place = variables.rank_and_size("RANK", "WORLD_SIZE")
    if place is None:
        return None
    local = variables.local("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    address, port = variables.text("MASTER_ADDR"), variables.port()
    launcher, folder = "torchrun", None  # which another launcher may have started
    if variables.text("TORCHELASTIC_RUN_ID") is None:
        folder = variables.text(runtime.RUN_FOLDER.variable)
        launcher = "environment" if folder is None else "crossdevice run"
    has_store = variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restart = variables.number("TORCHELASTIC_RESTART_COUNT") or 0
    port = port or (USUAL_PORT if address else None)
    return Launch(
        *place, *local, launcher, address, port, has_store=has_store, restart=restart, folder=folder
    )


def _tf_config(variables: Variables) -> Launch | None:
    text = variables.text("TF_CONFIG")
    if text is None:
        return None
    try:
        config = json.loads(text)
        cluster = {job: _addresses(job, tasks) for job, tasks in config.get("cluster", {}).items()}
        task = config.get("task", {})
        job, index = task.get("type"), task.get("index", 0)
        is_index = isinstance(index, (int, str)) and str(index).isdigit()
    except (ValueError, TypeError, AttributeError) as error:
        raise OptionError(
            f"TF_CONFIG must be JSON such as "
            f'{{"cluster": {{"worker": ["host:port", ...]}}, "task": {{"type": "worker", "index": 0}}}}; '
            f"got {text!r} ({error})"
        ) from None
    if not cluster and job is None:
        return None
    if job is None:
        raise OptionError('TF_CONFIG has a "cluster", but its "task" has no "type": which process is this?')
    # As in TensorFlow: the chief first, then the workers; others take no part in reductions.
    places = [(name, number) for name in ("chief", "worker") for number in range(len(cluster.get(name, ())))]
    if not is_index or (job, int(index)) not in places:
        known = ", ".join(f"{name} {number}" for name, number in places) or "none"
        raise OptionError(
            f"TF_CONFIG says that this is {job} {index}, which takes no part in reductions; its cluster has: "
            f"{known}"
        )
    rank = places.index((job, int(index)))
    addresses = [cluster[name][number].rpartition(":") for name, number in places]
    hosts = [host for host, _, _ in addresses]
    local = hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])
    return Launch(rank, len(places), *local, "TF_CONFIG", hosts[0].strip("[]"), int(addresses[0][2]))


def _addresses(job: str, tasks: Any) -> list[str]:
    numbered = dict(enumerate(tasks)) if isinstance(tasks, list) else dict(tasks)
    for address in numbered.values():
        found = re.fullmatch(r"\S+:(\d+)", str(address))
        if found is None or not 0 < int(found[1]) <= LARGEST_PORT:
            raise ValueError(f"the address of a {job} is not host:port: {address!r}")
    return [str(numbered[key]) for key in sorted(numbered, key=int)]


def _mpi(launcher: str, names: str, local_names: str, variables: Variables) -> Launch | None:
    """Reads rank and size by name, of all processes and of those on this host."""
    place = variables.rank_and_size(*names.split())
    local = variables.local(*local_names.split())
    if place is None:
        return None
    is_one_host = local[1] == place[1]
    address = variables.text("MASTER_ADDR") or ("127.0.0.1" if is_one_host else _first_slurm_host(variables))
    port = _port(variables, "PMIX_NAMESPACE", "SLURM_JOB_ID") if address else None
    return Launch(*place, *local, launcher, address, port, has_mpi=True)


def _slurm(variables: Variables) -> Launch | None:
    if variables.text("SLURM_PROCID") is None:
        return None  # inside an allocation, but not as one of its tasks
    place = variables.rank_and_size("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    assert place is not None
    local_rank = variables.number("SLURM_LOCALID")
    host = variables.number("SLURM_NODEID")
    counts = slurm_counts(variables.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") or "")
    if host is not None and counts and host >= len(counts):
        raise OptionError(
            f"SLURM_NODEID must be below {len(counts)}, as many hosts as SLURM_TASKS_PER_NODE has; got {host}"
        )
    local_size = counts[host] if host is not None and counts else None
    address = variables.text("MASTER_ADDR") or _first_slurm_host(variables)
    port = _port(variables, "SLURM_JOB_ID") if address else None
    return Launch(*place, local_rank, local_size, "Slurm", address, port)


def _pmix(variables: Variables) -> Launch | None:
    if variables.text("PMIX_RANK") is None:
        return None
    raise OptionError(
        "PMIX_RANK is set, but no variable says how many processes there are (OMPI_COMM_WORLD_SIZE, "
        "PMI_SIZE, SLURM_NTASKS): set RANK, WORLD_SIZE and MASTER_ADDR, or let MPI count its ranks with "
        "crossdevice.process_groups.engines.mpi_engine.form_group()"
    )


_OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE",
)
_PMI = "PMI_RANK PMI_SIZE", "MPI_LOCALRANKID MPI_LOCALNRANKS"

READERS: tuple[Callable[[Variables], Launch | None], ...] = (
    _torchrun,
    _tf_config,
    functools.partial(_mpi, "Open MPI", *_OPEN_MPI),
    functools.partial(_mpi, "PMI", *_PMI),
    _slurm,
    _pmix,
)
"""The first that finds its variables counts: torchrun is often started by Slurm or MPI, whose variables it
leaves in place, and MPI by Slurm. Those that users set by hand come before those that systems set."""


def _first_slurm_host(variables: Variables) -> str | None:
    hosts = variables.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return None if hosts is None else first_host(hosts)


def _port(variables: Variables, *job_names: str) -> int:
    """Returns MASTER_PORT, else a port that ranks of the same job share, and other jobs rarely do."""
    port = variables.port()
    if port is not None:
        return port
    job = variables.text(*job_names)
    if job is None:
        return USUAL_PORT
    # Below 32768, where Linux begins to hand out ports by itself.
    return 20000 + int.from_bytes(hashlib.blake2b(job.encode(), digest_size=4).digest(), "little") % 12000


def first_host(hosts: str) -> str:
    """Returns the first host of a Slurm node list.

    >>> first_host("gpu[07-09,12]-ib,login1"), first_host("alpha,beta"), first_host("n[1-2][3,4]")
    ('gpu07-ib', 'alpha', 'n13')
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)
    if first is None:
        raise OptionError(f"a Slurm node list begins with a host's name; got {hosts!r}")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def slurm_counts(text: str) -> list[int]:
    """Returns the number of tasks on each host.

    >>> slurm_counts("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts
