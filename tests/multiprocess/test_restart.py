"""A training that loses a process ends as one that does not."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from multiprocess import launching

EXAMPLE = Path(__file__).parents[2] / "examples" / "restart_after_failure.py"
LAUNCH_SECONDS = 600.0

pytest.importorskip("torch.distributed")


@pytest.mark.more("one more launch")
@pytest.mark.skipif(sys.platform != "linux", reason="launches are watched through /proc")
def test_a_training_that_loses_a_process_ends_with_the_bits_of_one_that_does_not(tmp_path, tmp_path_factory):
    def run(name, *arguments):
        ((command, variables),) = launching.torchrun(
            str(EXAMPLE), str(tmp_path / f"{name}.npz"), *arguments, size=2
        )
        command.insert(command.index("--standalone"), "--max-restarts=1")
        found = launching.launch([(command, variables)], tmp_path / name, LAUNCH_SECONDS)
        assert found.codes == [0], found.output
        assert found.left == []
        ((start, digest),) = re.findall(r"start (\d), 50 steps: sha256 ([0-9a-f]{16})", found.output)
        return start, digest

    with launching.in_turn(tmp_path_factory.getbasetemp().parent):
        start, digest = run("undisturbed")
        assert start == "1"
        assert run("disturbed", "25") == ("2", digest)
