"""Several logical devices on one GPU, each with streams of its own: the bits of the host, whatever is slow.

A plan for `cuda:0`, `cuda:1`, ... is run as on GPUs of their own, but all of them are the first one.
Skipped where there is no GPU.
"""

import itertools

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.algorithms.registry import ALGORITHMS
from crossdevice.backends.registry import backend_named
from crossdevice.execution.local import executor
from crossdevice.execution.local.executor import execute
from crossdevice.plans.builder import PlanBuilder
from crossdevice.values.recipe import Recipe

CYCLES = 300_000  # that a slow GPU loses before each producer and each copy: some 0.2 ms
LENGTH = 50_021


def rows_of(count):
    chosen = np.random.default_rng(count)
    wide = chosen.normal(size=(count, LENGTH)) * 2.0 ** chosen.integers(-12, 12, size=(count, LENGTH))
    return wide.astype(np.float32)


class SlowTorch:
    """PyTorch on the first GPU, whatever the device's number."""

    def __init__(self, monkeypatch):
        self.torch = pytest.importorskip("torch")
        if not self.torch.cuda.is_available():
            pytest.skip("no CUDA device on this machine")
        from crossdevice.backends import torch_backend

        first, host = self.torch.device("cuda", 0), self.torch.device("cpu")
        monkeypatch.setattr(torch_backend, "torch_device", lambda device: host if device.is_host else first)
        self.streams_class = torch_backend.TorchStreams
        self.backend = backend_named("torch")

    def sleep(self):
        self.torch.cuda._sleep(CYCLES)

    def made_late(self, row, is_host=False):
        """Elements that come from a slow stream; the current one waits for it."""
        if is_host:
            return self.torch.from_numpy(row.copy())
        array = self.torch.full((LENGTH,), float("nan"), device="cuda")
        side = self.torch.cuda.Stream()
        side.wait_stream(self.torch.cuda.current_stream())
        with self.torch.cuda.stream(side):
            self.sleep()
            array.copy_(self.torch.from_numpy(row).pin_memory(), non_blocking=True)
        array.record_stream(side)
        self.torch.cuda.current_stream().wait_stream(side)
        return array

    def current(self):
        return self.torch.cuda.current_stream()

    def stream(self):
        return self.torch.cuda.stream(self.torch.cuda.Stream())

    def overwrite(self, array):
        array.fill_(float("nan"))

    def seen(self, array):
        return array.clone()

    def on_host(self, array):
        return array.cpu().numpy()

    def num_streams(self):
        return len({stream.cuda_stream for stream in self.streams_class._kept.values()})


class Apart:
    """A device of CuPy by another number: the backend takes copies to it for ones between two GPUs."""

    def __init__(self, first, number):
        self.first, self.id = first, number

    def __enter__(self):
        self.first.__enter__()

    def __exit__(self, *failure):
        self.first.__exit__(*failure)

    def use(self):
        self.first.use()


class SlowCupy:
    """CuPy on the first GPU, whatever the device's number."""

    def __init__(self, monkeypatch):
        self.cupy = pytest.importorskip("cupy")
        try:
            self.cupy.cuda.runtime.getDeviceCount()
        except self.cupy.cuda.runtime.CUDARuntimeError:
            pytest.skip("no CUDA device on this machine")
        from crossdevice.backends import cupy_backend

        monkeypatch.setattr(
            cupy_backend, "cupy_device", lambda device: Apart(self.cupy.cuda.Device(0), device.index)
        )
        self.streams_class = cupy_backend.CupyStreams
        self.backend = backend_named("cupy")
        loop = "long long start = clock64(); while (clock64() - start < cycles);"
        code = f'extern "C" __global__ void spin(long long cycles) {{ {loop} }}'
        self.kernel = self.cupy.RawKernel(code, "spin")

    def sleep(self):
        self.kernel((1,), (1,), (np.int64(CYCLES),))

    def made_late(self, row):
        array = self.cupy.full(LENGTH, np.nan, np.float32)
        ready = self.cupy.asarray(row)
        here = self.cupy.cuda.get_current_stream()
        side = self.cupy.cuda.Stream(non_blocking=True)
        side.wait_event(here.record())
        with side:
            self.sleep()
            array[...] = ready
        here.wait_event(side.record())
        self.used = (array, ready, side)  # CuPy's pool does not know that another stream uses them
        return array

    def current(self):
        return self.cupy.cuda.get_current_stream()

    def stream(self):
        return self.cupy.cuda.Stream(non_blocking=True)

    def overwrite(self, array):
        array.fill(np.nan)

    def seen(self, array):
        return array.copy()

    def on_host(self, array):
        return self.cupy.asnumpy(array)

    def num_streams(self):
        return len({stream.ptr for _, stream in self.streams_class._kept.values()})


@pytest.fixture(params=[SlowTorch, SlowCupy])
def slow(request, monkeypatch):
    """A library all of whose copies are slow."""
    library = request.param(monkeypatch)
    copy = type(library.backend).copy

    def slow_copy(self, array, device):
        if not device.is_host:
            library.sleep()
        return copy(self, array, device)

    monkeypatch.setattr(type(library.backend), "copy", slow_copy)
    monkeypatch.setattr(executor, "MIN_OVERLAPPED_BYTES", 0)
    return library


def reduced(slow, name, devices, destinations, rows, precision):
    """The results as a program sees them that overwrites its inputs right after the call."""
    build = PlanBuilder(devices, LENGTH, has_engine=False)
    plan = build.plan(ALGORITHMS.load(name)().plan_sum(build, destinations))
    inputs = [
        slow.made_late(row, is_host=True) if device.is_host else slow.made_late(row)
        for row, device in zip(rows, devices, strict=True)
    ]
    recipe = Recipe(cd.ReduceOp.SUM, precision, len(devices))
    before = slow.current()
    results = execute(plan, inputs, slow.backend, recipe, "float32")
    assert slow.current() == before
    seen = [slow.seen(result) for result in results]
    for array in inputs:
        slow.overwrite(array)
    return seen


@pytest.mark.parametrize("precision", ["fast", "accurate"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_logical_devices_kept_apart_give_the_bits_of_the_host(slow, name, precision):
    options = cd.CommunicationOptions(precision=precision)
    for count in (2, 3, 4, 8):
        devices = [cd.Device("cuda", index) for index in range(count)]
        rows = rows_of(count)
        value = cd.PerReplica(list(rows))
        right = ALGORITHMS.load(name)().reduce("mean", value, value, options)
        for _, found in enumerate(reduced(slow, name, devices, devices, rows, precision)):
            assert np.array_equal(slow.on_host(found), right.values[0]), (name, count)
    assert slow.num_streams() > 3


def test_calls_on_other_streams_and_one_after_another_do_not_disturb_each_other(slow):
    devices = [cd.Device("cuda", index) for index in range(4)]
    rows = rows_of(4)
    seen = []
    for name, _ in itertools.product(("ring", "direct", "tree"), range(3)):
        with slow.stream():
            seen += reduced(slow, name, devices, devices, rows, "accurate")
        seen += reduced(slow, name, devices, devices[:1], rows, "accurate")
    right = cd.reduce(list(rows), "mean")
    for found in seen:
        assert np.array_equal(slow.on_host(found), right)


def test_the_host_takes_part(slow):
    if isinstance(slow, SlowCupy):
        pytest.skip("CuPy has no arrays on the host")
    devices = [cd.Device("cuda", 0), cd.Device("cpu", 0), cd.Device("cuda", 1), cd.Device("cpu", 1)]
    rows = rows_of(4)
    right = cd.reduce(list(rows), "mean")
    for name in sorted(set(ALGORITHMS) - {"nccl"}):
        for found in reduced(slow, name, devices, devices, rows, "accurate"):
            assert np.array_equal(slow.on_host(found), right), name
