"""Strategies over real processes compute what one process computes."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import crossdevice as cd
from multiprocess import launching
from multiprocess.strategy_laws import LAWS
from multiprocess.strategy_rank import digest

LAUNCH_SECONDS = 600.0

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="launches are watched through /proc")


@needs_linux
@pytest.mark.parametrize("grid", [pytest.param("4,4", marks=pytest.mark.more("a repetition")), "3,1,4"])
def test_processes_compute_what_one_process_computes(grid, tmp_path, tmp_path_factory):
    size = len(grid.split(","))
    with launching.in_turn(tmp_path_factory.getbasetemp().parent):
        found = launching.launch(
            launching.ranks("strategy_rank.py", grid, size=size), tmp_path / "launch", LAUNCH_SECONDS
        )
    assert set(found.codes) == {0}, found.output
    assert found.left == []
    strategy = cd.MirroredStrategy([f"cpu:{index}" for index in range(8)])
    with np.errstate(over="ignore"):
        expected = {name: digest(law(strategy)) for name, law in LAWS.items()}
    assert {rank: facts["digests"] for rank, facts in found.reports.items()} == dict.fromkeys(
        range(size), expected
    )
    for rank, facts in found.reports.items():
        assert f"rank {rank} of {size} on gloo" in facts["explained"]
        assert facts["told"].startswith("ZeroDivisionError: " if rank == 0 else "ProcessGroupError: ")
        assert "no mean of nothing" in facts["told"]
