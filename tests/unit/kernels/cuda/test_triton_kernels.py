"""Kernels of the GPU are tested without one: compiled for it, and run by Triton's interpreter on the host.

In processes of their own: the interpreter must be asked for before Triton is imported, and Triton cannot be
imported after TensorFlow.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.more("Triton")

HERE = Path(__file__).parent
ROOT = HERE.parents[3]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
@pytest.mark.parametrize(
    ("part", "interprets"),
    [
        ("interpreted_fingerprints.py", "1"),
        ("interpreted_kernels.py", "1"),
        ("interpreted_passes.py", "1"),
        ("interpreted_peers.py", "1"),
        ("interpreted_sums.py", "1"),
        ("compiled_kernels.py", "0"),
    ],
)
def test_in_a_process_of_its_own(part, interprets):
    paths = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(HERE / part)],
        env={**os.environ, "TRITON_INTERPRET": interprets, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
