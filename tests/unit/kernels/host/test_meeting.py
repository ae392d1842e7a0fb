"""A compiled step: who has come, who differs, who has given up, and who has to be woken."""

from __future__ import annotations

from array import array

import pytest

pytest.importorskip("numba")

from crossdevice.kernels.host.llvm.meeting import ALL, ALL_AND_SLEEPERS, NOT_ALL, compiled_meeting

STEP, KEY = 7, [11, 12]
KEY_BYTES = 24


def met(*others):
    """What a rank finds that comes to a step; others are a step, a withdrawal, a sleep and a key."""
    blocks = [array("q", [0, 0, 0, *KEY]), *(array("q", [*words, *key]) for *words, key in others)]
    own, *places = (block.buffer_info()[0] for block in blocks)
    pointers = array("q", places)
    found = compiled_meeting()(own, *pointers.buffer_info(), KEY_BYTES, len(KEY), STEP, 3)
    assert blocks[0].tolist() == [STEP, 0, 0, *KEY]
    return found


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([(STEP, 0, 0, KEY)], ALL),
        ([(STEP + 1, STEP - 1, 0, KEY), (STEP, 0, 0, KEY)], ALL),
        ([(STEP + 1, STEP + 1, 0, KEY), (STEP, 0, 0, KEY)], ALL),
        ([(STEP, 0, 0, KEY), (STEP, 0, 1, KEY)], ALL_AND_SLEEPERS),
        ([(STEP, 0, 0, KEY), (STEP - 1, 0, 1, KEY)], NOT_ALL),
        ([(STEP, STEP, 0, KEY), (STEP, 0, 0, KEY)], NOT_ALL),
        ([(STEP, 0, 0, KEY), (STEP, 0, 0, [11, 13])], NOT_ALL),
        ([], ALL),
    ],
)
def test_a_step_is_over_when_all_have_come_with_the_same_key_and_nobody_has_withdrawn(others, expected):
    assert met(*others) == expected
