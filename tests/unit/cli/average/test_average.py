"""`crossdevice average`, with all it can be told."""

import io

import numpy as np
import pytest

from crossdevice.cli.main import main
from crossdevice.cli.terminal import ByteProgress


def saved(folder, **files):
    for name, array in files.items():
        np.savez(folder / f"{name}.npz", w=array, n=np.array([len(name)]))
    return [str(folder / f"{name}.npz") for name in files]


def test_it_writes_the_weighted_mean_and_says_where(tmp_path, capsys):
    paths = saved(tmp_path, a=np.float32([1, 2]), bbb=np.float32([5, 6]))
    output = tmp_path / "mean.npz"
    assert main(["average", *paths, "-o", str(output), "--weights", "3,1"]) == 0
    assert {name: array.tolist() for name, array in np.load(output).items()} == {"w": [2, 3], "n": [2]}
    words = ["--exact", "--dtype", "float64", "--integers", "max", "--keys", "union"]
    assert main(["average", *paths, "-o", str(output), *words]) == 0
    found = np.load(output)
    assert (found["w"].dtype, found["n"].tolist()) == (np.float64, [3])
    assert capsys.readouterr() == ("", 2 * f"wrote {output}, the mean of 2 files\n")


def test_mistakes_are_one_line(tmp_path, capsys):
    paths = saved(tmp_path, a=np.float32([1, 2]), b=np.float32([5]))
    assert main(["average", *paths, "-o", str(tmp_path / "mean.npz")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("crossdevice average: file 1 (")
    assert said.count("\n") == 1
    with pytest.raises(SystemExit):
        main(["average", *paths, "-o", str(tmp_path / "mean.npz"), "--weights", "three"])
    assert "'three' is not a list of numbers such as 3,1" in capsys.readouterr().err


def test_the_bar_is_drawn_on_terminals_only(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("crossdevice.cli.terminal.SECONDS_BETWEEN", 0)
    for stream, is_shown in ((io.StringIO(), False), (Terminal(), True)):
        with ByteProgress(stream) as progress:
            progress.update(10**9, 4 * 10**9)
        assert ("25 %  1.00 of 4.00 GB" in stream.getvalue()) == is_shown
        assert stream.getvalue().endswith("\x1b[K") == is_shown
