"""What is fused on a GPU, what is not, and what is said about it: no GPU is needed to decide."""

from __future__ import annotations

import pytest

import crossdevice as cd
from crossdevice.backends.registry import backend_named
from crossdevice.execution import explaining, gpu_passes
from crossdevice.execution.gpu_passes import why_stepped
from crossdevice.execution.leaf_spec import LeafSpec
from crossdevice.execution.reduction import PreparedReduction, recipe_for
from crossdevice.kernels.cuda import availability
from crossdevice.kernels.cuda.families import MAX_ARRAYS
from crossdevice.plans.packing import Packing
from crossdevice.values.dtypes import result_dtype
from crossdevice.values.reduce_op import ReduceOp

pytest.importorskip("torch")

GPU, OTHER = cd.Device("cuda", 0), cd.Device("cuda", 1)
DEFAULT = cd.CommunicationOptions()


def spec_on(*devices, destinations=None, dtype="float32", library="torch"):
    return LeafSpec(backend_named(library), dtype, (5,), devices, destinations or devices)


def reason_for(spec, op="sum", options=DEFAULT):
    recipe = recipe_for(ReduceOp(op), options, len(spec.devices))
    return why_stepped(spec, recipe, result_dtype(spec.dtype, ReduceOp(op)))


def prepared(spec, options=DEFAULT, via=None):
    plan_pack = cd.DirectAllReduce().plan_pack
    return PreparedReduction([spec], ReduceOp.SUM, options, Packing(), plan_pack, via=via)


@pytest.fixture
def _no_kernels(monkeypatch):
    monkeypatch.setattr(gpu_passes, "kernels_missing", lambda: "its kernels need Triton")


@pytest.fixture
def _kernels(monkeypatch):
    monkeypatch.setattr(gpu_passes, "kernels_missing", lambda: None)


def test_one_gpu_is_one_memory_and_two_are_not():
    assert spec_on(GPU, GPU, GPU).shared_gpu == GPU
    assert spec_on(GPU, OTHER).shared_gpu is None
    assert spec_on(GPU, GPU, destinations=(cd.Device("cpu", 0),)).shared_gpu is None
    assert spec_on(cd.Device("cpu", 0)).shared_gpu is None


@pytest.mark.usefixtures("_kernels")
def test_what_has_no_kernel_is_named():
    assert reason_for(spec_on(GPU, GPU)) is None
    exact = cd.CommunicationOptions(precision="exact")
    assert reason_for(spec_on(GPU), options=exact) == "exact sums and products of float32 have no GPU kernel"
    assert reason_for(spec_on(GPU), "max", exact) is None
    assert "int64" in reason_for(spec_on(GPU, GPU, dtype="int64"), "mean")
    assert "64 replicas at most" in reason_for(spec_on(*[GPU] * (MAX_ARRAYS + 1)))
    assert "numpy" in reason_for(spec_on(GPU, library="numpy"))


@pytest.mark.usefixtures("_no_kernels")
def test_without_triton_plans_are_run_step_by_step():
    assert reason_for(spec_on(GPU, GPU)) == "its kernels need Triton"
    assert prepared(spec_on(GPU, GPU))._gpu_passes == []
    assert prepared(spec_on(GPU, GPU))._crosses_memories


@pytest.mark.usefixtures("_kernels")
def test_lowering_can_be_turned_off_and_sums_elsewhere_are_not_lowered():
    pytest.importorskip("triton")
    assert len(prepared(spec_on(GPU, GPU))._gpu_passes) == 1
    assert len(prepared(spec_on(GPU, GPU), via=GPU)._gpu_passes) == 1
    assert prepared(spec_on(GPU, GPU), via=OTHER)._gpu_passes == []
    assert prepared(spec_on(GPU, GPU), cd.CommunicationOptions(lowering="off"))._gpu_passes == []
    assert prepared(spec_on(GPU, OTHER))._gpu_passes == []


@pytest.mark.usefixtures("_kernels")
def test_explanations_say_what_becomes_of_a_plan():
    text = explaining._on_one_gpu(spec_on(GPU, GPU), ReduceOp.SUM, DEFAULT)
    assert text.endswith("in the memory of cuda:0: the plan below is lowered to one fused pass on the GPU")
    off = explaining._on_one_gpu(spec_on(GPU), ReduceOp.SUM, cd.CommunicationOptions(lowering="off"))
    assert off.endswith("run step by step: lowering is off")
    exact = cd.CommunicationOptions(precision="exact")
    assert "step by step: exact sums" in explaining._on_one_gpu(spec_on(GPU), ReduceOp.SUM, exact)


def test_a_triton_that_is_missing_or_too_old_is_named(monkeypatch):
    triton = pytest.importorskip("triton")
    try:
        monkeypatch.setattr(triton, "__version__", "3.1.0")
        availability.kernels_missing.cache_clear()
        assert availability.kernels_missing() == "its kernels need Triton 3.6 or later, and this is 3.1.0"
        monkeypatch.setitem(__import__("sys").modules, "triton", None)
        availability.kernels_missing.cache_clear()
        assert "cannot be imported" in availability.kernels_missing()
    finally:
        monkeypatch.undo()
        availability.kernels_missing.cache_clear()
