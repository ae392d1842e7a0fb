"""Ranks on several hosts: memory within each, an engine between them, and nothing sent twice to one host."""

from __future__ import annotations

import os
import sys

import pytest

from multiprocess.launching import check_survivors, scenarios

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux")

NUM_KILLS = os.environ.get("CROSSDEVICE_TEST_KILLS", "2")


@pytest.fixture(scope="module")
def found():
    """What each scenario has found; they run side by side, since ranks wait most of the time."""
    named = {"bits": (), "late": (), "differ": (), "kills": (NUM_KILLS,)}
    with scenarios("host_scenarios.py", named) as found:
        yield found


@pytest.fixture(scope="module")
def bits(found):
    return found("bits")


@pytest.fixture
def reduced(bits):
    """Of each rank what it found of reductions."""
    return [{name: facts[name] for name in facts if name not in ("hosts", "others")} for facts in bits]


def test_the_bits_are_those_of_one_level_in_every_precision(bits, reduced):
    for facts in bits:
        assert facts["hosts"] == [[0, 2, 4], [1], [3]]
        two, one = facts["others"]
        assert two == one
    for facts in reduced:
        assert len(facts) == 12
        assert {name: same for name, (same, *_) in facts.items() if not same} == {}


def test_each_result_goes_to_a_host_once(reduced):
    """For n elements of 4 bytes, in shards of n / 5: those of other hosts' ranks, and the own one twice."""
    for rank, facts in enumerate(reduced):
        for name, (_, sent, sent_on_one_level, told) in facts.items():
            assert sent == told, name
            assert sent < sent_on_one_level, name
        n = 1_300_000
        _, sent, sent_on_one_level, _ = facts[f"sum accurate float32 {n} 1"]
        num_far = 2 if rank in (0, 2, 4) else 4
        # Shards are whole cache lines, so that they differ by one.
        assert sent == pytest.approx((num_far + 2) * 4 * n / 5, abs=6 * 256)
        assert sent_on_one_level == pytest.approx(8 * 4 * n / 5, abs=8 * 256)


def test_a_late_rank_of_another_host_is_named_by_all_who_came(found):
    on_time = [facts for rank, facts in enumerate(found("late")) if rank != 1]
    for facts in on_time:
        assert facts["error"] == "DeadlineError", facts
        assert "rank 1 (" in facts["text"]
        assert facts["seconds"] < 1.5 + 60


def test_known_calls_that_differ_are_refused_and_named(found):
    for facts in found("differ"):
        assert facts["error"] == "MismatchError", facts
        assert "rank 3 (" in facts["text"]
        assert "of float64 (5,)" in facts["text"]


def test_killed_ranks_are_named(found):
    check_survivors(found("kills"), NUM_KILLS)
