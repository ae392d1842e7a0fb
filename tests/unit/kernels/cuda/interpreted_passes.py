"""Fused passes of a GPU on host tensors, in Triton's interpreter: from leaves and plans to results.

Collected only by test_triton_kernels.py, in a process in which TRITON_INTERPRET is set.
"""

from __future__ import annotations

import operator

import pytest
import torch

import crossdevice as cd
from crossdevice.algorithms.registry import ALGORITHMS
from crossdevice.backends.registry import backend_named
from crossdevice.execution.local.gpu_passes import GpuPasses
from crossdevice.execution.local.planning import Planner
from crossdevice.execution.local.prepared import recipe_for
from crossdevice.execution.reading.leaf_spec import LeafSpec, items_of
from crossdevice.kernels.cuda import gpu_pass
from crossdevice.plans.packing import Packing
from crossdevice.values.device import host_device
from crossdevice.values.dtypes import result_dtype
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import weights_for

SHAPES = ((5,), (3, 4), (), (0, 2), (3, 4), (3000,))
COUNT = 3


def columns_of(shapes=SHAPES, dtype="float32"):
    generator = torch.Generator().manual_seed(1)
    made = [[torch.randn(shape, generator=generator) * 9 for _ in range(COUNT)] for shape in shapes]
    return [tuple(tensor.to(getattr(torch, dtype)) for tensor in column) for column in made]


def passes_for(columns, options, op="mean", name="direct", num_packs=0, is_weighted=False):
    """Prepared as `PreparedReduction` does it, on a device that holds all replicas."""
    devices = (host_device(0),) * COUNT
    backend = backend_named("torch")
    specs = [
        LeafSpec(backend, backend.dtype_of(column[0]), tuple(column[0].shape), devices, devices)
        for column in columns
    ]
    dtypes = {number: result_dtype(spec.dtype, ReduceOp(op)) for number, spec in enumerate(specs)}
    work = GpuPasses(dict(enumerate(specs)), dtypes, host_device(0), shares_results=options.share_results)
    recipe = recipe_for(ReduceOp(op), options, COUNT, is_weighted)
    planner = Planner(ALGORITHMS.load(name)())
    if options.precision != "fast":
        for number in range(len(specs)):
            work.add_leaf(number, recipe)
        return work
    for number, pack in enumerate(Packing(num_packs=num_packs).packs(items_of(specs))):
        length = sum(stop - start for _, start, stop in pack)
        plan = planner.plan_pack(specs[pack[0].item], length, number, "fast", ReduceOp(op))
        work.add_pack(pack, plan, recipe)
    return work


def right_for(column, options, op="mean", name="direct"):
    """What host memory gets, step by step on devices of one memory."""
    value = cd.PerReplica(column, devices=["cpu:0"] * COUNT)
    return ALGORITHMS.load(name)().reduce(op, value, "cpu:0", options)


@pytest.mark.parametrize("share_results", [False, True])
def test_a_batch_has_the_results_of_the_host(share_results):
    options = cd.CommunicationOptions(share_results=share_results)
    columns = columns_of()
    work = passes_for(columns, options)
    for _ in range(2):
        results = work.run(columns, [None] * len(columns))
        for number, column in enumerate(columns):
            right = right_for(column, options)
            memories = {result.data_ptr() for result in results[number]}
            assert len(memories) == (1 if share_results or not column[0].numel() else COUNT)
            assert all(torch.equal(result, right) for result in results[number])
            assert all(result.shape == column[0].shape for result in results[number])


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fast_sums_follow_the_order_of_the_plan(name, dtype):
    options = cd.CommunicationOptions(precision="fast")
    columns = columns_of(((1000,),), dtype)
    (results,) = passes_for(columns, options, "sum", name).run(columns, [None]).values()
    assert all(torch.equal(result, right_for(columns[0], options, "sum", name)) for result in results)


def test_packs_may_cut_through_leaves():
    options = cd.CommunicationOptions(precision="fast")
    columns = columns_of()
    results = passes_for(columns, options, "sum", "one_device", num_packs=4).run(columns, [None] * 6)
    for number, column in enumerate(columns):
        right = right_for(column, options, "sum", "one_device")
        assert all(torch.equal(result, right) for result in results[number])


def test_results_go_to_out_in_place_included():
    options = cd.CommunicationOptions()
    columns = columns_of()
    right = [right_for(column, options) for column in columns]
    new = tuple(torch.zeros(3, 4) for _ in range(COUNT))
    strided = tuple(torch.zeros(4, 3).t() for _ in range(COUNT))
    outs = [columns[0], new, None, None, strided, (columns[5][1], columns[5][0], torch.zeros(3000))]
    versions = [tensor._version for tensor in new]
    results = passes_for(columns, options).run(columns, outs)
    for number, out in enumerate(outs):
        if out is not None:
            assert all(result is target for result, target in zip(results[number], out, strict=True))
        assert all(torch.equal(result, right[number]) for result in results[number])
    assert all(tensor._version > before for tensor, before in zip(new, versions, strict=True))


def test_inputs_may_have_gaps_and_be_views_as_conjugates():
    options = cd.CommunicationOptions()
    whole = torch.randn(COUNT, 6, 10)
    columns = [
        tuple(part[::2].t() for part in whole),
        tuple(torch.randn(4, dtype=torch.complex64).conj() for _ in range(COUNT)),
    ]
    results = passes_for(columns, options).run(columns, [None, None])
    for number, column in enumerate(columns):
        assert all(torch.equal(result, right_for(column, options)) for result in results[number])


def test_weights_may_change_from_call_to_call():
    columns = columns_of() + columns_of(((7,), (9,)), "float64")
    work = passes_for(columns, cd.CommunicationOptions(), is_weighted=True)
    for factors in ((3.0, 0.0, 0.5), (0.1, 0.2, 0.3)):
        results = work.run(columns, [None] * len(columns), weights_for(factors, ReduceOp.MEAN))
        for number, column in enumerate(columns):
            right = cd.reduce(cd.PerReplica(column, devices=["cpu:0"] * COUNT), "mean", weights=factors)
            assert all(torch.equal(result, right) for result in results[number])


def test_dtypes_of_a_batch_may_differ():
    options = cd.CommunicationOptions()
    dtypes = ("float32", "int8", "bfloat16", "int32", "float32", "complex64", "uint8")
    columns = [columns_of(((7,),), dtype)[0] for dtype in dtypes]
    results = passes_for(columns, options).run(columns, [None] * len(columns))
    for number, column in enumerate(columns):
        right = right_for(column, options)
        assert all(result.dtype == right.dtype and torch.equal(result, right) for result in results[number])


def test_addresses_are_sent_only_when_they_change(monkeypatch):
    sent = []
    numbers_for = gpu_pass.AddressTable.numbers_for

    def counted(self, addresses):
        sent.append(list(addresses))
        return numbers_for(self, addresses)

    monkeypatch.setattr(gpu_pass.AddressTable, "numbers_for", counted)
    options = cd.CommunicationOptions()
    columns = columns_of()
    outs = [tuple(torch.zeros(column[0].shape) for _ in range(COUNT)) for column in columns]
    work = passes_for(columns, options)
    for _ in range(3):
        work.run(columns, outs)
    assert len(sent) == 1
    others = [tuple(tensor.clone() for tensor in column) for column in columns]
    results = work.run(others, outs)
    assert len(sent) == 2
    assert torch.equal(results[5][2], right_for(columns[5], options))


def test_results_are_ordinary_tensors():
    columns = columns_of(((4,), (2, 2)))
    results = passes_for(columns, cd.CommunicationOptions()).run(columns, [None, None])
    for result in (*results[0], *results[1]):
        assert result.is_leaf
        assert not result._is_view()
        result.add_(torch.ones(result.shape, requires_grad=True))
        assert result.requires_grad


def test_which_outputs_kernels_write_to_may_differ_from_call_to_call():
    options = cd.CommunicationOptions()
    shapes = ((3, 4), (3, 4), (5,))
    work = passes_for(columns_of(shapes), options)
    for _ in range(3):
        for kind in ("in place", "strided", "strided only", "none"):
            columns = columns_of(shapes)
            right = [right_for(column, options) for column in columns]
            strided = tuple(torch.zeros(4, 3).t() for _ in range(COUNT))
            outs = {
                "in place": [columns[0], None, columns[2]],
                "strided": [strided, columns[1], None],
                "strided only": [None, strided, None],
                "none": [None, None, None],
            }[kind]
            results = work.run(columns, outs)
            for number, out in enumerate(outs):
                assert all(torch.equal(result, right[number]) for result in results[number])
                if out is not None:
                    assert all(map(operator.is_, results[number], out))
                    assert all(tensor._version for tensor in out)


def test_a_bound_pass_reduces_what_its_arrays_hold_then():
    options = cd.CommunicationOptions()
    columns = columns_of()
    outs = [tuple(torch.zeros(column[0].shape) for _ in range(COUNT)) for column in columns]
    run = passes_for(columns, options).bound(columns, outs)
    for factor in (1, 2):
        for column in columns:
            for tensor in column:
                tensor.mul_(factor)
        run()
        for column, out in zip(columns, outs, strict=True):
            assert all(torch.equal(tensor, right_for(column, options)) for tensor in out)
    assert all(tensor._version == 2 for out in outs for tensor in out)


def test_a_bound_pass_reads_arrays_with_gaps_anew():
    options = cd.CommunicationOptions()
    columns = [tuple(part[::2].t() for part in torch.randn(COUNT, 6, 10))]
    outs = [tuple(torch.zeros(10, 3) for _ in range(COUNT))]
    run = passes_for(columns, options).bound(columns, outs)
    for _ in range(2):
        columns[0][1].add_(1)
        run()
        assert all(torch.equal(tensor, right_for(columns[0], options)) for tensor in outs[0])
