"""Gradients that are added up on a GPU: the bits of the host; skipped where there is no GPU."""

import pytest

from crossdevice.integrations.torch.gradient_sums import SumsOnGpu
from crossdevice.kernels.cuda import gpu_sums

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")

DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64")
SHAPES = ((3,), (64, 33), (4, 2, 3, 3), (5000,))


def gradients_of(dtype, device, spread):
    """Gradients of two steps of five micro-batches, of which some have infinities."""
    from crossdevice.integrations.torch import ExactGradients

    kind = getattr(torch, dtype)
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=kind, device=device)) for shape in SHAPES]
    exact = ExactGradients(parameters)
    generator = torch.Generator().manual_seed(1)
    found = []
    for step in range(2):
        for number in range(5):
            for parameter in parameters:
                size = parameter.shape
                wide = torch.randn(size, generator=generator, dtype=torch.float64)
                wide *= 2.0 ** torch.randint(-spread, spread, size, generator=generator)
                if step and number == 2:
                    wide.reshape(-1)[:3] = torch.tensor([torch.inf, torch.nan, -0.0])
                gradient = wide.to(kind)
                if parameter.ndim == 4:
                    gradient = gradient.contiguous(memory_format=torch.channels_last)
                parameter.grad = gradient.to(device)
            exact.add(weight=number + 1)
        exact.finish()
        for parameter in parameters:
            gradient = parameter.grad
            assert gradient.device.type == device
            found.append(gradient.cpu().reshape(-1).view(torch.uint8))
            parameter.grad = None
    return torch.cat(found)


@pytest.mark.parametrize("capacity", [0, 1 << 12])
@pytest.mark.parametrize("spread", [6, 70])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_have_the_bits_of_the_host(dtype, spread, capacity, monkeypatch):
    monkeypatch.setattr(gpu_sums, "MIN_CAPACITY", capacity)
    assert torch.equal(gradients_of(dtype, "cuda", spread), gradients_of(dtype, "cpu", spread))


def test_nothing_leaves_the_gpu_before_the_step_ends(monkeypatch):
    from crossdevice.integrations.torch import ExactGradients

    moves = []
    move = SumsOnGpu._move
    monkeypatch.setattr(SumsOnGpu, "_move", lambda *words: moves.append(0) or move(*words))
    weight = torch.nn.Parameter(torch.zeros(1 << 16, device="cuda"))
    exact = ExactGradients([weight])
    for number in range(3):
        weight.grad = torch.full_like(weight, 0.1 * number)
        exact.add()
        assert not moves
    assert "running" not in vars(exact._sums[0])
    exact.finish()
    assert moves == [0]
