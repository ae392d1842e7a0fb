"""Kernels of the GPU are tested on the host too, by Triton's interpreter, which must be asked for in time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="kernels of the GPU are interpreted by Triton")
pytest.importorskip("torch")

HERE = Path(__file__).parent
ROOT = HERE.parents[3]


@pytest.mark.parametrize("part", ["interpreted_kernels.py", "interpreted_passes.py"])
def test_interpreted(part):
    paths = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(HERE / part)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
