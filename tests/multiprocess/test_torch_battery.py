"""PyTorch's own battery for backends, on ours: what passes on gloo passes, profiler events included.

`make test` runs a sample on ours; `make battery` all of it on both, with 2 and 3 ranks, in half an hour.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import crossdevice

SECONDS = 1800
HERE = Path(__file__).parent

SAMPLE = (
    "test_all_gather_object_default_pg",
    "test_all_reduce_full_group_max",
    "test_all_to_all_single_unequal_split",
    "test_barrier_full_group",
    "test_broadcast_group",
    "test_DistributedDataParallelCPU",
    "test_isend_autograd_profiler",
    "test_reduce_full_group_sum",
    "test_scatter_checks",
    "test_send_recv_any_source",
)

pytest.importorskip("expecttest", reason="PyTorch's tests need it")
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="its ranks are forked"),
    pytest.mark.timeout(2 * SECONDS),
]


def outcomes(backend, size, folder, names=()):
    """What became of each test; the battery prints more than a terminal holds."""
    path = folder / f"{backend}.json"
    paths = [str(Path(crossdevice.__file__).parents[1]), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    with open(folder / f"{backend}.log", "wb") as log:
        subprocess.run(
            [sys.executable, str(HERE / "torch_battery.py"), backend, str(size), str(path), *names],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=log,
            stderr=log,
            timeout=SECONDS,
            check=True,
        )
    return json.loads(path.read_text())


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.more("a repetition")), 3])
def test_a_sample_passes(tmp_path, size):
    found = outcomes("crossdevice", size, tmp_path, SAMPLE)
    assert {name: row for name, row in found.items() if row[0] == "failed"} == {}
    assert sum(row[0] == "passed" for row in found.values()) > len(SAMPLE) / 2


@pytest.mark.more("PyTorch's whole battery")
@pytest.mark.skipif(
    "CROSSDEVICE_WHOLE_BATTERY" not in os.environ, reason="`make battery` runs the whole battery"
)
@pytest.mark.parametrize("size", [2, 3])
def test_what_passes_on_gloo_passes(tmp_path, size):
    theirs = outcomes("gloo", size, tmp_path)
    ours = outcomes("crossdevice", size, tmp_path)
    lost = {
        name: ours[name]
        for name, row in theirs.items()
        if row[0] == "passed" and ours[name][0] != "passed" and "monitored_barrier" not in name
    }
    assert lost == {}
