"""No kernel reads or writes where it should not, and none races with itself; needs compute-sanitizer."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from multiprocess import launching

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
    pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer here"),
]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_finds_nothing(tool):
    script = str(Path(__file__).with_name("every_kernel.py"))
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, script]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
    assert "reductions" in found.stdout


@pytest.mark.parametrize(("tool", "wish"), [("memcheck", "1"), ("memcheck", "each"), ("racecheck", "1")])
def test_the_sanitizer_finds_nothing_in_kernels_over_memory_of_other_processes(tmp_path, tool, wish):
    (command, more), *others = launching.ranks(str(Path(__file__).with_name("peer_rank.py")), "few", size=2)
    checked = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *command]
    commands = [(checked, more), *others]
    commands = [(each, {**given, "CROSSDEVICE_PEER_MEMORY": wish}) for each, given in commands]
    found = launching.launch(commands, tmp_path, 200.0)
    assert found.codes == [0, 0], found.output[-4000:]
    assert (
        "RACECHECK SUMMARY: 0 hazards" if tool == "racecheck" else "ERROR SUMMARY: 0 errors"
    ) in found.output
    for facts in found.reports.values():
        assert facts["wrong"] == []
        assert facts["wrong parts"] == facts["wrong moves"] == []
        assert any(way == ["PeerReduceScatter", "cuda"] for *way, _ in facts["ways"])
        assert "the GPU memory of all" in facts["explained"]
