"""PyTorch's tensors that are not what their memory says."""

from __future__ import annotations

import pytest

from crossdevice.backends.registry import backend_named

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
