"""What is left to NCCL, how dtypes travel that it lacks, and what becomes of its failures."""

import itertools
import threading

import numpy as np
import pytest
import torch

from crossdevice import CommunicationOptions, Device, NcclAllReduce, PerReplica, ReduceOp
from crossdevice.backends import nccl_engines
from crossdevice.backends.nccl_engines import (
    CommunicatorsEngine,
    NcclEngine,
    Share,
    engine_for,
    engine_named,
)
from crossdevice.backends.registry import backend_named
from crossdevice.backends.torch_backend import TorchBackend
from crossdevice.errors import CrossDeviceError, EngineError
from crossdevice.execution.local.planning import Planner
from crossdevice.execution.reading.leaf_spec import LeafSpec
from crossdevice.plans.steps import EngineAllReduce

GPUS = tuple(Device("cuda", index) for index in range(4))
FUNCTIONS = {
    ReduceOp.SUM: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}


class Communicator:
    def __init__(self):
        self.ended = None

    def abort(self):
        self.ended = "aborted"

    def destroy(self):
        self.ended = "destroyed"


class Pretended(CommunicatorsEngine):
    """A binding that adds up on the host, in memory that it gets as PyTorch tensors."""

    name = "pretended"
    libraries = ("torch",)

    def __init__(self):
        super().__init__()
        self.connected, self.failure, self.inside = [], None, threading.Lock()

    def version(self):
        return "2.99.1"

    def connect(self, devices):
        self.connected.append([Communicator() for _ in devices])
        return self.connected[-1]

    def all_reduce(self, shares, dtype, op):
        assert self.inside.acquire(blocking=False), "two groups at once"
        try:
            self.clique(shares)
            if self.failure:
                raise self.failure
            assert {str(share.source.dtype) for share in shares} == {f"torch.{dtype}"}
            rows = [share.source.to(torch.float64) for share in shares] if op is ReduceOp.MEAN else None
            for share in shares:
                if rows:
                    share.target.copy_(sum(rows) / len(rows))
                    continue
                numbers = [other.source.numpy() for other in shares]
                with np.errstate(over="ignore"):
                    total = FUNCTIONS[op].reduce(numbers, dtype=numbers[0].dtype)
                share.target.copy_(torch.from_numpy(total))
        finally:
            self.inside.release()


class PretendedOfPyTorch(Pretended):
    """One that lacks what PyTorch's binding lacks."""

    dtypes = nccl_engines.TorchNcclEngine.dtypes


@pytest.fixture(params=[Pretended, PretendedOfPyTorch])
def engine(request, monkeypatch):
    monkeypatch.setattr(nccl_engines, "NCCL_ENGINES", {"pretended": request.param})
    engine_named.cache_clear()
    yield engine_named("pretended")
    engine_named.cache_clear()


class OnHost(TorchBackend):
    """Whose tensors need no streams."""

    def share_of(self, source, device):
        target = torch.empty_like(source)
        return Share(source, target, device, 0, source.data_ptr(), target.data_ptr(), source.numel())


def all_reduced(arrays, op, monkeypatch):
    """Tensors of the host that pass for ones on GPUs."""
    numbers = iter(GPUS)
    monkeypatch.setattr(nccl_engines, "device_of", lambda array: next(numbers))
    return OnHost().engine_all_reduce(arrays, op)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_integers_of_all_widths_wrap_as_ours_do(dtype, engine, monkeypatch):
    limits = np.iinfo(dtype)
    rows = np.random.default_rng(0).integers(limits.min, limits.max, (4, 50), dtype, endpoint=True)
    rows[:, :2] = limits.min, limits.max
    for op, function in FUNCTIONS.items():
        if TorchBackend().engine_unavailable(dtype, op, 4) is not None:
            assert (dtype, op.name[0]) == ("uint64", "M")
            assert isinstance(engine, PretendedOfPyTorch)
            continue
        results = all_reduced([torch.from_numpy(row.copy()) for row in rows], op, monkeypatch)
        right = function.reduce(rows, dtype=rows.dtype)
        for result in results:
            assert str(result.dtype) == f"torch.{dtype}"
            assert np.array_equal(result.numpy(), right)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_numbers_are_summed_as_their_parts(dtype, engine, monkeypatch):
    rows = (np.arange(12).reshape(3, 4) + 1j * np.arange(12).reshape(3, 4)[::-1]).astype(dtype)
    for result in all_reduced([torch.from_numpy(row) for row in rows], ReduceOp.SUM, monkeypatch):
        assert result.numpy().dtype == dtype
        assert np.array_equal(result.numpy(), rows.sum(0))
    assert "complex" in TorchBackend().engine_unavailable(dtype, ReduceOp.PROD, 4)


@pytest.mark.usefixtures("engine")
def test_what_would_have_other_values_is_not_left_to_nccl():
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        assert TorchBackend().engine_unavailable(dtype, ReduceOp.SUM, 3) is None
        assert TorchBackend().engine_unavailable(dtype, ReduceOp.PROD, 3) is None
        for op in (ReduceOp.MIN, ReduceOp.MAX):
            assert TorchBackend().engine_unavailable(dtype, op, 4) == "NCCL's minimum and maximum lose NaN"


@pytest.mark.usefixtures("engine")
def test_an_average_is_nccls_where_its_divisor_is_a_power_of_two():
    counts = [
        count
        for count in range(1, 17)
        if TorchBackend().engine_unavailable("float32", ReduceOp.MEAN, count) is None
    ]
    assert counts == [1, 2, 4, 8, 16]
    assert TorchBackend().engine_unavailable("int32", ReduceOp.MEAN, 4) is not None


def test_communicators_are_kept_for_each_tuple_of_devices(engine, monkeypatch):
    for _ in range(3):
        all_reduced([torch.ones(2)] * 2, ReduceOp.SUM, monkeypatch)
        all_reduced([torch.ones(2)] * 3, ReduceOp.SUM, monkeypatch)
    assert list(map(len, engine.connected)) == [2, 3]
    engine._free()
    assert {each.ended for clique in engine.connected for each in clique} == {"destroyed"}


def test_a_failure_is_ours_and_names_the_devices_and_the_next_call_starts_anew(engine, monkeypatch):
    engine.failure = OSError("unhandled cuda error")
    with pytest.raises(EngineError) as caught:
        all_reduced([torch.ones(2)] * 2, ReduceOp.SUM, monkeypatch)
    assert isinstance(caught.value, CrossDeviceError)
    for part in (
        "NCCL 2.99.1 through pretended",
        "cuda:0, cuda:1",
        "unhandled cuda error",
        "NCCL_DEBUG=INFO",
    ):
        assert part in str(caught.value)
    assert {each.ended for each in engine.connected[0]} == {"aborted"}
    engine.failure = None
    assert all_reduced([torch.ones(2)] * 2, ReduceOp.SUM, monkeypatch)[0].tolist() == [2, 2]
    assert len(engine.connected) == 2


@pytest.mark.usefixtures("engine")
def test_groups_of_several_threads_do_not_mix(monkeypatch):
    turns = itertools.cycle(GPUS[:2])
    lock = threading.Lock()

    def next_device(array):
        with lock:
            return next(turns)

    monkeypatch.setattr(nccl_engines, "device_of", next_device)
    failures = []

    def reduce_often():
        try:
            for _ in range(50):
                OnHost().engine_all_reduce([torch.ones(99)] * 2, ReduceOp.SUM)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=reduce_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_without_a_binding_the_reason_names_those_that_would_do(monkeypatch):
    class Missing(Pretended):
        def __init__(self):
            raise ImportError("not installed")

    monkeypatch.setattr(nccl_engines, "NCCL_ENGINES", {"missing": Missing})
    engine_named.cache_clear()
    assert engine_named("missing") == "not installed"
    assert engine_for("torch") is None
    reason = "none of NCCL's bindings for torch arrays is here (missing)"
    assert TorchBackend().engine_unavailable("float32", ReduceOp.SUM, 2) == reason
    with pytest.raises(EngineError, match="none of NCCL's bindings"):
        OnHost().engine_all_reduce([torch.ones(2)], ReduceOp.SUM)
    engine_named.cache_clear()


def test_a_binding_that_breaks_while_it_is_loaded_counts_as_missing(monkeypatch):
    class Broken(Pretended):
        def __init__(self):
            raise RuntimeError("symbol not found")

    monkeypatch.setattr(nccl_engines, "NCCL_ENGINES", {"broken": Broken})
    engine_named.cache_clear()
    assert engine_named("broken") == "RuntimeError: symbol not found"
    assert engine_for("torch") is None
    engine_named.cache_clear()


def test_every_binding_is_in_the_table_once_in_order_of_preference():
    assert list(nccl_engines.NCCL_ENGINES) == ["nccl4py", "torch.cuda.nccl", "cupy.cuda.nccl"]
    assert all(issubclass(engine, NcclEngine) for engine in nccl_engines.NCCL_ENGINES.values())


# ---------------------------------------------------------------- plans


def planned(op, precision="fast", dtype="float32", library="torch", devices=GPUS):
    spec = LeafSpec(backend_named(library), dtype, (64,), devices, devices)
    return Planner(NcclAllReduce()).plan_pack(spec, 64, 0, precision, op)


def uses_engine(plan):
    return any(isinstance(step, EngineAllReduce) for step in plan.steps)


@pytest.mark.usefixtures("engine")
def test_plans_have_an_engine_step_only_where_nccl_keeps_what_we_promise():
    assert uses_engine(planned(ReduceOp.SUM))
    assert uses_engine(planned(ReduceOp.MEAN, devices=GPUS[:3]))
    assert uses_engine(planned(ReduceOp.MAX, dtype="int32"))
    assert not uses_engine(planned(ReduceOp.MAX))
    assert not uses_engine(planned(ReduceOp.SUM, precision="accurate"))
    assert not uses_engine(planned(ReduceOp.SUM, library="numpy"))
    assert not uses_engine(planned(ReduceOp.SUM, devices=(*GPUS, GPUS[0])))


@pytest.mark.usefixtures("engine")
def test_doing_without_an_engine_is_in_the_log_once(caplog):
    planner = Planner(NcclAllReduce())
    spec = LeafSpec(backend_named("torch"), "float32", (64,), GPUS, GPUS)
    fast = CommunicationOptions(precision="fast")
    planner.prepared((spec,), ReduceOp.MAX, fast)
    planner.prepared((spec, spec), ReduceOp.MIN, fast)
    planner.prepared((spec,), ReduceOp.SUM, fast)
    planner.prepared((spec,), ReduceOp.SUM, CommunicationOptions())
    assert [record.getMessage() for record in caplog.records] == [
        "NcclAllReduce does without an engine: NCCL's minimum and maximum lose NaN"
    ]


@pytest.mark.usefixtures("engine")
def test_explain_names_the_engine_or_why_there_is_none(monkeypatch):
    arrays = torch.ones(4), torch.ones(4)
    places = {id(array): device for array, device in zip(arrays, GPUS, strict=False)}
    monkeypatch.setattr("crossdevice.values.device.device_of", lambda array: places[id(array)])
    monkeypatch.setattr(TorchBackend, "check_device", lambda self, device: None)
    value = PerReplica.of(arrays, GPUS[:2])
    fast = CommunicationOptions(precision="fast")
    text = NcclAllReduce().explain(value, value, fast)
    assert "\nengine: NCCL 2.99.1 through pretended\n" in text
    assert "engine all-reduce" in text
    text = NcclAllReduce().explain(value, value, fast, "max")
    assert "\ndoes without an engine: NCCL's minimum and maximum lose NaN\n" in text
    text = NcclAllReduce().explain(value, value)
    assert (
        "\ndoes without an engine: an engine adds in an order of its own, and precision is accurate\n" in text
    )
