"""The demo under launchers: as in one process, and one process speaks."""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest

from crossdevice.cli.main import main
from multiprocess import launching

LAUNCH_SECONDS = 600.0

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="launches are watched through /proc")
needs_mpi = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or launching.find_mpirun() is None,
    reason="mpi4py and mpirun are not both here",
)
ROW = r"^ +{} +([0-9a-f]{{16}})\.\.\. +(0\.\d+) "


@pytest.mark.more("one more launch")
@needs_linux
@pytest.mark.parametrize("launcher", ["crossdevice run", "torchrun", pytest.param("mpirun", marks=needs_mpi)])
def test_two_processes_learn_what_one_process_learns(launcher, tmp_path, tmp_path_factory, capsys):
    picture = tmp_path / "curves.svg"
    arguments = ["demo", "--epochs", "2", "--picture", str(picture)]
    assert main(["demo", "--epochs", "2", "--devices", "1", "--picture", str(picture)]) == 0
    alone = capsys.readouterr().out
    with launching.in_turn(tmp_path_factory.getbasetemp().parent):
        commands = {
            "crossdevice run": launching.crossdevice_run("-m", "crossdevice", *arguments, size=2),
            "torchrun": launching.torchrun("-m", "crossdevice", *arguments, size=2),
            "mpirun": launching.mpirun("-m", "crossdevice", *arguments, size=2),
        }
        found = launching.launch(commands[launcher], tmp_path / "launch", LAUNCH_SECONDS)
    assert found.codes == [0], found.output
    assert found.left == []
    output = found.output.replace("[0] ", "")
    assert "rank 0 of 2 on " in output
    assert "rank 1 of 2" not in output
    (found_alone,) = re.findall(ROW.format("1 device"), alone, re.MULTILINE)
    for place in ("2 processes", "1 device"):
        assert re.findall(ROW.format(place), output, re.MULTILINE) == [found_alone]
    assert picture.exists()
