"""DistributedDataParallel with our hook: the same gradients whatever the buckets and the order of ranks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from multiprocess import launching

EXAMPLE = Path(__file__).parents[2] / "examples" / "reproducible_ddp.py"
LAUNCH_SECONDS = 600.0

pytest.importorskip("torch.distributed")


@pytest.mark.skipif(sys.platform != "linux", reason="launches are watched through /proc")
def test_gradients_are_reproducible_means(tmp_path, tmp_path_factory):
    with launching.in_turn(tmp_path_factory.getbasetemp().parent):
        found = launching.launch(launching.ranks("hook_rank.py", size=3), tmp_path / "launch", LAUNCH_SECONDS)
    assert set(found.codes) == {0}, found.output
    assert found.left == []
    assert sorted(found.reports) == [0, 1, 2]
    for facts in found.reports.values():
        for dtype in ("torch.float32", "torch.bfloat16"):
            assert all(facts[dtype].values()), facts[dtype]
            assert facts[dtype]["bits"] == found.reports[0][dtype]["bits"]
        assert facts["in buckets"] == found.reports[0]["torch.float32"]["bits"]
        # Four layers are four buckets, or three; all but that of the first layer can be done before it.
        assert facts["inside, with the hook"] >= 1
        assert facts["inside, mirrored"] >= 1
        sparse = [True, [1.0, *[pytest.approx(1 / 3)] * 3, 0.0]]
        assert facts["sparse"] == [sparse, sparse]
        assert "ProcessGroupError: this group is broken" in facts["error"]
        assert "it was told to" in facts["error"]


@pytest.mark.skipif(sys.platform != "linux", reason="launches are watched through /proc")
def test_gradients_are_means_over_the_models_own_process_group(tmp_path, tmp_path_factory):
    with launching.in_turn(tmp_path_factory.getbasetemp().parent):
        found = launching.launch(
            launching.ranks("hook_groups_rank.py", size=4), tmp_path / "launch", LAUNCH_SECONDS
        )
    assert set(found.codes) == {0}, found.output
    means = [
        {fact: mean for fact, mean in found.reports[rank].items() if not isinstance(mean, str)}
        for rank in range(4)
    ]
    pairs, neighbours = [2.0, 3.0, 2.0, 3.0], [1.5, 1.5, 3.5, 3.5]
    assert means == [
        {
            "all": 2.5,
            "alone": rank + 1.0,
            "pairs": pairs[rank],
            "pairs, given": pairs[rank],
            "mesh, across": pairs[rank],
            "mesh, along": neighbours[rank],
            "one state for two models": [pairs[rank]] * 2,
        }
        for rank in range(4)
    ]
    for rank, facts in found.reports.items():
        own = [rank % 2, rank % 2 + 2]
        refused = f"a model on ranks [0, 1, 2, 3], and this ReproducibleMean is for ranks {own}"
        assert refused in facts["one state for two groups"]
        assert refused in facts["another group given"]
        assert "has 1 process: give none" in facts["a group of another size given"]


@pytest.mark.more("one more launch")
@pytest.mark.skipif(sys.platform != "linux", reason="launches are watched through /proc")
def test_the_example_ends_with_the_same_bits_for_any_bucket_size(tmp_path, tmp_path_factory):
    with launching.in_turn(tmp_path_factory.getbasetemp().parent):
        found = launching.launch(
            launching.torchrun(str(EXAMPLE), size=3), tmp_path / "launch", LAUNCH_SECONDS
        )
    assert set(found.codes) == {0}, found.output
    digests = re.findall(r"with the hook: buckets of 0.05 MiB ([0-9a-f]{16}), of 25 MiB \1", found.output)
    assert len(digests) == 1, found.output
