"""FSDP2 with our reduce-scatter: the same gradients whatever the wrapping and the order of ranks."""

from __future__ import annotations

import re
import sys

import pytest

from multiprocess import launching

LAUNCH_SECONDS = 600.0

fsdp = pytest.importorskip("torch.distributed.fsdp")


pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="launches are watched through /proc"),
    pytest.mark.skipif(
        not hasattr(getattr(fsdp, "FSDPModule", None), "set_custom_reduce_scatter"),
        reason="this PyTorch is older",
    ),
]


def test_sharded_gradients_are_reproducible_means(tmp_path, tmp_path_factory):
    with launching.in_turn(tmp_path_factory.getbasetemp().parent):
        found = launching.launch(launching.ranks("fsdp_rank.py", size=1), tmp_path / "launch", LAUNCH_SECONDS)
    assert found.codes == [0], found.output
    assert found.left == []
    assert sorted(found.reports) == [0, 1, 2, 3]
    for rank, facts in found.reports.items():
        for dtype in ("torch.float32", "torch.bfloat16"):
            assert all(facts[dtype].values()), facts[dtype]
        assert facts["asynchronous"] == [True, True, [4 * 2 * rank + 6.0, 4 * (2 * rank + 1) + 6.0]]
        assert "set_force_sum_reduction_for_comms(True)" in facts["divided"]
    printed = found.reports[0]["example"]
    for kind in ("FSDP", "HSDP"):
        same = rf"^{kind}, our reduce-scatter: layers wrapped one by one ([0-9a-f]{{16}}), all at once \1$"
        assert re.search(same, printed, re.M), printed


def test_sharded_training_is_the_same_on_any_number_of_workers(tmp_path, tmp_path_factory):
    with launching.in_turn(tmp_path_factory.getbasetemp().parent):
        commands = launching.ranks("exact_fsdp_rank.py", size=1)
        found = launching.launch(commands, tmp_path / "launch", LAUNCH_SECONDS)
    assert found.codes == [0], found.output
    assert found.left == []
    assert sorted(found.reports) == [10, 20, 21, 30, 31, 32]
    expected = found.reports[10]["plain"]
    for worker, facts in found.reports.items():
        assert facts["layers"][0] == facts["whole"][0] == expected
        assert facts["half"][0] == found.reports[10]["half"][0] != expected
        twice, nothing, *differing, outside = facts["layers"][1]
        assert "outside of micro_batch()" in outside
        assert "call optimizer.zero_grad() first" in twice
        assert "add up to 0" in nothing
        assert (worker == 10) == (differing == [])
        assert all("has is_last=" in each for each in differing)
