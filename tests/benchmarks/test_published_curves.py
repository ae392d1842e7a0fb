"""The bounds on the model's errors hold, and the calibration in the files is the best."""

import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "published_curves.py"
specification = importlib.util.spec_from_file_location("published_curves", PATH)
published_curves = importlib.util.module_from_spec(specification)
sys.modules["published_curves"] = published_curves
specification.loader.exec_module(published_curves)


def test_all_bounds_are_kept(capsys):
    assert published_curves.main([]) == 0
    assert "all bounds are kept" in capsys.readouterr().out


@pytest.mark.parametrize("curve", published_curves.CURVES, ids=lambda curve: curve.topology)
def test_the_one_calibrated_number_is_near_the_best(curve):
    topology = published_curves.read_topology(curve.topology)
    best = published_curves.fitted_microseconds(curve, topology)
    assert topology.engine.call_seconds * 1e6 == pytest.approx(best, abs=3)


def test_a_curve_that_is_missed_fails(capsys, monkeypatch):
    curve = published_curves.CURVES[0]
    halved = curve._replace(bus_bandwidths=tuple(one and one / 2 for one in curve.bus_bandwidths))
    monkeypatch.setattr(published_curves, "CURVES", (halved,))
    assert published_curves.main([]) == 1
    assert "FAILED: mean error" in capsys.readouterr().out
