"""Processes on one GPU reduce over each other's memory, with the bits of the host. Skipped without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from multiprocess import launching

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("PyTorch sees no GPU", allow_module_level=True)

RANK = Path(__file__).with_name("peer_rank.py")


@pytest.mark.parametrize("size", [2, 3, 4])
def test_peer_memory_gives_the_bits_of_the_host(tmp_path, size):
    found = launching.launch(launching.torchrun(str(RANK), "laws", size=size), tmp_path, 250.0)
    assert found.codes == [0], found.output
    for facts in found.reports.values():
        assert facts["explained"] == "1 values: each process sums its shard from the GPU memory of all"
        assert facts["cases"] > 400
        assert facts["wrong"] == []
        truths = ("two replicas", "out", "transposed", "in place", "tree", "repeated", "late")
        for name in truths:
            answers = facts[name] if isinstance(facts[name], list) else [facts[name]]
            assert all(answers), name


def test_a_group_that_may_not_says_so_and_goes_through_the_host(tmp_path, monkeypatch):
    monkeypatch.setenv("CROSSDEVICE_PEER_MEMORY", "0")
    found = launching.launch(launching.torchrun(str(RANK), "laws", size=2), tmp_path, 250.0)
    assert found.codes == [0], found.output
    for facts in found.reports.values():
        assert facts["wrong"] == []
        assert "CROSSDEVICE_PEER_MEMORY=0" not in facts["explained"]  # the last line says what is sent
