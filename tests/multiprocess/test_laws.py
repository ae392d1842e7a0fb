"""The laws of groups, on threads of one process and on processes under torchrun and mpirun."""

from __future__ import annotations

import json
import os
import sys

import pytest

from crossdevice.process_groups.engines.thread_engine import Mailboxes, ThreadEngine, run_ranks
from crossdevice.process_groups.group import ProcessGroup
from multiprocess import launching
from multiprocess.launching import needs_mpi
from multiprocess.laws import GROUP_LAWS
from multiprocess.laws_of_reductions import REDUCTION_LAWS
from multiprocess.laws_of_shards import SHARD_LAWS

LAWS = GROUP_LAWS | REDUCTION_LAWS | SHARD_LAWS
repeats = pytest.mark.more("a repetition")
ROWS = [
    pytest.param(engine, size, memory, marks=marks, id=f"{engine}-{size}-{memory}")
    for engine, size, memory, *marks in (
        ("torch", 2, "shared"),
        ("torch", 3, "private", repeats),
        ("torch", 4, "hosts", repeats),
        ("local", 2, "shared", repeats),
        ("local", 3, "private", repeats),
        ("local", 4, "hosts", repeats),
        ("mpi", 2, "private", needs_mpi),
        ("mpi", 4, "shared", needs_mpi, repeats),
    )
]
NAMES = {"torch": "gloo", "mpi": "Open MPI", "local": "Unix sockets"}
LAUNCH_SECONDS = 600.0

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="launches are watched through /proc")


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory):
    """What became of each launch; it happens once, in whichever worker needs it first."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def outcome(engine, size, memory):
        path = shared / f"laws on {engine} {size} {memory}.json"
        with launching.alone(path):
            if not path.exists():
                run = launching.mpirun if engine == "mpi" else launching.ranks
                commands = run("laws_rank.py", engine, memory, size=size)
                with launching.in_turn(shared):
                    found = launching.launch(commands, path.with_suffix(""), LAUNCH_SECONDS)
                path.write_text(json.dumps(found))
        return launching.Outcome(*json.loads(path.read_text()))

    return outcome


@needs_linux
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("engine", "size", "memory"), ROWS)
def test_processes_keep(law, engine, size, memory, outcomes):
    found = outcomes(engine, size, memory)
    assert {int(rank): facts[law] for rank, facts in found.reports.items()} == dict.fromkeys(
        range(size), "kept"
    ), found.output


@needs_linux
@pytest.mark.parametrize(("engine", "size", "memory"), ROWS)
def test_launches_are_recognised_and_leave_no_process(engine, size, memory, outcomes):
    found = outcomes(engine, size, memory)
    assert set(found.codes) == {0}, found.output
    assert found.left == []
    launcher = "Open MPI" if engine == "mpi" else "environment"
    for rank, facts in found.reports.items():
        assert facts["recognised"].startswith(f"{launcher}: rank {rank} of {size}, ")
        assert facts["shares"] is (memory == "shared")
        assert facts["hosts"] == ([[0, 1, 3], [2]] if memory == "hosts" else None)
        assert facts["engine"].startswith(NAMES[engine])


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("size", [1, 2, 3, *(pytest.param(size, marks=repeats) for size in (4, 5))])
def test_threads_keep(law, size):
    boxes = [Mailboxes(size) for _ in range(3)]

    def run(group):
        left = iter(boxes)
        LAWS[law](group, lambda: ProcessGroup(ThreadEngine(next(left), group.rank), timeout_seconds=240.0))

    run_ranks(size, run, timeout_seconds=240.0)
