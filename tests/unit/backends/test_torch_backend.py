"""PyTorch's tensors that are not what their memory says."""

from __future__ import annotations

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.backends.registry import backend_named
from crossdevice.errors import ConversionError, OutError
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


# ----------------------------------------------------------------------------- axes in another order

ORDERS = {
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "permuted": lambda x: x.permute(1, 3, 0, 2).contiguous().permute(2, 0, 3, 1),
}


def numbers(seed, dtype=torch.float32):
    return torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int32], ids=str)
@pytest.mark.parametrize("precision", ["fast", "accurate", "exact"])
def test_results_have_the_strides_that_all_replicas_share(order, dtype, precision):
    ops, options = cd.ReductionToOneDevice(), cd.CommunicationOptions(precision=precision)
    plain = cd.PerReplica([numbers(seed, dtype) for seed in range(3)])
    laid = cd.PerReplica([ORDERS[order](array) for array in plain.values])
    for _ in range(2):  # either may have been seen first
        expected, found = (ops.reduce("mean", value, value, options=options) for value in (plain, laid))
        for left, right, given in zip(expected.values, found.values, laid.values, strict=True):
            assert left.is_contiguous()
            assert right.stride() == given.stride()
            assert torch.equal(left, right)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("is_new", [True, False], ids=["another", "in place"])
def test_arrays_of_the_shared_order_can_be_written_to(order, is_new):
    ops = cd.ReductionToOneDevice()
    arrays = [ORDERS[order](numbers(seed)) for seed in range(2)]
    expected = arrays[0] + arrays[1]
    value = cd.PerReplica(arrays)
    out = cd.Mirrored([torch.zeros_like(array) for array in arrays]) if is_new else value
    versions = [array._version for array in out.values]
    places = [array.data_ptr() for array in out.values]
    result = ops.reduce("sum", value, value, out=out)
    for array, given, place, version in zip(result.values, out.values, places, versions, strict=True):
        assert array is given
        assert (array.data_ptr(), array.stride()) == (place, arrays[0].stride())
        assert torch.equal(array, expected)
        assert array._version > version


def test_replicas_with_different_orders_are_copied_and_others_cannot_be_written_to():
    arrays = [ORDERS["channels_last"](numbers(0)), numbers(1)]
    for result in cd.all_reduce(arrays):
        assert result.is_contiguous()
        assert torch.equal(result, arrays[0] + arrays[1])
    ops, value = cd.ReductionToOneDevice(), cd.PerReplica([ORDERS["transposed"](numbers(0))] * 2)
    for out in (numbers(2)[..., ::2].repeat(1, 1, 1, 2)[..., ::2], ORDERS["permuted"](numbers(2))):
        with pytest.raises(OutError):
            ops.reduce("sum", value, "cpu:0", out=out)


def test_errors_name_shapes_as_they_were_given():
    arrays = [ORDERS["channels_last"](torch.ones(2, 3, 4, size)) for size in (5, 6)]
    with pytest.raises(cd.errors.ShapeMismatchError, match=r"\(2, 3, 4, 6\).*\(2, 3, 4, 5\)"):
        cd.all_reduce(arrays)


def test_gaps_and_repeats_are_not_an_order_of_axes():
    backend = backend_named("torch")
    assert backend.axis_order(torch.ones(4, 4).T) == (1, 0)
    assert backend.axis_order(torch.ones(4, 4)[:, :2].T) is None
    assert backend.axis_order(torch.ones(4, 1).expand(4, 4)) is None
    assert backend.axis_order(torch.ones(4)[::2]) is None
    assert backend.axis_order(torch.ones(4, 4)) is None


def test_a_tensor_that_was_reduced_can_still_be_resized():
    tensors = [torch.ones(4, requires_grad=k == 0) for k in range(2)]
    with torch.no_grad():
        for options in (cd.CommunicationOptions(), cd.CommunicationOptions(lowering="off")):
            cd.reduce(tensors, options=options)
    tensors[1].resize_(10)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_rows_of_wide_unsigned_integers_beside_dense_ones(dtype):
    ones = torch.ones(2, 1).to(getattr(torch, dtype))
    total = cd.reduce([cd.IndexedSlices(ones, torch.tensor([1, 1]), (2, 1)), ones])
    assert total.dtype == ones.dtype
    assert total.tolist() == [[1], [3]]


def test_what_was_made_for_inference_is_written_in_inference_mode_only():
    with torch.inference_mode():
        out = torch.zeros(2)
        cd.reduce([torch.ones(2), torch.ones(2)], "sum", "cpu:0", out=out)
        assert out.tolist() == [2, 2]
        cd.all_reduce([out, out.clone()], "sum", out=[out, torch.empty(2)])
        assert out.tolist() == [4, 4]
    for values in ([torch.ones(2), torch.ones(2)], [out, torch.ones(2)]):
        with pytest.raises(OutError, match="made for inference"):
            cd.reduce(values, "sum", "cpu:0", out=out)
    assert out.tolist() == [4, 4]
    assert cd.reduce([out, out], "sum").tolist() == [8, 8]


def _for_inference(dtype):
    with torch.inference_mode():
        return torch.zeros(2, dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "made", "problem"),
    [
        (torch.float32, _for_inference, "made for inference"),
        (torch.float32, lambda dtype: torch.zeros(2, dtype=dtype, requires_grad=True), "requires a gradient"),
        (torch.float32, lambda dtype: torch.zeros(1, dtype=dtype).expand(2), "not contiguous"),
        (torch.complex64, lambda dtype: torch.zeros(2, dtype=dtype).conj(), "conjugates or negates"),
        (
            torch.float32,
            lambda dtype: torch._neg_view(torch.zeros(2, dtype=dtype)),
            "conjugates or negates",
        ),
    ],
)
def test_a_call_like_those_before_refuses_what_a_first_one_refuses(dtype, made, problem):
    values = [torch.ones(2, dtype=dtype), torch.ones(2, dtype=dtype)]
    for _ in range(3):
        cd.reduce(values, "sum", "cpu:0", out=torch.empty(2, dtype=dtype))
    out = made(dtype)
    with pytest.raises(OutError, match=problem):
        cd.reduce(values, "sum", "cpu:0", out=out)
    assert out.tolist() == [0, 0]
    with pytest.raises(OutError, match=problem):
        cd.all_reduce(values, "sum", out=[values[0], out])


@pytest.mark.parametrize("frozen", [False, True])
def test_a_call_like_those_before_refuses_read_only_ndarrays(frozen):
    values = [np.ones(2, np.float32), np.ones(2, np.float32)]
    for _ in range(3):
        cd.reduce(values, "sum", "cpu:0", out=np.empty(2, np.float32))
    out = np.zeros(2, np.float32)
    out.flags.writeable = not frozen
    if not frozen:
        out = np.broadcast_to(out[:1], 2)
    with pytest.raises(OutError, match="read-only"):
        cd.reduce(values, "sum", "cpu:0", out=out)
