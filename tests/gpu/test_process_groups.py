"""Groups of processes with tensors on a GPU: NCCL with the one rank that one GPU allows, and by the host."""

from __future__ import annotations

import pytest

import crossdevice as cd

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("PyTorch sees no GPU", allow_module_level=True)

from crossdevice.process_groups.engines.torch_engine import form_group  # noqa: E402
from multiprocess.launching import free_port  # noqa: E402


@pytest.fixture
def group():
    with form_group(0, 1, "127.0.0.1", free_port(), timeout_seconds=60.0) as group:
        yield group


@pytest.mark.parametrize("precision", ["fast", "accurate", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.int64])
def test_a_group_of_one_reduces_its_gpu(group, precision, dtype):
    ops = cd.CollectiveAllReduce(group=group, options=cd.CommunicationOptions(precision=precision))
    tensors = [torch.arange(1000, device="cuda").remainder(7).to(dtype) for _ in range(3)]
    value = cd.PerReplica(tensors, ["cuda:0"] * 3)
    for tensor in ops.reduce("sum", value, value).values:
        assert tensor.is_cuda
        assert torch.equal(tensor, 3 * tensors[0])


def test_nccl_waits_for_the_producer_on_another_stream(group):
    ops = cd.CollectiveAllReduce(group=group, options=cd.CommunicationOptions(precision="fast"))
    tensor = torch.zeros(1 << 20, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        tensor += 5
        result = ops.reduce("sum", tensor, "cuda:0")
        assert bool((result == 5).all())
    assert "the engine's own all-reduce" in ops.explain(tensor, "cuda:0")
