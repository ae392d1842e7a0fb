"""A transformer trained on 1 to 6 workers, killed and resumed on another number: one digest of everything."""

from __future__ import annotations

import re
import signal
import sys

import pytest

from multiprocess import launching

pytest.importorskip("torch.distributed")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="launches are watched through /proc")

LAUNCH_SECONDS = 800.0
SMALL, LARGE = 4096, 25 << 20
STEPS, FEWER_STEPS = 50, 16


def launched(
    size, folder, ways="exact", bucket_sizes=f"{SMALL},{LARGE}", checkpoints="", steps=STEPS, kill_at=""
):
    commands = launching.ranks(
        "workers_rank.py", ways, bucket_sizes, str(checkpoints), str(steps), str(kill_at), size=size
    )
    found = launching.launch(commands, folder, LAUNCH_SECONDS)
    assert found.left == []
    return found


def digests(size, folder, **arguments):
    found = launched(size, folder, **arguments)
    assert found.codes == [0] * size, found.output
    assert list(found.reports.values()) == [found.reports[0]] * size
    return found.reports[0]


def check_resumed(killed, resumed, tmp_path, expected, bucket_sizes=(SMALL, LARGE), steps=STEPS):
    """One of `killed` workers is lost, and another number goes on from the last checkpoint, with DDP."""
    for bucket_bytes in bucket_sizes:
        place = tmp_path / f"{killed} {bucket_bytes}"
        place.mkdir()
        cell = {"bucket_sizes": str(bucket_bytes), "checkpoints": place, "steps": steps}
        found = launched(killed, place / "killed", **cell, kill_at=steps * 3 // 4)
        assert found.codes[-1] == -signal.SIGKILL, found.output
        assert found.reports == {}
        assert 0 not in found.codes
        found = digests(resumed, place / "resumed", **cell, ways="exact_ddp")
        assert found == {f"exact_ddp {bucket_bytes}": expected}


def test_a_run_that_lost_a_worker_ends_on_another_number_as_one_that_lost_none(tmp_path, tmp_path_factory):
    with launching.in_turn(tmp_path_factory.getbasetemp().parent):
        (expected,) = digests(1, tmp_path / "alone", bucket_sizes=str(LARGE), steps=FEWER_STEPS).values()
        check_resumed(2, 3, tmp_path, expected, (SMALL,), FEWER_STEPS)


def test_a_worker_lost_before_it_first_finishes_a_step_is_named_at_once(tmp_path, tmp_path_factory):
    with launching.in_turn(tmp_path_factory.getbasetemp().parent):
        found = launched(3, tmp_path, bucket_sizes=str(LARGE), kill_at=0)
    assert found.codes[2] == -signal.SIGKILL, found.output
    assert 0 not in found.codes
    named = re.findall(r"ProcessGroupError: .*lost contact: .*rank 2 ", found.output)
    assert len(named) == 2, found.output


@pytest.mark.timeout(3000)
@pytest.mark.more("a matrix of 25 launches")
def test_every_cell_of_workers_and_buckets_and_resumed_runs_has_one_digest(tmp_path, tmp_path_factory):
    sizes = (1, 2, 3, 4, 6)
    with launching.in_turn(tmp_path_factory.getbasetemp().parent):
        cells = [digests(size, tmp_path / f"{size} workers", ways="exact,ddp") for size in sizes]
        (expected,) = {digest for cell in cells for way, digest in cell.items() if way.startswith("exact")}
        for killed, resumed in zip(sizes, (*sizes[1:], sizes[0]), strict=True):
            check_resumed(killed, resumed, tmp_path, expected)
    plain = {digest for cell in cells for way, digest in cell.items() if way.startswith("ddp")}
    assert len(plain) > len(sizes) - 1
