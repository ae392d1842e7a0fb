"""Groups formed from what launchers say, under real launchers and beside a user's own torch.distributed."""

from __future__ import annotations

import json
import sys

import pytest

from multiprocess import launching
from multiprocess.launching import needs_mpi

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="launches are watched through /proc")

HARD_SECONDS = 120.0


@pytest.fixture
def meet(tmp_path, tmp_path_factory):
    """Runs two ranks that meet, and returns what they report."""

    def run(commands):
        with launching.in_turn(tmp_path_factory.getbasetemp().parent):
            outcome = launching.launch(commands, tmp_path / "launch", HARD_SECONDS)
        assert set(outcome.codes) == {0}, outcome.output
        assert outcome.left == []
        assert [outcome.reports[rank]["met"] for rank in (0, 1)] == [["0", "1"]] * 2
        return outcome.reports

    return run


def test_a_group_stands_beside_a_default_group_in_use(meet):
    reports = meet(launching.torchrun("meeting_rank.py", "torch", "beside DDP", size=2))
    assert reports[0]["engine"] == "gloo"


def test_ranks_that_torchrun_starts_again_meet_again(meet):
    ((command, variables),) = launching.torchrun("meeting_rank.py", "torch", "fails once", size=2)
    at = command.index("--standalone")
    reports = meet([([*command[:at], "--max-restarts=1", *command[at:]], variables)])
    assert [reports[rank]["restart"] for rank in (0, 1)] == [1, 1]


def test_tf_config_is_enough(meet):
    addresses = [f"127.0.0.1:{launching.free_port()}", "127.0.0.1:1"]
    config = {"cluster": {"chief": addresses[:1], "worker": addresses[1:]}}
    tasks = [{"type": "chief", "index": 0}, {"type": "worker", "index": 0}]
    commands = [
        (
            [sys.executable, str(launching.HERE / "meeting_rank.py")],
            {"TF_CONFIG": json.dumps({**config, "task": task})},
        )
        for task in tasks
    ]
    assert meet(commands)[1]["recognised"].startswith("TF_CONFIG: rank 1 of 2, local rank 1 of 2")


@needs_mpi
@pytest.mark.parametrize(("engine", "name"), [("", "Open MPI"), ("torch", "gloo")])
def test_under_mpirun_mpi_is_the_usual_engine_and_torch_can_be_named(engine, name, meet):
    reports = meet(launching.mpirun("meeting_rank.py", engine, size=2))
    assert reports[1]["engine"].startswith(name)
    assert reports[1]["recognised"].startswith("Open MPI: rank 1 of 2")
