"""Groups formed from what launchers say, under real launchers and beside a user's own torch.distributed."""

from __future__ import annotations

import json
import sys

import pytest

from multiprocess import launching
from multiprocess.launching import needs_mpi

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="launches are watched through /proc")

HARD_SECONDS = 300.0


@pytest.fixture
def launch(tmp_path, tmp_path_factory):
    """Runs commands, and returns how they ended."""

    def run(commands):
        with launching.in_turn(tmp_path_factory.getbasetemp().parent):
            outcome = launching.launch(commands, tmp_path / "launch", HARD_SECONDS)
        assert outcome.left == []
        return outcome

    return run


@pytest.fixture
def meet(launch):
    """Runs two ranks that meet, and returns what they report."""

    def run(commands):
        outcome = launch(commands)
        assert set(outcome.codes) == {0}, outcome.output
        assert [outcome.reports[rank]["met"] for rank in (0, 1)] == [["0", "1"]] * 2
        return outcome.reports

    return run


def test_a_group_stands_beside_a_default_group_in_use(meet):
    reports = meet(launching.torchrun("meeting_rank.py", "torch", "beside a default group", size=2))
    assert reports[0]["engine"] == "gloo"


def test_under_crossdevice_run_no_library_is_needed(meet):
    reports = meet(launching.crossdevice_run("meeting_rank.py", size=2))
    assert reports[0]["engine"] == "Unix sockets"
    assert reports[1]["recognised"].startswith("crossdevice run: rank 1 of 2, local rank 1 of 2, ")
    assert [reports[rank]["libraries"] for rank in (0, 1)] == [[], []]


@pytest.mark.more("one more launch")
def test_under_crossdevice_run_torch_can_be_named(meet):
    reports = meet(launching.crossdevice_run("meeting_rank.py", "torch", size=2))
    assert reports[0]["engine"] == "gloo"


@pytest.mark.more("one more launch")
def test_ranks_that_torchrun_starts_again_meet_again(meet):
    ((command, variables),) = launching.torchrun("meeting_rank.py", "torch", "fails once", size=2)
    at = command.index("--standalone")
    reports = meet([([*command[:at], "--max-restarts=1", *command[at:]], variables)])
    assert [reports[rank]["restart"] for rank in (0, 1)] == [1, 1]


def test_tf_config_is_enough(meet):
    addresses = [f"127.0.0.1:{launching.free_port()}", "127.0.0.1:1"]
    config = {"cluster": {"chief": addresses[:1], "worker": addresses[1:]}}
    tasks = [{"task": {"type": job, "index": 0}} for job in ("chief", "worker")]
    commands = [
        (
            [sys.executable, str(launching.HERE / "meeting_rank.py")],
            {"TF_CONFIG": json.dumps(config | task)},
        )
        for task in tasks
    ]
    assert meet(commands)[1]["recognised"].startswith("TF_CONFIG: rank 1 of 2, local rank 1 of 2")


@pytest.mark.parametrize("whose", [0, pytest.param(1, marks=pytest.mark.more("a repetition"))])
@pytest.mark.parametrize(
    "engine", ["torch", pytest.param("local", marks=pytest.mark.more("one more launch"))]
)
def test_two_processes_of_one_rank_are_refused_and_all_are_told(engine, whose, launch):
    """Also if it is rank 0, which keeps the store where ranks of gloo meet."""
    commands = launching.ranks("meeting_rank.py", engine, size=3)
    commands[2][1]["RANK"] = str(whose)
    outcome = launch(commands)
    assert outcome.codes == [1, 1, 1]
    assert outcome.output.count(f"two processes call themselves rank {whose} of 3") == 3, outcome.output


@needs_mpi
@pytest.mark.parametrize(
    ("engine", "name"),
    [("", "Open MPI"), pytest.param("torch", "gloo", marks=pytest.mark.more("a repetition"))],
)
def test_under_mpirun_mpi_is_the_usual_engine_and_torch_can_be_named(engine, name, meet):
    reports = meet(launching.mpirun("meeting_rank.py", engine, size=2))
    assert reports[1]["engine"].startswith(name)
    assert reports[1]["recognised"].startswith("Open MPI: rank 1 of 2")


@pytest.mark.more("one more launch")
@needs_mpi
def test_mpi_for_one_thread_only_is_refused(launch):
    ((command, variables),) = launching.mpirun("meeting_rank.py", "mpi", size=2)
    outcome = launch([(command, {**variables, "MPI4PY_RC_THREAD_LEVEL": "single"})])
    assert outcome.codes != [0]
    assert "OptionError: MPI was started without MPI_THREAD_MULTIPLE" in outcome.output


@needs_mpi
def test_an_mpi_that_the_launcher_does_not_belong_to_is_refused(launch):
    ((command, variables),) = launching.ranks("meeting_rank.py", "mpi", size=1)
    outcome = launch([(command, {**variables, "RANK": "1", "WORLD_SIZE": "2"})])
    assert outcome.codes == [1]
    assert (
        "OptionError: MPI says that this is rank 0 of 1, but recognised environment: rank 1 of 2"
        in outcome.output
    )
