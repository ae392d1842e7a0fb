"""Ranks that share memory: what they do without, whom they name, and what is left of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from multiprocess.launching import scenarios

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux")

NUM_KILLS = os.environ.get("CROSSDEVICE_TEST_KILLS", "20")
"""More take longer: 100 of them about half a minute."""


@pytest.fixture(scope="module")
def found():
    """What each scenario has found; they run side by side, since ranks wait most of the time."""
    named = dict.fromkeys(("off", "deadline", "interrupt", "differ", "crowd", "arrays"), ())
    return scenarios("shared_scenarios.py", {**named, "kills": (NUM_KILLS,)})


def test_one_rank_that_does_without_is_named_to_all_and_the_others_share(found):
    for rank, (is_not_shared, explained, total, num_files) in enumerate(found("off")):
        assert is_not_shared
        assert "through shared memory within hosts (ranks 0, 2; rank 1), over pipes between them" in explained
        assert ": rank 1 (" in explained
        assert "it was switched off" in explained
        assert total == [3.0] * 4
        assert num_files == (0 if rank == 1 else 1)


def test_a_late_rank_is_named_and_does_not_take_the_call_for_done(found):
    *others, late = found("deadline")
    for facts in others:
        assert facts["error"] == "DeadlineError", facts
        assert "rank 2 (" in facts["text"]
        assert facts["seconds"] < 1.5 + 5
    assert late["error"] == "ProcessGroupError", late
    assert "gave up" in late["text"]


def test_an_interrupt_lands_and_the_others_hear_of_it(found):
    other, interrupted = found("interrupt")
    assert interrupted["error"] == "KeyboardInterrupt", interrupted
    assert interrupted["seconds"] < 5
    assert other["error"] == "ProcessGroupError", other
    assert "was interrupted: KeyboardInterrupt" in other["text"]


def test_known_calls_that_differ_are_refused_and_named(found):
    for facts in found("differ"):
        assert facts["error"] == "MismatchError", facts
        assert "rank 2 (" in facts["text"]
        assert "of float64 (5,)" in facts["text"]


def test_more_ranks_than_cores_get_through(found):
    assert found("crowd") == [True] * 8


def test_arrays_in_shared_memory_give_the_same_bits_and_are_given_back(found):
    for facts in found("arrays"):
        small, large = facts.pop("explained")
        assert small.endswith(
            "brings its arrays to shared memory, 16 bytes, and combines everything there, in 1 step"
        )
        assert large.startswith("pack 0 (1 values of float32): brings its arrays to shared memory, ")
        assert large.endswith(" bytes, and combines its shard there, in 4 steps")
        assert facts == {who: [True] * 4 for who in ("all", "one", "none")} | {"left": 0}


def test_killed_ranks_are_named_and_leave_nothing(found):
    before = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").is_dir() else set()
    kills = found("kills")
    for odd, results in kills["trials"]:
        for rank, facts in enumerate(results):
            if rank == odd:
                assert facts is None
                continue
            assert facts["error"] == "ProcessGroupError", (kills["seed"], facts)
            assert facts["members"][odd] in facts["text"]
            assert facts["seconds"] < 30
    assert len(kills["trials"]) == int(NUM_KILLS)
    after = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").is_dir() else set()
    assert not [path for path in after - before if "crossdevice" in path.name]
    assert not [pid for pid in Path("/proc").iterdir() if pid.name.isdigit() and _has_memory(pid)]


def _has_memory(process):
    """Whether a process has a file of ours open that outlives its ranks."""
    try:
        maps = (process / "maps").read_text()
    except OSError:
        return False  # it has ended, or belongs to somebody else
    return "/memfd:crossdevice-" in maps and "shared_scenarios.py kills" in _command(process)


def _command(process):
    try:
        return (process / "cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
