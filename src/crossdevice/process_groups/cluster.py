"""The place of this process in a cluster, and its group with the others."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Mapping

from crossdevice import runtime
from crossdevice.errors import OptionError
from crossdevice.process_groups.engines.registry import PROCESS_ENGINES
from crossdevice.process_groups.group import TIMEOUT_SECONDS, Checks, ProcessGroup
from crossdevice.values.launchers import Launch, is_of_launcher, launched
from crossdevice.values.registry import LIBRARIES


class Cluster(Launch):
    """The processes of one launch, seen from one of them.

    Args:
        rank: the number of this process, from 0.
        size: the number of processes.
        local_rank: the number of this process on its host; None if unknown.
        local_size: the number of processes on its host; None if unknown.
        launcher: the name of what started the processes.
        address: the host at which they meet.
        port: the port at which they meet.
        variables: the environment variables that said so.
        has_mpi: True if the launcher is MPI's own.
        has_store: True if a store of torchrun is running already at that address.
        restart: how often the launcher has restarted the processes.
        folder: the folder in which processes of `crossdevice run` meet.

    >>> cluster = Cluster(rank=1, size=4, launcher="by hand", address="10.0.0.1", port=29500)
    >>> cluster.rank, cluster.size
    (1, 4)
    """

    def form_group(
        self,
        engine: str | None = None,
        *,
        name: str = "",
        timeout_seconds: float = TIMEOUT_SECONDS,
        checks: Checks = "new",
        shared_memory: bool | None = None,
    ) -> ProcessGroup:
        """Forms a group of all processes of the launch; each of them calls this.

        Args:
            engine: `"torch"` (gloo), `"mpi"`, or `"local"` (Unix sockets, for processes of one host). If
                none is named, local under `crossdevice run`, MPI under its own launchers where mpi4py is
                installed, else torch.
            name: tells apart groups that are formed at the same time, in no particular order.
            timeout_seconds: for forming the group, and then for each of its calls.
            checks: as of ProcessGroup.
            shared_memory: as of ProcessGroup.

        Returns:
            The group. It is to be closed in the end, or used in a `with` block.

        Raises:
            OptionError: the engine is unknown, or there is no address to meet at.
            ProcessGroupError: the other processes could not be reached.
            DeadlineError: not all processes came in time; the message says how many did.
        """
        lacks_mpi = engine is None and self.has_mpi and importlib.util.find_spec("mpi4py") is None
        if self.size == 1:
            engine = "threads"
        elif engine is None and self.folder is not None:
            engine = "local"
        elif engine is None:
            engine = "mpi" if self.has_mpi and not lacks_mpi else "torch"
        try:
            joined = PROCESS_ENGINES.load(engine)(self, name=name, timeout_seconds=timeout_seconds)
        except OptionError as error:
            if not lacks_mpi:
                raise
            advice = f"{self.launcher} needs no more than mpi4py: pip install {LIBRARIES['mpi4py'].install}"
            raise OptionError(f"{advice}; without it: {error}") from error
        return ProcessGroup(
            joined, timeout_seconds=timeout_seconds, checks=checks, shared_memory=shared_memory
        )


def cluster_from_env(environ: Mapping[str, str] | None = None) -> Cluster:
    """Reads which process of how many this is from the launcher's environment variables.

    Understands, in this order: `crossdevice run`, torchrun and other RANK and WORLD_SIZE, TF_CONFIG, Open
    MPI, PMI (MPICH, Intel MPI), Slurm. `recognised` says what was found.

    Args:
        environ: variables in place of `os.environ`.

    Returns:
        The Cluster; one process if there are no such variables.

    Raises:
        OptionError: variables contradict each other, or one is missing.

    >>> cluster_from_env({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"}).recognised
    'environment: rank 1 of 4, meeting at 10.0.0.1:29500, from RANK, WORLD_SIZE, MASTER_ADDR'
    >>> cluster_from_env({}).recognised
    'nothing: one process'
    """
    return Cluster(**vars(launched(os.environ if environ is None else environ)))


def environments_of_ranks(size: int, folder: str) -> list[dict[str, str]]:
    """Returns the environments of this many processes of this host, each with its rank and the folder.

    Those that form groups on PyTorch as well find an address, with a port that is free now.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    inherited = {name: value for name, value in os.environ.items() if not is_of_launcher(name)}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, runtime.RUN_FOLDER.variable: folder}
    sizes = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    return [
        {**inherited, **place, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)
    ]


from_env = cluster_from_env
"""Its old name, under which programs reach it as `crossdevice.cluster.from_env`, for one release more."""
