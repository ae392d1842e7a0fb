"""PyTorch's tensors that are not what their memory says."""

from __future__ import annotations

import pytest

import crossdevice as cd
from crossdevice.backends.registry import backend_named
from crossdevice.errors import ConversionError
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


def sparse_rows(indices, value):
    rows = torch.full((len(indices), 2), value)
    return torch.sparse_coo_tensor([indices], rows, (4, 2), check_invariants=True)


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_sparse_rows_are_reduced_and_come_back_as_sparse_tensors(op):
    ops = cd.ReductionToOneDevice()
    cd.all_reduce([torch.ones(4, 2)] * 2)  # dense tensors, of the same type, have been seen
    for _ in range(2):
        value = cd.PerReplica([sparse_rows([0, 2, 2], 1.0), sparse_rows([2], 4.0)])
        result = ops.reduce(op, value, value)
        for component in result.values:
            assert component.layout == torch.sparse_coo
            share = 1 if op == "sum" else 2
            assert component.to_dense()[:, 0].tolist() == [1 / share, 0, 6 / share, 0]


def test_sparse_and_dense_tensors_add_up_to_dense_ones():
    value = {"table": sparse_rows([1], 2.0)}, {"table": torch.ones(4, 2)}
    for result in cd.all_reduce(list(value)):
        assert result["table"][:, 0].tolist() == [1, 3, 1, 1]


def test_sparse_tensors_in_batches_that_were_dense_are_noticed():
    ops, dense = cd.ReductionToOneDevice(), cd.PerReplica([torch.ones(4, 2)] * 2)
    sparse = cd.PerReplica([sparse_rows([0], 1.0), sparse_rows([3], 1.0)])
    for middle in (dense, dense, sparse, dense):
        pairs = [(value, "cpu:0") for value in (dense, middle, dense)]
        results = ops.batch_reduce("sum", pairs)
        assert [result.is_sparse for result in results] == [False, middle is sparse, False]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_other_sparse_tensors_are_refused_by_what_they_are():
    with pytest.raises(ConversionError, match=r"torch\.sparse_coo tensor on cpu.*one sparse axis"):
        cd.all_reduce([torch.eye(2).to_sparse_coo()] * 2)
    with pytest.raises(ConversionError, match=r"torch\.sparse_csr tensor on cpu"):
        cd.all_reduce([torch.eye(2).to_sparse_csr()] * 2)
