"""Process-wide resources: environment settings, actions at exit, and renewal in forks."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple


class Setting(NamedTuple):
    """A variable of the environment; an empty one counts as not set."""

    variable: str
    default: str = ""

    def read(self) -> str:
        """Returns the current value, else the default."""
        return os.environ.get(self.variable) or self.default


KERNELS = Setting("CROSSDEVICE_KERNELS")
"""The kernels of fused passes, `numba` or `numpy`; read in the first reduction."""

NUM_THREADS = Setting("CROSSDEVICE_NUM_THREADS")
"""Threads of a large pass; read in the first reduction."""

POOL_BYTES = Setting("CROSSDEVICE_POOL_BYTES")
"""Bytes of idle memory that are kept for results; read in the first reduction."""

RECORD_BITS = Setting("CROSSDEVICE_RECORD_BITS")
"""A file in which the whole process is recorded; read by `import crossdevice`."""

FLIGHT_RECORDER = Setting("CROSSDEVICE_FLIGHT_RECORDER")
"""Folder for records of what ran before an error; read when an error is raised."""

HOST = Setting("CROSSDEVICE_HOST")
"""A word that processes of one host have in common; read when a group is formed, as all of the next ones."""

SHARED_MEMORY = Setting("CROSSDEVICE_SHARED_MEMORY", "1")
"""1 if processes of one host share memory, else 0."""

PEER_MEMORY = Setting("CROSSDEVICE_PEER_MEMORY", "1")
"""1 if processes of one host read each other's GPU memory, else 0."""

GROUP_KEY = Setting("CROSSDEVICE_GROUP_KEY")
"""The key with which ranks and their notes prove that they belong to a group."""

RUN_FOLDER = Setting("CROSSDEVICE_RUN_FOLDER")
"""The folder in which processes of `crossdevice run` meet, which that command sets."""

PRECISION = Setting("CROSSDEVICE_PRECISION", "accurate")
"""The precision of groups of torch.distributed that name none."""

TIMEOUT_SECONDS = Setting("CROSSDEVICE_TIMEOUT_SECONDS")
"""Deadline of collectives of torch.distributed; no deadline if unset."""


def environment_of_child(**own: str) -> dict[str, str]:
    """Returns the environment of a program that imports this package from here, with its own variables."""
    package = str(Path(__file__).parents[1])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **own}


_renewed: list[Callable[[], None]] = []
_ended: list[Callable[[], None]] = []


def renew_after_fork(renew: Callable[[], None]) -> None:
    """Registers a function for forked processes, where other threads are gone and their locks stay held."""
    _renewed.append(renew)


def end_with_process(end: Callable[[], None]) -> None:
    """Registers a function for Python's exit, before those registered earlier and before libraries end."""
    _ended.append(end)
    # What is registered last runs first: libraries may have registered their end since the last time.
    atexit.unregister(_end_all)
    atexit.register(_end_all)


def _renew_all() -> None:
    _call_each(_renewed)


def _end_all() -> None:
    _call_each(reversed(_ended))
    _ended.clear()


def _call_each(functions: Iterable[Callable[[], None]]) -> None:
    """Calls all of them; the error of one is shown, as Python does, and keeps none from being called."""
    for function in functions:
        try:
            function()
        except BaseException:
            sys.excepthook(*sys.exc_info())


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_all)
