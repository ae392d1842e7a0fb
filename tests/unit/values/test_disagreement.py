"""Who is the odd one out, in words."""

import pytest

from crossdevice.values.disagreement import MAX_NUMBERS, disagreement, numbered

RANKS = [f"rank {rank} (host-{rank})" for rank in range(5)]


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ({0: "a", 1: "a"}, None),
        ({}, None),
        ({0: "a", 1: "b"}, "rank 1 (host-1) has shape b; rank 0 (host-0) has a"),
        ({0: "a", 1: "b", 2: "b"}, "rank 0 (host-0) has shape a; ranks 1, 2 have b"),
        (
            dict(enumerate("abbcb")),
            "rank 0 (host-0) has shape a; rank 3 (host-3) has shape c; the other 3 have b",
        ),
        (dict(enumerate("aabbb")), "ranks 0, 1 have shape a; the other 3 have b"),
    ],
)
def test_the_smaller_parties_come_first_and_a_single_member_is_named_in_full(answers, text):
    assert disagreement(answers, RANKS, "has shape") == text


def test_many_members_are_counted():
    assert numbered("rank", [3]) == "rank 3"
    assert numbered("replica", range(MAX_NUMBERS + 1)) == f"{MAX_NUMBERS + 1} replicas"
