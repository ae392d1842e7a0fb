"""The demo trains something real, and says so."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from crossdevice.algorithms.registry import ALGORITHMS
from crossdevice.cli.main import main


def accuracies_in(text):
    return {
        name: float(found) for name, found in re.findall(r"^(\d+ devices?) +(0\.\d+) ", text, re.MULTILINE)
    }


@pytest.mark.more("scikit-learn")
@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_four_devices_learn_what_one_device_learns(backend, tmp_path, capsys):
    picture = tmp_path / "curves.svg"
    assert main(["demo", "--backend", backend, "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    found = accuracies_in(printed)
    assert found["4 devices"] >= 0.95
    assert abs(found["4 devices"] - found["1 device"]) <= 0.01
    assert re.search(
        r"all replicas hold the same bits: sha256 [0-9a-f]{16}\.\.\. on cpu:0, cpu:1, cpu:2, cpu:3", printed
    )
    assert re.search(r"\d+ reductions by DirectAllReduce: \d+ us each", printed)
    assert str(picture) in printed
    drawn = ElementTree.parse(picture).getroot()
    assert len(drawn.findall(".//{http://www.w3.org/2000/svg}polyline")) == 6


@pytest.mark.more("scikit-learn")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_trains_an_odd_number_of_devices(name, tmp_path, capsys):
    assert (
        main(
            [
                "demo",
                "--devices",
                "3",
                "--algorithm",
                name,
                "--epochs",
                "4",
                "--picture",
                str(tmp_path / "p.svg"),
            ]
        )
        == 0
    )
    found = accuracies_in(capsys.readouterr().out)
    assert found["3 devices"] > 0.9
    assert abs(found["3 devices"] - found["1 device"]) <= 0.01


@pytest.mark.more("scikit-learn")
def test_one_device_is_compared_with_nothing(tmp_path, capsys):
    picture = tmp_path / "curves.svg"
    assert main(["demo", "--devices", "1", "--epochs", "1", "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "1 devices" not in printed
    assert len(re.findall(r"^1 device +0\.\d+ ", printed, re.MULTILINE)) == 1
    drawn = ElementTree.parse(picture).getroot()
    assert len(drawn.findall(".//{http://www.w3.org/2000/svg}polyline")) == 3


@pytest.mark.parametrize(
    "wrong", [["--devices", "0"], ["--epochs", "0"], ["--ops", "pigeon"], ["--picture", "curves.png"]]
)
def test_arguments_out_of_range_are_refused_in_one_line(wrong, capsys):
    assert main(["demo", *wrong]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
