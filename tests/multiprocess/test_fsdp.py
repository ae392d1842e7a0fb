"""FSDP2 with our reduce-scatter: the same gradients whatever the wrapping and the order of ranks."""

from __future__ import annotations

import re
import sys

import pytest

from multiprocess import launching

LAUNCH_SECONDS = 600.0

fsdp = pytest.importorskip("torch.distributed.fsdp")


@pytest.mark.skipif(sys.platform != "linux", reason="launches are watched through /proc")
@pytest.mark.skipif(
    not hasattr(getattr(fsdp, "FSDPModule", None), "set_custom_reduce_scatter"),
    reason="this PyTorch is older",
)
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
