"""The demo trains something real, to the same bits on any number of devices and processes, and says so."""

import contextlib
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from crossdevice.algorithms.registry import ALGORITHMS
from crossdevice.cli.demo import training
from crossdevice.cli.main import main

SUMS = r" +([0-9a-f]{16})\.\.\. +(0\.\d+) +\d+\.\d+"
ROW = r"^ +(\d+ (?:devices?|processes))" + 2 * SUMS
TWO_EPOCHS = "2f02efc7d0686e78"
"""The digest after two epochs, on any machine."""


def rows_in(text):
    """By where it ran: digest and accuracy of exact sums, then of plain ones."""
    return {name: found for name, *found in re.findall(ROW, text, re.MULTILINE)}


@pytest.mark.more("scikit-learn")
@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_devices_and_processes_learn_the_same_bits_and_float32_sums_others(backend, tmp_path, capsys):
    picture = tmp_path / "curves.svg"
    assert main(["demo", "--backend", backend, "--epochs", "8", "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    found = rows_in(printed)
    assert list(found) == ["1 device", "2 devices", "4 devices", "2 processes"]
    exact, accuracies, plain, _ = zip(*found.values(), strict=True)
    assert len(set(exact)) == 1
    assert len(set(plain)) > 1
    assert float(accuracies[0]) >= 0.94
    assert f"one digest for all with exact sums: {exact[0]}" in printed
    assert re.search(
        r"Milliseconds of a step: \d+\.\d+ on 1 device .* on 4 devices, .* in 2 processes", printed
    )
    assert str(picture) in printed
    drawn = ElementTree.parse(picture).getroot()
    lines = drawn.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 3 * 5
    # Curves that coincide: each is narrower than those below it, so that all are seen.
    exact_widths = [float(line.get("stroke-width")) for line in lines[:4]]
    assert exact_widths == sorted(exact_widths, reverse=True)
    assert len(set(exact_widths)) == 4


@pytest.mark.more("scikit-learn")
def test_the_digest_depends_on_no_blas_and_no_processor(tmp_path):
    environment = {**os.environ, "OPENBLAS_CORETYPE": "Nehalem", "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3"}
    command = [sys.executable, "-m", "crossdevice", "demo", "--epochs", "2", "--devices", "1"]
    ended = subprocess.run(
        [*command, "--picture", str(tmp_path / "p.svg")],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert rows_in(ended.stdout)["1 device"][0] == TWO_EPOCHS


def test_products_of_the_demo_are_exact():
    generator = np.random.default_rng(0)
    parameters = {
        name: (generator.standard_normal(array.shape) * 4).astype(np.float32)
        for name, array in training.initial_parameters(0).items()
    }
    images = generator.integers(0, 17, (96, 64)) / 16.0
    hidden, scores = training._forward(parameters, images)
    # In integers, which wrap at 2**63: nothing here comes near that.
    w1, b1, w2, b2 = (np.rint(array * 2.0**18).astype(np.int64) for array in parameters.values())
    before = (images * 16).astype(np.int64) @ w1 + (b1 << 4)
    assert np.array_equal(hidden, np.rint(np.maximum(before, 0) / 2.0**10) / 2.0**12)
    after = (hidden * 2**12).astype(np.int64) @ w2 + (b2 << 12)
    assert np.array_equal(scores, after / 2.0**30)


@pytest.mark.more("scikit-learn")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_trains_an_odd_number_of_devices(name, tmp_path, capsys):
    command = ["demo", "--devices", "3", "--algorithm", name, "--epochs", "2"]
    assert main([*command, "--picture", str(tmp_path / "p.svg")]) == 0
    assert rows_in(capsys.readouterr().out)["3 devices"][0] == TWO_EPOCHS


@pytest.mark.more("scikit-learn")
def test_one_device_is_compared_with_nothing(tmp_path, capsys):
    picture = tmp_path / "curves.svg"
    assert main(["demo", "--devices", "1", "--epochs", "1", "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert list(rows_in(printed)) == ["1 device"]
    drawn = ElementTree.parse(picture).getroot()
    assert len(drawn.findall(".//{http://www.w3.org/2000/svg}polyline")) == 3 * 2


@pytest.mark.parametrize(
    "wrong",
    [
        ["--devices", "0"],
        ["--devices", "9"],
        ["--epochs", "0"],
        ["--ops", "pigeon"],
        ["--picture", "curves.png"],
    ],
)
def test_arguments_out_of_range_are_refused_in_one_line(wrong, capsys):
    assert main(["demo", *wrong]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


NARROW = """
from crossdevice.cli.terminal import Section, show
show(["what was trained"], [Section("digests", ["place", "digest"], [["1 device", "0123456789abcdef" * 4]])])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
@pytest.mark.more("rich")
def test_digests_are_whole_on_narrow_terminals():
    pytest.importorskip("rich")
    parent, child = os.openpty()
    command = [sys.executable, "-c", NARROW]
    subprocess.run(command, stdout=child, env={**os.environ, "COLUMNS": "40", "TERM": "xterm"}, check=True)
    os.close(child)
    printed = b""
    # The end of a terminal that nobody has open any more is an error on Linux.
    with open(parent, "rb", buffering=0) as terminal, contextlib.suppress(OSError):
        while found := terminal.read(1000):
            printed += found
    assert b"0123456789abcdef" * 4 in printed
