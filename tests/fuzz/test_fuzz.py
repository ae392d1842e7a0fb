"""A slice of `make fuzz`: a minute of random reductions, and every case that failed once."""

from __future__ import annotations

import collections
import os

import pytest

from fuzz import cases
from fuzz.cases import failure_of
from fuzz.fuzzing import fuzzed, kept_rows

SEED = int(os.environ.get("FUZZ_SEED", "1"))
SECONDS = float(os.environ.get("FUZZ_SECONDS", "60"))


@pytest.mark.timeout(SECONDS + 300)
def test_random_reductions_are_what_an_independent_model_says():
    counts: collections.Counter[str] = collections.Counter()
    failure = next(fuzzed(SEED, SECONDS, counts), None)
    assert failure is None, f"FUZZ_SEED={SEED}: {failure}"
    assert counts["cases"] > 0


def test_a_wrong_result_is_found_and_made_as_simple_as_it_can_be(monkeypatch):
    reduced = cases._reduced

    def wrong_in_four(case, row, inputs):
        results, outs = reduced(case, row, inputs)
        if case.replicas == 4 and case.op == "MAX" and case.call == "plain":
            results = [[leaf + leaf for leaf in tree] for tree in results]
        return results, outs

    monkeypatch.setattr(cases, "_reduced", wrong_in_four)
    found, wrong = next(fuzzed(SEED, 250, collections.Counter()))
    assert (found.replicas, found.op, found.call, found.backend) == (4, "MAX", "plain", "numpy")
    assert "instead of" in wrong


def test_what_failed_once_does_not_fail_again():
    assert kept_rows()
    for case in kept_rows():
        assert failure_of(case) is None, case
