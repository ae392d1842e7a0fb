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
DIGEST = r"all replicas hold the same bits: sha256 ([0-9a-f]{16})\.\.\. on "


@pytest.mark.more("one more launch")
@needs_linux
@pytest.mark.parametrize("launcher", ["crossdevice run", "torchrun", pytest.param("mpirun", marks=needs_mpi)])
def test_two_processes_learn_what_one_process_learns(launcher, tmp_path, tmp_path_factory, capsys):
    picture = tmp_path / "curves.svg"
    arguments = ["demo", "--epochs", "6", "--picture", str(picture)]
    assert main(arguments) == 0
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
    (accuracy,) = re.findall(r"^4 devices +(0\.\d+) ", output, re.MULTILINE)
    assert re.findall(r"^4 devices +(0\.\d+) ", alone, re.MULTILINE) == [accuracy]
    assert re.findall(DIGEST + "4 devices of 2 processes", output) == re.findall(DIGEST, alone)
    assert picture.exists()
