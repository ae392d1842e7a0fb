"""Every example runs, prints what the site shows, and is short."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NEEDED = {
    "keras_digits": "tensorflow",
    "torch_training_loop": "torch",
    "any_number_of_workers": "torch",
    "reproducible_ddp": "torch",
    "fsdp2_reproducible": "torch",
    "data_parallel": "torch",
    "where_runs_part": "torch",
}
"""Libraries that examples need and crossdevice does not."""

DIGEST = re.compile(r"\b[0-9a-f]{16}\b")
NUMBER = re.compile(r"-?\d+\.?\d*(?:e[+-]\d+)?")

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


def text_and_numbers(output):
    """The text without digests and numbers, and the numbers, which other machines round in another way."""
    text = DIGEST.sub("DIGEST", output)
    return NUMBER.sub("NUMBER", text), [float(number) for number in NUMBER.findall(text)]


def marks_of(path):
    """`make test` has the examples on NumPy, which take a second each."""
    reason = {"tensorflow": "TensorFlow", "torch": "a repetition"}.get(NEEDED.get(path.stem))
    return [pytest.mark.more(reason)] if reason else []


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=marks_of(path), id=path.stem) for path in EXAMPLES],
)
def test_the_example_prints_what_was_recorded(path, tmp_path):
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
        timeout=240,
    )
    assert answer.returncode == 0, answer.stderr
    recorded = path.parent / "output" / f"{path.stem}.txt"
    (text, numbers), (known_text, known_numbers) = map(
        text_and_numbers, (answer.stdout, recorded.read_text())
    )
    hint = f"if the output is right: python examples/{path.name} > examples/output/{recorded.name}"
    assert text == known_text, hint
    assert numbers == pytest.approx(known_numbers, rel=0.05, abs=2e-3), hint
    assert not list(tmp_path.iterdir()), "examples write no files"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_is_shorter_than_60_lines(path):
    assert len(path.read_text().splitlines()) < 60
