"""No kernel reads or writes where it should not, and none races with itself; needs compute-sanitizer."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
