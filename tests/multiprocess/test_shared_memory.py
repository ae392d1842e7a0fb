"""Ranks that share memory: what they do without, whom they name, and what is left of them."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from multiprocess.launching import check_survivors, scenarios

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux")

NUM_KILLS = os.environ.get("CROSSDEVICE_TEST_KILLS", "6")
"""More take longer: 100 of them about half a minute."""


HAS_TORCH = importlib.util.find_spec("torch") is not None


@pytest.fixture(scope="module")
def found():
    """What each scenario has found; they run side by side, since ranks wait most of the time."""
    names = (
        *("off", "deadline", "interrupt", "differ", "faulty", "dropped"),
        *("short", "crowd", "arrays", "small", "peers"),
    )
    named = dict.fromkeys((*names, *["staged"] * HAS_TORCH), ())
    with scenarios("shared_scenarios.py", {**named, "kills": (NUM_KILLS,)}) as found:
        yield found


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
        assert facts["seconds"] < 1.5 + 60
    assert late["error"] in ("DeadlineError", "ProcessGroupError"), late
    assert "gave up" in late["text"]


def test_an_interrupt_lands_and_the_others_hear_of_it(found):
    other, interrupted = found("interrupt")
    assert interrupted["error"] == "KeyboardInterrupt", interrupted
    assert interrupted["seconds"] < 60
    assert other["error"] == "ProcessGroupError", other
    assert "was interrupted: KeyboardInterrupt" in other["text"]


def test_known_calls_that_differ_are_refused_and_named(found):
    for facts in found("differ"):
        assert facts["error"] == "MismatchError", facts
        assert "rank 2 (" in facts["text"]
        assert "of float64 (5,)" in facts["text"]


def test_wrong_bytes_on_purpose_reach_others_in_the_calls_that_are_named(found):
    other, faulty = found("faulty")
    lengths = [facts.pop("length") for facts in (other, faulty)]
    for facts, count in ((other, 0), (faulty, 1)):
        for name, ((before, _, after), injected) in facts.items():
            assert before == after == ([1] if name in ("mean", "gather") else [2]), name
            assert injected == count, name
    # 1 + ~1 where the first rank adds, and ~2 of what the second rank has added; partial sums are float64.
    assert {name: wrong for name, ((_, wrong, _), _) in other.items()} == {
        "small": [255],
        "bound": [255],
        "large": [253, 255],
        "shared": [253, 255],
        "mean": [-3.999999761581421, 127.5],
        "gather": [1, 254],
    }
    assert [facts["error"] for facts in lengths] == ["ProcessGroupError"] * 2
    assert "rank 1 (" in lengths[0]["text"]
    assert "says that it sends an array of shape (-6,)" in lengths[0]["text"]
    assert "rank 0 (" in lengths[1]["text"]


def test_nobody_waits_for_what_is_dropped_on_purpose_beyond_the_deadline(found):
    *others, faulty = found("dropped")
    assert faulty == [{"error": None}]
    for (facts,) in others:  # who may find a note of the rank: it is there, and does not know of its fault
        assert facts["error"] == "DeadlineError", facts


def test_bytes_that_do_not_come_are_missed(found):
    enough, short = found("short")
    assert enough == {"error": None}
    assert short["error"] == "ProcessGroupError", short
    assert "3 bytes of rank 0 were to come, and did not" in short["text"]


def test_more_ranks_than_cores_get_through(found):
    assert found("crowd") == [True] * 8


def test_arrays_in_shared_memory_give_the_same_bits_and_are_given_back(found):
    for facts in found("arrays"):
        small, large = (
            next(line for line in text.splitlines() if line.startswith("pack 0"))
            for text in facts.pop("explained")
        )
        assert small.endswith(
            "brings its arrays to shared memory, 16 bytes, and combines everything there, in 1 step"
        )
        assert large.startswith("pack 0 (1 value of float32): brings its arrays to shared memory, ")
        assert large.endswith(" bytes, and combines its shard there, in 3 steps")
        # Others find an array by its descriptor; that of the group's own memory is needed while it is formed.
        assert facts.pop("descriptors") == [0, 1]
        assert facts == {who: [True] * 4 for who in ("all", "one", "none")} | {"left": 0}


def test_small_arrays_of_any_layout_are_reduced_and_errors_at_the_end_leave_the_group_whole(found):
    first, second = found("small")
    assert first == {"error": "OutError", "right": True, "again": [2.0] * 4}
    assert second == {"error": None, "right": True, "again": [2.0] * 4}


def test_killed_ranks_are_named_and_leave_nothing(found):
    before = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").is_dir() else set()
    check_survivors(found("kills"), NUM_KILLS)
    after = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").is_dir() else set()
    assert not [path for path in after - before if "crossdevice" in path.name]
    assert found.left_by("kills") == []


def test_ranks_find_each_others_gpu_arrays_and_ask_only_once(found):
    def arrays(rank, number, allocation):
        moved = number * (rank > 0)
        return [[100 * rank + moved, allocation], [7 + moved, allocation]]

    for rank, (*first, again, old) in enumerate(found("peers")):
        others = [each for each in range(3) if each != rank]
        wanted = [(1, 5), (1, 5), (2, 5), (1, 5), (1, 6)]
        assert [found for found, _ in first] == [
            [place for each in others for place in arrays(each, *numbers)] for numbers in wanted
        ]
        assert [steps for _, steps in first] == [3, 1, 3, 1, 3]
        # Rank 0 has told of two sets of arrays only; the others' first ones were forgotten meanwhile.
        assert (again[1], old[1]) == (3, 3)
        assert again[0] == first[4][0]
        assert old[0] == first[0][0]


@pytest.mark.skipif(not HAS_TORCH, reason="PyTorch is not installed")
def test_arrays_that_are_staged_have_the_bits_of_one_process(found):
    for facts in found("staged"):
        assert len(facts) == 2 * 5 + 8  # the parts of each leaf with an axis
        assert all(answer for answers in facts for answer in answers), facts
