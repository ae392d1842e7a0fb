"""A calibration is a line through measurements, and a file that can be read."""

import pytest

from crossdevice.cli.bench import calibration
from crossdevice.cli.main import main
from crossdevice.costs.topology import read_topology


def test_the_line_goes_through_points_that_lie_on_one():
    found = calibration.fit([10**6, 10**7, 10**8], [1e-5 + size / 2e10 for size in (10**6, 10**7, 10**8)])
    assert found.call_seconds == pytest.approx(1e-5)
    assert found.bytes_per_second == pytest.approx(2e10)


def test_half_the_time_is_as_wrong_as_twice_the_time():
    found = calibration.fit([100, 100, 200, 200], [1.0, 4.0, 2.0, 8.0])
    assert found.call_seconds + 100 / found.bytes_per_second == pytest.approx(2.0)


def test_noise_never_makes_a_call_take_less_than_nothing():
    found = calibration.fit([100, 200], [1.0, 3.0])
    assert found.call_seconds == 0
    assert found.bytes_per_second > 0


def test_a_busy_machine_is_noticed_by_calls_that_differ():
    warm_up, quiet, busy = [9.0], [1.0, 1.0, 1.1, 1.1], [1.0, 1.0, 4.0, 4.0]
    assert calibration.spread_of({1: [warm_up, quiet, quiet]}) < calibration.BUSY_SPREAD
    assert calibration.spread_of({1: [warm_up, quiet, quiet], 2: [warm_up, busy, busy]}) == 4.0


def test_a_file_is_written_that_explain_can_read(tmp_path, capsys):
    path = tmp_path / "mine.toml"
    assert calibration.calibrate(path, 2, turns=1, shrink=64) == 0
    assert "16 KiB" in capsys.readouterr().out
    assert read_topology(path, 4).shares_memory
    assert main(["explain", "--topology", str(path), "--devices", "4"]) == 0


def test_other_files_are_refused(tmp_path, capsys):
    assert main(["bench", "--calibrate", str(tmp_path / "mine.json")]) == 2
    assert "expected FILE.toml" in capsys.readouterr().err
