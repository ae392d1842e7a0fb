"""The backend "crossdevice" of torch.distributed on GPU tensors of processes that share one GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("PyTorch sees no GPU", allow_module_level=True)

from multiprocess import launching  # noqa: E402

LAUNCH_SECONDS = 250.0


@pytest.mark.parametrize("peer_memory", ["1", "0"])
@pytest.mark.parametrize("size", [2, 4])
def test_collectives_of_gpu_tensors_do_what_those_of_gloo_do_on_the_host(
    size, peer_memory, tmp_path, monkeypatch
):
    monkeypatch.setenv("CROSSDEVICE_PEER_MEMORY", peer_memory)
    found = launching.launch(
        launching.ranks("backend_rank.py", "on GPUs", size=size), tmp_path, LAUNCH_SECONDS
    )
    assert found.codes == [0] * size, found.output
    assert found.left == []
    for facts in found.reports.values():
        assert facts["differences"] == []
        assert all(facts["streams"].values()), facts["streams"]


@pytest.mark.parametrize("size", [2, 4])
def test_programs_train_on_gpus_as_they_do_alone(size, tmp_path):
    found = launching.launch(launching.ranks("training_rank.py", "cuda", size=size), tmp_path, LAUNCH_SECONDS)
    assert found.codes == [0] * size, found.output
    for facts in found.reports.values():
        assert facts.pop("backend") == "crossdevice"
        assert facts.pop("accelerate") in (True, None)
        for name, kinds in facts.items():
            assert all(kinds.values()), (name, kinds)
