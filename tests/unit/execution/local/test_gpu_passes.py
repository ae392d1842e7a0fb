"""What is fused on a GPU, what is not, and what is said about it: no GPU is needed to decide."""

from __future__ import annotations

import sys
import types

import pytest

import crossdevice as cd
from crossdevice.backends.registry import backend_named
from crossdevice.execution import runner
from crossdevice.execution.local import gpu_passes
from crossdevice.execution.local import prepared as reduction
from crossdevice.execution.local.gpu_passes import fused_pass_unavailable
from crossdevice.execution.local.passes import Passes
from crossdevice.execution.local.planning import Planner
from crossdevice.execution.local.prepared import recipe_for
from crossdevice.execution.reading.leaf_spec import LeafSpec
from crossdevice.kernels.cuda import driver
from crossdevice.kernels.cuda.families import MAX_ARRAYS
from crossdevice.values.dtypes import result_dtype
from crossdevice.values.reduce_op import ReduceOp

pytest.importorskip("torch")

GPU, OTHER = cd.Device("cuda", 0), cd.Device("cuda", 1)
DEFAULT = cd.CommunicationOptions()


def spec_on(*devices, destinations=None, dtype="float32", library="torch"):
    return LeafSpec(backend_named(library), dtype, (5,), devices, destinations or devices)


def reason_for(spec, op="sum", options=DEFAULT):
    recipe = recipe_for(ReduceOp(op), options, len(spec.devices))
    return fused_pass_unavailable(spec, recipe, result_dtype(spec.dtype, ReduceOp(op)))


class Recorded(Passes):
    """Takes the place of `GpuPasses`, which needs Triton."""

    def __init__(self, specs, dtypes, device, *, shares_results):
        super().__init__(specs)


def num_fused(spec, options=DEFAULT, via=None):
    """How many leaves of a batch of one are fused on a GPU; the others are run step by step."""
    ops = cd.DirectAllReduce()
    ops.reduce_to_device = via
    prepared = Planner(ops).prepared((spec,), ReduceOp.SUM, options)
    on_gpus = [part for part in prepared._parts if isinstance(part, reduction.GpuPasses)]
    assert len(on_gpus) in (0, len(prepared._parts))
    return len(on_gpus)


@pytest.fixture
def _no_kernels(monkeypatch):
    monkeypatch.setattr(gpu_passes, "kernels_unavailable", lambda: "its kernels need Triton")


@pytest.fixture
def _kernels(monkeypatch):
    monkeypatch.setattr(reduction, "GpuPasses", Recorded)
    monkeypatch.setattr(gpu_passes, "kernels_unavailable", lambda: None)
    monkeypatch.setattr(gpu_passes, "gpu_unavailable", lambda index: None)


def test_one_gpu_is_one_memory_and_two_are_not():
    assert spec_on(GPU, GPU, GPU).shared_gpu == GPU
    assert spec_on(GPU, OTHER).shared_gpu is None
    assert spec_on(GPU, GPU, destinations=(cd.Device("cpu", 0),)).shared_gpu is None
    assert spec_on(cd.Device("cpu", 0)).shared_gpu is None


@pytest.mark.usefixtures("_kernels")
def test_what_has_no_kernel_is_named():
    assert reason_for(spec_on(GPU, GPU)) is None
    exact = cd.CommunicationOptions(precision="exact")
    assert reason_for(spec_on(GPU), options=exact) is None
    wide = spec_on(GPU, dtype="float64")
    assert reason_for(wide, "prod", exact) == "exact products of float64 have no GPU kernel"
    assert reason_for(spec_on(GPU), "max", exact) is None
    assert "int64" in reason_for(spec_on(GPU, GPU, dtype="int64"), "mean")
    many = [GPU] * (MAX_ARRAYS + 1)
    assert "64 replicas at most" in reason_for(spec_on(*many))
    assert "64 replicas at most" in reason_for(spec_on(*many), "max", exact)
    assert reason_for(spec_on(*many, dtype="complex128"), "mean", exact) is None
    assert "numpy" in reason_for(spec_on(GPU, library="numpy"))


@pytest.mark.usefixtures("_no_kernels")
def test_without_triton_plans_are_run_step_by_step():
    assert reason_for(spec_on(GPU, GPU)) == "its kernels need Triton"
    assert num_fused(spec_on(GPU, GPU)) == 0


@pytest.mark.usefixtures("_kernels")
def test_lowering_can_be_turned_off_and_sums_elsewhere_are_not_lowered():
    assert num_fused(spec_on(GPU, GPU)) == 1
    assert num_fused(spec_on(GPU, GPU), cd.CommunicationOptions(precision="fast")) == 1
    assert num_fused(spec_on(GPU, GPU), via=GPU) == 1
    assert num_fused(spec_on(GPU, GPU), via=OTHER) == 0
    assert num_fused(spec_on(GPU, GPU), cd.CommunicationOptions(lowering="off")) == 0
    assert num_fused(spec_on(GPU, OTHER)) == 0


@pytest.mark.usefixtures("_kernels")
def test_explanations_say_what_becomes_of_a_plan():
    text = runner._on_one_gpu(spec_on(GPU, GPU), ReduceOp.SUM, DEFAULT)
    assert text.endswith(
        "in the memory of cuda:0: one fused pass adds in replica order what the plan below was proved to add"
    )
    off = runner._on_one_gpu(spec_on(GPU), ReduceOp.SUM, cd.CommunicationOptions(lowering="off"))
    assert off.endswith("run step by step: lowering is off")
    exact = cd.CommunicationOptions(precision="exact")
    assert "step by step: exact products" in runner._on_one_gpu(spec_on(GPU), ReduceOp.PROD, exact)


def test_a_gpu_that_is_too_old_is_named(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (6, index))
    driver.gpu_unavailable.cache_clear()
    try:
        assert driver.gpu_unavailable(1) == (
            "its kernels need compute capability 8.0 or later, and this GPU has 6.1"
        )
    finally:
        driver.gpu_unavailable.cache_clear()


@pytest.fixture
def _asked_anew():
    driver.kernels_unavailable.cache_clear()
    yield
    driver.kernels_unavailable.cache_clear()


@pytest.mark.usefixtures("_asked_anew")
@pytest.mark.parametrize(
    ("triton", "reason"),
    [
        (types.SimpleNamespace(__version__="3.6.0"), None),
        (types.SimpleNamespace(__version__="3.1.0"), "need Triton 3.6 or later, and this is 3.1.0"),
        (None, "need PyTorch and Triton, which cannot be imported"),
    ],
    ids=["there", "too old", "missing"],
)
def test_a_triton_that_is_missing_or_too_old_is_named(monkeypatch, triton, reason):
    monkeypatch.setitem(sys.modules, "triton", triton)
    found = driver.kernels_unavailable()
    assert found is None if reason is None else reason in found


@pytest.mark.usefixtures("_asked_anew")
def test_triton_is_not_imported_after_tensorflow_which_would_end_the_process(monkeypatch):
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setitem(sys.modules, "tensorflow", types.SimpleNamespace())
    assert "before TensorFlow" in driver.kernels_unavailable()
    assert "triton" not in sys.modules
