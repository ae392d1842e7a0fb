"""The table of benchmarks/same_host.py: what is promised, and how it is judged."""

from __future__ import annotations

import pytest


def test_every_row_is_said_once_and_names_a_contender(benchmark):
    table = benchmark.rows()
    assert len({(row.text, row.engine) for row in table}) == len(table) == 18
    assert {row.ours for row in table} == {"plain", "bound", "shared", "engine"}
    assert [row.floor for row in table if row.engine == "gloo" and not row.is_time] == [
        *(4, 2, 2.2, 5, 0.91, 0.91, 0.91, 1.5)
    ]


@pytest.mark.parametrize(("ours", "is_kept"), [(20e-6, True), (30e-6, False)])
def test_times_and_ratios_are_judged(ours, is_kept, benchmark):
    time = benchmark.Row("a call", "gloo", 2, 4, "bound", 25e-6, is_time=True)
    for row in (time, time._replace(floor=4, is_time=False)):
        line, found = benchmark.judged(row, {"bound": ours, "theirs": 100e-6}, quick=False)
        assert found is is_kept
        assert line.endswith("ok" if is_kept else "MISSED")


def test_a_missing_engine_is_said_and_breaks_no_promise(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark, "peer_unavailable", lambda name: "not here")
    lines = list(benchmark.lines(benchmark.rows(), 1, quick=False))
    assert len(lines) == 18
    assert all(is_kept and line.endswith("skipped: not here") for line, is_kept in lines)
