"""Ranks that die, stall or call something else, as real processes: the others say who, soon, and go on."""

from __future__ import annotations

import signal
import sys

import pytest

from multiprocess import launching
from multiprocess.failing_rank import ODD_RANK
from multiprocess.launching import needs_mpi

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="launches are watched through /proc")

repeats = pytest.mark.more("a repetition")

IN_MAKE_TEST = {("kill", "torch"), ("kill", "local"), ("stall", "local"), ("differ", "local")}

SIZE = 3
DEADLINE_SECONDS = 3.0
LATE_SECONDS = 60.0
"""After the deadline, at most: others get time to say where they are."""

LONG_DEADLINE_SECONDS = 240.0
"""Where an error comes long before, on a machine that has other things to do as well."""

HARD_SECONDS = 300.0


@pytest.fixture
def fail(tmp_path, tmp_path_factory):
    """Runs a scenario, and returns how it ended."""

    def run(
        scenario,
        engine="torch",
        launcher=launching.ranks,
        seconds=DEADLINE_SECONDS,
        odd=(),
        shares=False,
        size=SIZE,
        **more,
    ):
        commands = launcher("failing_rank.py", scenario, engine, str(seconds), *odd, size=size)
        for _, variables in commands:
            variables |= {"CROSSDEVICE_SHARED_MEMORY": str(int(shares)), **more}
        with launching.in_turn(tmp_path_factory.getbasetemp().parent):
            outcome = launching.launch(commands, tmp_path / "launch", HARD_SECONDS)
        assert outcome.left == []
        return outcome

    return run


@pytest.mark.parametrize(
    ("scenario", "error", "ranks", "shares", "engine"),
    [
        pytest.param(*row, engine, marks=() if (row[0], engine) in IN_MAKE_TEST else repeats)
        for row in (
            ("kill", "ProcessGroupError", [0, 1], False),
            ("leave", "ProcessGroupError", [0, 1], False),
            ("leave", "ProcessGroupError", [0, 1], True),
            ("break_off", "ProcessGroupError", [0, 1], False),
            ("stall", "DeadlineError", [0, 1], False),
            ("differ", "MismatchError", [0, 1, 2], False),
        )
        for engine in ("torch", "local")
    ],
)
def test_the_others_name_the_odd_rank_in_time_and_form_a_new_group(
    scenario, error, ranks, shares, engine, fail
):
    seconds = DEADLINE_SECONDS if scenario == "stall" else LONG_DEADLINE_SECONDS
    outcome = fail(scenario, engine, seconds=seconds, shares=shares)
    for rank in ranks:
        facts = outcome.reports[rank]
        assert facts["error"] == error, facts
        assert facts["members"][ODD_RANK] in facts["text"]
        assert f", process {facts['members'][ODD_RANK].split()[-1]}" in facts["text"]
        assert facts["seconds"] < (seconds + LATE_SECONDS if scenario == "stall" else seconds)
        assert facts["is_broken"]
        assert facts["later"].startswith("ProcessGroupError: this group is broken")
        assert facts["again"] == [str(rank) for rank in ranks]
    odd_code = -signal.SIGKILL if scenario in ("kill", "break_off") else 0
    assert outcome.codes == [0, 0, odd_code], outcome.output
    if scenario == "stall":
        late = outcome.reports[ODD_RANK]
        assert late["error"] == "DeadlineError"
        assert f"{late['members'][0]} gave up, since its deadline passed" in late["text"]


@pytest.mark.parametrize("engine", [pytest.param("torch", marks=repeats), "local"])
@pytest.mark.parametrize(
    ("scenario", "shares"),
    [
        ("kill", False),
        pytest.param("leave", False, marks=repeats),
        pytest.param("kill", True, marks=repeats),
    ],
)
def test_nobody_else_is_blamed_for_the_rank_that_keeps_the_store(scenario, shares, engine, fail):
    outcome = fail(scenario, engine, seconds=LONG_DEADLINE_SECONDS, odd=("0",), shares=shares)
    for rank in (1, 2):
        facts = outcome.reports[rank]
        assert facts["error"] == "ProcessGroupError", facts
        assert facts["members"][0] in facts["text"]
        # The other survivor may be named as one that found out who is lost, but not as lost.
        about_other = [part for part in facts["text"].split("; ") if facts["members"][3 - rank] in part]
        for part in about_other:
            assert f"lost contact to {facts['members'][0]}" in part, facts["text"]
        assert facts["seconds"] < LONG_DEADLINE_SECONDS / 2


@pytest.mark.parametrize("engine", ["torch", pytest.param("local", marks=repeats)])
def test_on_two_hosts_all_survivors_learn_soon_that_the_rank_with_the_store_is_gone(engine, fail):
    outcome = fail(
        "kill", engine, seconds=LONG_DEADLINE_SECONDS, odd=("0",), shares=True, size=4, HOSTS_OF_TWO="1"
    )
    for rank in (1, 2, 3):
        facts = outcome.reports[rank]
        assert facts["error"] == "ProcessGroupError", facts
        assert facts["members"][0] in facts["text"], facts
        assert facts["seconds"] < LONG_DEADLINE_SECONDS / 2


@pytest.mark.more("one more launch")
def test_whoever_waits_for_a_rank_that_gave_up_hears_of_it_when_the_board_is_gone_too(fail):
    outcome = fail("relay", seconds=LONG_DEADLINE_SECONDS, odd=("0",), shares=True, size=4, HOSTS_OF_TWO="1")
    for rank in (1, 3):
        facts = outcome.reports[rank]
        assert facts["error"] == "ProcessGroupError", facts
        assert facts["members"][0] in facts["text"], facts
        assert facts["seconds"] < LONG_DEADLINE_SECONDS / 2


@pytest.mark.more("one more launch")
@needs_mpi
def test_on_mpi_a_stalled_rank_is_named_and_the_job_ends(fail):
    outcome = fail("hang", "mpi", launching.mpirun, shares=True)
    for rank in (0, 1):
        facts = outcome.reports[rank]
        assert facts["error"] == "DeadlineError", facts
        assert facts["members"][ODD_RANK] in facts["text"]
        assert facts["seconds"] < DEADLINE_SECONDS + LATE_SECONDS
    assert outcome.codes != [0]


@pytest.mark.more("one more launch")
@needs_mpi
def test_on_mpi_calls_that_differ_are_named(fail):
    outcome = fail("differ", "mpi", launching.mpirun, LONG_DEADLINE_SECONDS)
    for rank in range(SIZE):
        facts = outcome.reports[rank]
        assert facts["error"] == "MismatchError", facts
        assert facts["members"][ODD_RANK] in facts["text"]
        assert facts["again"] == ["0", "1", "2"]
    assert outcome.codes == [0], outcome.output


@pytest.mark.more("one more launch")
@needs_mpi
def test_on_mpi_a_rank_that_leaves_is_noticed_long_before_the_deadline(fail):
    outcome = fail("leave", "mpi", launching.mpirun, LONG_DEADLINE_SECONDS)
    for rank in (0, 1):
        facts = outcome.reports[rank]
        assert facts["error"] == "ProcessGroupError", facts
        assert f"{facts['members'][ODD_RANK]} gave up: it closed the group" in facts["text"]
        assert facts["seconds"] < LONG_DEADLINE_SECONDS / 2
    assert outcome.codes == [0], outcome.output


@pytest.mark.more("one more launch")
@needs_mpi
def test_a_launcher_ends_the_job_of_a_killed_mpi_rank(fail):
    assert fail("kill", "mpi", launching.mpirun).codes != [0]


@pytest.mark.more("one more launch")
@needs_mpi
def test_on_mpi_a_group_that_not_all_ranks_form_is_given_up(fail):
    outcome = fail("absent", "mpi", launching.mpirun)
    for rank in (0, 1):
        facts = outcome.reports[rank]
        assert facts["error"] == "DeadlineError", facts
        assert "not all ranks came" in facts["text"]
        assert facts["seconds"] < DEADLINE_SECONDS + LATE_SECONDS
    assert outcome.codes != [0]
