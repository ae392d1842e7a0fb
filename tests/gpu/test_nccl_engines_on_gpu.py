"""NCCL itself, through each of its bindings, with one rank for each GPU; skipped where there is no GPU."""

import threading

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.backends import nccl_engines
from crossdevice.backends.nccl_engines import NCCL_ENGINES, NcclEngine, engine_named
from crossdevice.backends.registry import backend_named
from crossdevice.errors import EngineError
from crossdevice.execution.local.executor import execute
from crossdevice.plans.builder import PlanBuilder
from crossdevice.values.dtypes import ITEM_BYTES, SHORT_FLOATS
from crossdevice.values.recipe import Recipe
from crossdevice.values.reduce_op import ReduceOp

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")

GPUS = [cd.Device("cuda", index) for index in range(torch.cuda.device_count())]
PAIRS = [(name, library) for name, engine in NCCL_ENGINES.items() for library in engine.libraries]


@pytest.fixture(params=PAIRS, ids=lambda pair: f"{pair[0]}, {pair[1]} arrays")
def backend(request, monkeypatch):
    """A library whose arrays are reduced by one engine and no other."""
    name, library = request.param
    pytest.importorskip(library)
    found = engine_named(name)
    if not isinstance(found, NcclEngine):
        pytest.skip(f"{name}: {found}")
    monkeypatch.setattr(nccl_engines, "NCCL_ENGINES", {name: NCCL_ENGINES[name]})
    return backend_named(library)


def rows_of(dtype):
    chosen = np.random.default_rng(len(dtype))
    rows = chosen.integers(0, 50, (len(GPUS), 1001))
    if dtype == "bfloat16":
        return torch.from_numpy(rows).to(torch.bfloat16)
    return torch.from_numpy(rows.astype(dtype))


def placed(backend, tensor, device):
    on_gpu = tensor.to(f"cuda:{device.index}")
    if backend.name == "torch":
        return on_gpu
    cupy = pytest.importorskip("cupy")
    with cupy.cuda.Device(device.index):
        return cupy.asarray(tensor.numpy())


def on_host(array):
    return array.cpu() if isinstance(array, torch.Tensor) else torch.from_numpy(array.get())


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES.keys() - {"bool", *SHORT_FLOATS}))
def test_every_dtype_and_operation_that_is_left_to_nccl(backend, dtype):
    if (backend.name, dtype) == ("cupy", "bfloat16"):
        pytest.skip("refused before")
    rows = rows_of(dtype)
    done = 0
    for op in ReduceOp:
        if backend.engine_unavailable(dtype, op, len(GPUS)) is not None:
            continue
        arrays = [placed(backend, row, device) for row, device in zip(rows, GPUS, strict=True)]
        expected = {"SUM": rows.sum(0), "PROD": rows.prod(0)} if len(GPUS) > 1 else {}
        for result in backend.engine_all_reduce(arrays, op):
            assert backend.dtype_of(result) == dtype
            if len(GPUS) == 1:
                assert torch.equal(on_host(result), rows[0]), op
            elif op.name in expected:
                assert torch.allclose(on_host(result), expected[op.name].to(rows.dtype)), op
        done += 1
    assert done >= (1 if dtype.startswith("complex") else 2)


def test_an_engine_step_runs_on_the_current_streams(backend):
    build = PlanBuilder(GPUS, 1001)
    plan = build.plan(build.engine_all_reduce(build.inputs))
    rows = rows_of("float32")
    for divisor in (None, len(GPUS)):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            arrays = [placed(backend, row, device) for row, device in zip(rows, GPUS, strict=True)]
            if backend.name == "torch":
                torch.cuda._sleep(2_000_000)
                for array in arrays:
                    array += 1
            results = execute(plan, arrays, backend, Recipe(ReduceOp.SUM, "fast", divisor), "float32")
            found = [on_host(result) for result in results]
        added = 1 if backend.name == "torch" else 0
        right = (rows + added).sum(0) / (divisor or 1)
        for result in found:
            assert torch.equal(result, right)


def test_a_failure_names_the_devices(backend):
    arrays = [placed(backend, row, GPUS[0]) for row in (torch.ones(4), torch.ones(4))]
    with pytest.raises(EngineError, match="failed to all-reduce SUM of 4 float32 on cuda:0, cuda:0"):
        backend.engine_all_reduce(arrays, ReduceOp.SUM)
    good = [placed(backend, torch.ones(4), device) for device in GPUS]
    results = backend.engine_all_reduce(good, ReduceOp.SUM)
    assert on_host(results[0]).tolist() == [len(GPUS)] * 4


def test_threads_take_turns(backend):
    failures = []

    def reduce_often(number):
        try:
            for _ in range(20):
                arrays = [placed(backend, torch.full((99,), float(number)), device) for device in GPUS]
                for result in backend.engine_all_reduce(arrays, ReduceOp.SUM):
                    assert on_host(result).tolist() == [number * len(GPUS)] * 99
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=reduce_often, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_the_engine_has_a_version_and_a_name(backend):
    assert backend.engine_name().startswith("NCCL 2.")
    (name,) = nccl_engines.NCCL_ENGINES
    assert backend.engine_name().endswith(f"through {name}")
