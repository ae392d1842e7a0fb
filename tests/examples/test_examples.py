"""Every example runs, prints something, and is short."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

NEEDED = {"keras_digits": "tensorflow", "torch_training_loop": "torch", "reproducible_ddp": "torch"}
"""Libraries that examples need and crossdevice does not."""

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs(path, tmp_path):
    library = NEEDED.get(path.stem, "numpy")
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    environment = {**os.environ, "PYTHONWARNINGS": "error::DeprecationWarning:crossdevice"}
    answer = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=120,
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip()
    assert not list(tmp_path.iterdir()), "examples write no files"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_is_shorter_than_60_lines(path):
    assert len(path.read_text().splitlines()) < 60
