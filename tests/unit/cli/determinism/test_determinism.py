"""`crossdevice determinism`: its table, what it saves and what it compares."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.cli.determinism.sums import PlannedSums, Sizes, changed_shares, share_of, sums_in_all_ways
from crossdevice.cli.main import main

posix = pytest.mark.skipif(sys.platform == "win32", reason="`crossdevice run` needs sessions of processes")


def shares(algorithm, ranks=4, elements=1664 * 8):
    return changed_shares(sums_in_all_ways(PlannedSums(algorithm, ranks), Sizes(ranks, elements)))


def test_a_ring_is_changed_by_everything_and_a_fold_by_the_order_of_ranks_alone():
    ring, fold = shares(cd.RingAllReduce()), shares(cd.ReductionToOneDevice())
    assert 0.13 < ring["message size"] < 0.17  # a third of the elements changes chunks
    assert 0.25 < ring["bucket size"] < 0.35
    assert 0.4 < ring["permutation"] < 0.6
    assert fold == {
        "message size": 0,
        "bucket size": 0,
        "permutation": fold["permutation"],
        "algorithm": None,
    }
    assert 0.4 < fold["permutation"] < 0.6


def test_an_element_counts_once_whichever_result_has_other_bits():
    base = np.array([1, 0, 3, 4], np.float32)
    others = [np.array([1, -0.0, 3, 4], np.float32), np.array([2, -0.0, 3, 4], np.float32)]
    assert share_of(base, others) == 0.5


def test_what_was_saved_is_compared(tmp_path, capsys):
    path = tmp_path / "before.json"
    words = ["determinism", "--backends", "ring,fold", "-n", "3", "--elements", "1000"]
    assert main([*words, "--save", str(path)]) == 0
    assert main([*words, "--compare", str(path)]) == 0
    assert "nothing differs" in capsys.readouterr().out
    saved = json.loads(path.read_text())
    saved["rows"]["fold"]["shares"]["bucket size"] = 0.25
    saved["rows"]["ring"]["digest"] = "0"
    path.write_text(json.dumps(saved))
    assert main([*words, "--compare", str(path)]) == 1
    printed = capsys.readouterr().out
    assert "ring: the sum itself has other bits" in printed
    assert "fold: bucket size changed 25.00 % of the elements, and now 0" in printed
    assert main([*words[:-1], "999", "--compare", str(path)]) == 2
    path.write_text("{}")
    assert main([*words, "--compare", str(path)]) == 2
    assert "is not what" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["--backends", "nickel"], ["-n", "1"], ["--elements", "2"], ["--backends", "nccl", "-n", "4096"]],
)
def test_what_cannot_be_done_is_refused(words, capsys):
    assert main(["determinism", *words]) == 2
    assert "expected" in capsys.readouterr().err


@posix
@pytest.mark.parametrize(
    ("backends", "ranks"),
    [
        ("crossdevice", "2"),
        pytest.param("gloo,crossdevice", "3", marks=pytest.mark.more("one more launch")),
    ],
)
def test_nothing_changes_ours_between_processes(backends, ranks, tmp_path, capsys):
    pytest.importorskip("torch")
    path = tmp_path / "found.json"
    words = ["determinism", "--backends", backends, "-n", ranks, "--elements", "999", "--save", str(path)]
    assert main(words) == 0
    said = capsys.readouterr().err.splitlines()
    assert said == [
        f"{name}: launch {number} of 2, {ranks} processes"
        for name in backends.split(",")
        for number in (1, 2)
    ]
    rows = json.loads(path.read_text())["rows"]
    for row in ("crossdevice, accurate", "crossdevice, exact"):
        found = dict(rows[row]["shares"])
        permutation = found.pop("permutation")
        assert permutation == 0 if "exact" in row else permutation < 0.01
        assert set(found.values()) == {0}
    if "gloo" in backends:
        assert rows["gloo"]["shares"]["permutation"] > 0.1
