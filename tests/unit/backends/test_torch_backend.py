"""PyTorch's tensors that are not what their memory says."""

from __future__ import annotations

import pytest

from crossdevice.backends.registry import backend_named
from crossdevice.values.device import Device

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    "view",
    [lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(), lambda: torch.tensor([1 + 2j]).conj().imag],
    ids=["conjugate", "negative"],
)
def test_the_memory_of_flat_tensors_holds_their_elements(view):
    tensor = view()
    assert tensor.is_conj() or tensor.is_neg()
    assert tensor.is_contiguous()
    flat = backend_named("torch").flat(tensor)
    assert not flat.is_conj()
    assert not flat.is_neg()  # engines read memory by its address
    assert torch.equal(flat, tensor)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(6.0),
        lambda: torch.arange(6.0).reshape(2, 3).requires_grad_(),
        lambda: torch.arange(6.0).reshape(2, 3).T,
        lambda: torch.tensor(3.0),
        lambda: torch.arange(6).to(torch.bfloat16).reshape(2, 3).T,
        lambda: torch.arange(4).to(torch.bfloat16).requires_grad_(),
        lambda: torch._neg_view(torch.arange(4).to(torch.bfloat16)),
        lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
        lambda: torch.tensor([1 + 2j]).conj().imag,
    ],
    ids=[
        "flat",
        "grad",
        "strides",
        "scalar",
        "bf16 strides",
        "bf16 grad",
        "bf16 negative",
        "conj",
        "negative",
    ],
)
def test_tensors_go_to_the_host_and_come_back(make):
    tensor, backend = make(), backend_named("torch")
    flat = backend.host_view(tensor)
    assert flat.flags.c_contiguous
    assert flat.tolist() == tensor.detach().resolve_conj().resolve_neg().reshape(-1).tolist()
    back = backend.from_host(flat, tuple(tensor.shape), Device("cpu", 1))
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor)
    assert not back.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_on_the_host_is_shared_both_ways(dtype):
    tensor, backend = torch.zeros((2, 3), dtype=dtype, requires_grad=True), backend_named("torch")
    flat = backend.host_view(tensor)
    back = backend.from_host(flat, (3, 2), Device("cpu", 1))
    assert flat.__array_interface__["data"][0] == tensor.data_ptr() == back.data_ptr()
