"""Small programs, written once, run on the real `tf.distribute` and on crossdevice, side by side."""

from __future__ import annotations

import fnmatch
import logging

import pytest

from parity import libraries, reduction_programs, strategy_programs, update_programs, variable_programs
from parity.deviations import DEVIATIONS

tf = pytest.importorskip("tensorflow")

pytestmark = pytest.mark.more("TensorFlow")

PROGRAMS = {
    f"{subject}: {name}": program
    for subject, programs in (
        ("variables", variable_programs.PROGRAMS),
        ("reductions", reduction_programs.PROGRAMS),
        ("strategies", strategy_programs.PROGRAMS),
        ("updates", update_programs.PROGRAMS),
    )
    for name, program in programs.items()
}


@pytest.fixture(scope="module", autouse=True)
def _quiet_tensorflow():
    logger = tf.get_logger()
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


def deviations_of(name):
    return [pattern for pattern in DEVIATIONS if fnmatch.fnmatchcase(name, pattern)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_the_same_in_both_or_is_a_decided_deviation(name):
    theirs = libraries.outcome(PROGRAMS[name], libraries.tensorflow())
    ours = libraries.outcome(PROGRAMS[name], libraries.crossdevice())
    if deviations_of(name):
        assert ours != theirs, f"both give {ours}: take it out of the table of deviations"
    else:
        assert ours == theirs


def test_there_are_enough_programs_and_every_deviation_is_one_of_them():
    assert len(PROGRAMS) >= 150
    used = {pattern for name in PROGRAMS for pattern in deviations_of(name)}
    assert used == set(DEVIATIONS)
    assert all(reason.endswith(".") for reason in DEVIATIONS.values())
