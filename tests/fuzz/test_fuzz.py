"""A slice of `make fuzz`: random calls for some seconds, and every case that failed once."""

from __future__ import annotations

import collections
import importlib
import itertools
import os
import random
import sys

import pytest

from fuzz import cases, combining_cases, part_cases, process_cases
from fuzz.fuzzing import cases_here, failure_of_any, fuzzed, fuzzed_between_processes, kept_rows, minimised

SEED = int(os.environ.get("FUZZ_SEED", "1"))
SECONDS = float(os.environ.get("FUZZ_SECONDS", "4"))
MORE_SECONDS = 4 * SECONDS


@pytest.mark.timeout(MORE_SECONDS + 300)
@pytest.mark.parametrize(
    "seconds", [SECONDS, pytest.param(MORE_SECONDS, marks=pytest.mark.more("a repetition"))]
)
def test_random_calls_are_what_an_independent_model_says(seconds):
    counts: collections.Counter[str] = collections.Counter()
    failure = next(fuzzed(SEED, seconds, counts), None)
    assert failure is None, f"FUZZ_SEED={SEED}: {failure}"
    assert counts["cases"] > 0


def test_random_calls_between_ranks_are_what_an_independent_model_says():
    counts: collections.Counter[str] = collections.Counter()
    for size in process_cases.SHARES:
        failures = fuzzed_between_processes(SEED, SECONDS / 3, size, counts, processes=False)
        assert not failures, f"FUZZ_SEED={SEED}: {failures}"
    assert counts["cases"] > 0


def test_a_wrong_result_is_found_and_made_as_simple_as_it_can_be(monkeypatch):
    reduced = cases._reduced

    def wrong_in_four(case, row, inputs):
        results, outs = reduced(case, row, inputs)
        if case.replicas == 4 and case.op == "MAX" and case.call == "plain":
            results = [[leaf + leaf for leaf in tree] for tree in results]
        return results, outs

    monkeypatch.setattr(cases, "_reduced", wrong_in_four)
    drawn = (
        case for case in cases.random_cases(random.Random(SEED)) if (case.replicas, case.op) == (4, "MAX")
    )
    found = minimised(next(case for case in drawn if failure_of_any(case) is not None))
    assert (found.replicas, found.op, found.call, found.backend) == (4, "MAX", "plain", "numpy")
    assert "instead of" in failure_of_any(found)


@pytest.mark.parametrize(
    ("module", "call"), [(part_cases, "_called"), (combining_cases, "_from_accumulators")]
)
def test_wrong_parts_and_wrong_means_of_models_are_found(module, call, monkeypatch):
    of_module = (case for case in cases_here(SEED) if type(case).__module__ == module.__name__)
    right = [case for case in itertools.islice(of_module, 60) if failure_of_any(case) is None]
    assert len(right) == 60
    made = getattr(module, call)
    monkeypatch.setattr(
        module, call, lambda case, *rest: made(case.__class__(**{**vars(case), "op": "SUM"}), *rest)
    )
    wrong = {case.op for case in right if failure_of_any(case) is not None}
    assert wrong
    assert "SUM" not in wrong


def test_a_wrong_result_of_one_rank_is_found_too(monkeypatch):
    reduced = process_cases._reduced

    def wrong_on_one(case, ops, trees, own):
        results = reduced(case, ops, trees, own)
        if ops.group.rank == 1 and case.op == "MIN" and case.numbers == "ordinary":
            results = [[leaf + leaf for leaf in tree] for tree in results]
        return results

    monkeypatch.setattr(process_cases, "_reduced", wrong_on_one)
    failures = fuzzed_between_processes(SEED, 60, 2, collections.Counter(), processes=False)
    assert {case.op for case, _ in failures} == {"MIN"}
    assert {case.numbers for case, _ in failures} == {"ordinary"}


def test_what_failed_once_does_not_fail_again():
    assert kept_rows()
    for case in kept_rows():
        assert failure_of_any(case) is None, case


def test_what_was_tried_is_told_below_its_area(monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", sys.path[:])  # to which a program adds
    told = importlib.import_module("fuzz.__main__")._Told()
    counted = ["parts", "parts between processes", "parts, op SUM", "parts between processes, op MAX"]
    told.add((collections.Counter(["cases", *counted]), []))
    assert told.end() == 0
    *_, summary = (lines := capsys.readouterr().out.splitlines())
    assert lines[-6:-1] == [
        "parts: 1 cases",
        "  op: 1 SUM",
        "",
        "parts between processes: 1 cases",
        "  op: 1 MAX",
    ]
    assert summary == "1 cases, 1 parts, 1 parts between processes: 0 failures"
