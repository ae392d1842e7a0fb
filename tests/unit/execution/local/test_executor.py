"""Plans run on simulated GPUs that do their work late, in any order that their streams allow."""

import contextlib
import random

import numpy as np
import pytest

from crossdevice import Device, ReduceOp
from crossdevice.algorithms.registry import ALGORITHMS
from crossdevice.backends.cuda_streams import CudaStreams, SideStreams
from crossdevice.backends.numpy_backend import NumpyBackend
from crossdevice.execution.local import executor
from crossdevice.plans.builder import PlanBuilder
from crossdevice.values.device import host_device
from crossdevice.values.recipe import Recipe


class Late:
    """An array whose elements are there only once its GPU has come to it."""

    def __init__(self, device, elements=None):
        self.device, self.elements = device, elements

    def read(self):
        assert self.elements is not None, "read before it was written"
        return self.elements


class View(Late):
    def __init__(self, source, start, stop):
        self.device, self.source, self.start, self.stop = source.device, source, start, stop

    def read(self):
        return self.source.read()[self.start : self.stop]


class Queue(list):
    """A stream: what is to be done, mark or be waited for, in order."""

    def __init__(self, device):
        self.device = device


class LateStreams(CudaStreams):
    """The streams of `LateGpus`."""

    def __init__(self, gpus, devices):
        self.gpus, self._kept = gpus, gpus.kept_streams
        super().__init__(devices)

    def new_stream(self, device):
        return self.gpus.new_queue(device)

    def current_stream(self, device):
        return self.gpus.current[device]

    def handle_of(self, stream):
        return id(stream)

    def use(self, stream):
        self.gpus.current[stream.device] = stream
        self.gpus.device = stream.device

    def current_device(self):
        return self.gpus.device

    def use_device(self, device):
        self.gpus.device = device

    def event_on(self, stream):
        event = object()
        stream.append(("mark", event))
        return event

    def has_happened(self, event):
        return event in self.gpus.happened

    def make_wait(self, stream, event):
        stream.append(("wait", event))

    def keep_for(self, stream, array):
        assert isinstance(array, Late)


class LateGpus:
    """A backend of GPUs with queues; marks and waits are all that orders two of them."""

    name = "late"

    def __init__(self, seed, devices):
        self.random, self.queues, self.happened = random.Random(seed), [], set()
        self.kept_streams, self.device = {}, devices[0]
        self.current = {device: self.new_queue(device) for device in devices if not device.is_host}

    def new_queue(self, device):
        self.queues.append(Queue(device))
        return self.queues[-1]

    def streams(self, devices):
        return LateStreams(self, devices)

    def late(self, device, compute):
        """Computed when the device's current stream comes to it; on the host at once."""
        if device.is_host:
            return Late(device, compute())
        result = Late(device)
        self.current[device].append(("run", lambda: setattr(result, "elements", compute())))
        return result

    def run_until(self, is_over):
        """Takes the next entry of any queue that need not wait."""
        while not is_over():
            ready = [q for q in self.queues if q and (q[0][0] != "wait" or q[0][1] in self.happened)]
            assert ready, "queues wait for each other"
            what, thing = self.random.choice(ready).pop(0)
            if what == "run":
                thing()
            elif what == "mark":
                self.happened.add(thing)

    def run_all(self):
        self.run_until(lambda: not any(self.queues))

    # What the executor asks of a backend.

    def dtype_of(self, array):
        return "int64"

    def copy(self, array, device):
        """As PyTorch copies: both ends' current streams wait; to the host, the host does."""
        if device.is_host:
            done = self.late(array.device, lambda: array.read().copy())
            queue = self.current[array.device]
            self.run_until(lambda: not queue)
            return Late(device, done.read())
        before = object()
        self.current[array.device].append(("mark", before))
        self.current[device].append(("wait", before))
        copied = self.late(device, lambda: array.read().copy())
        after = object()
        self.current[device].append(("mark", after))
        self.current[array.device].append(("wait", after))
        return copied

    def part_of(self, array, start, stop):
        return View(array, start, stop)

    def concat(self, arrays, axis, device):
        return self.late(device, lambda: np.concatenate([array.read() for array in arrays]))

    def engine_unavailable(self, dtype, op, num_devices):
        return "no averages here" if op is ReduceOp.MEAN else None

    def engine_all_reduce(self, arrays, op):
        """All devices arrive, read what the others have, and leave together."""
        self.meet(arrays)
        sums = [self.late(array.device, lambda: sum(other.read() for other in arrays)) for array in arrays]
        self.meet(arrays)
        return sums

    def meet(self, arrays):
        marks = [object() for _ in arrays]
        for array, mark in zip(arrays, marks, strict=True):
            self.current[array.device].append(("mark", mark))
        for array in arrays:
            self.current[array.device] += [("wait", mark) for mark in marks]


def late_combine(backend, arrays, recipe, dtype, device):
    assert {array.device for array in arrays} == {device}
    return backend.late(device, lambda: sum(array.read() for array in arrays) // (recipe.divisor or 1))


@pytest.fixture(autouse=True)
def _combine_late(monkeypatch):
    monkeypatch.setattr(executor, "combine", late_combine)
    monkeypatch.setattr(executor, "MIN_OVERLAPPED_BYTES", 0)


def gpus(count):
    return [Device("cuda", index) for index in range(count)]


def mean_on(backend, name, devices, destinations, precision="fast"):
    """What the program sees that has its inputs made late, takes the results, and overwrites its inputs."""
    algorithm = ALGORITHMS.load(name)()
    build = PlanBuilder(devices, 37, has_engine=precision == "fast")
    plan = build.plan(algorithm.plan_sum(build, destinations))
    rows = np.random.default_rng(len(devices)).integers(-99, 99, (len(devices), 37)) * len(devices)
    inputs = [backend.late(device, row.copy) for row, device in zip(rows, devices, strict=True)]
    recipe = Recipe(ReduceOp.SUM, precision, len(devices))
    before = dict(backend.current)
    try:
        results = executor.execute(plan, inputs, backend, recipe, "int64")
    finally:
        assert all(backend.current[device] is queue for device, queue in before.items())
        assert backend.device == devices[0]
    seen = [backend.late(result.device, lambda result=result: result.read().copy()) for result in results]
    for array in inputs:
        backend.current[array.device].append(("run", lambda array=array: array.elements.fill(-1)))
    backend.run_all()
    return [each.read().tolist() for each in seen], (rows.sum(0) // len(devices)).tolist()


@pytest.mark.parametrize("precision", ["fast", "accurate"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_gpus_that_work_late_give_the_mean(name, precision):
    for count in (2, 3, 8):
        elsewhere = Device("cuda", 99)
        for destinations in (gpus(count), [gpus(count)[-1], elsewhere, host_device(0)]):
            for seed in range(4):
                backend = LateGpus(seed, [*gpus(count), elsewhere])
                found, right = mean_on(backend, name, gpus(count), destinations, precision)
                assert found == [right] * len(destinations)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_run_after_another_uses_the_same_streams(name):
    backend = LateGpus(0, gpus(3))
    for _ in range(3):
        found, right = mean_on(backend, name, gpus(3), gpus(3))
        assert found == [right] * 3
        num_queues = len(backend.queues)
    assert len(backend.queues) == num_queues <= 3 + 3 + 2 * 6


@pytest.mark.parametrize("what", ["wait", "__exit__"])
def test_the_simulation_finds_an_order_that_is_missing(what, monkeypatch):
    monkeypatch.setattr(CudaStreams, what, lambda *_: None)

    def is_right(seed):
        with contextlib.suppress(AssertionError):
            found, right = mean_on(LateGpus(seed, gpus(4)), "ring", gpus(4), gpus(4))
            return found == [right] * 4
        return False

    assert not all(map(is_right, range(10)))


def test_streams_are_waited_for_also_when_a_step_fails(monkeypatch):
    backend = LateGpus(0, gpus(2))
    copies = []

    def fails_later(array, device):
        if copies:
            raise ZeroDivisionError
        copies.append(LateGpus.copy(backend, array, device))
        return copies[0]

    monkeypatch.setattr(backend, "copy", fails_later)
    with pytest.raises(ZeroDivisionError):
        mean_on(backend, "direct", gpus(2), gpus(2))
    for device in gpus(2):
        queue = backend.current[device]
        backend.run_until(lambda queue=queue: not queue)
    assert copies[0].elements is not None


@pytest.mark.parametrize("name", ALGORITHMS)
def test_small_packs_are_run_in_order(name, monkeypatch):
    monkeypatch.setattr(executor, "MIN_OVERLAPPED_BYTES", 37 * 8 + 1)
    backend = LateGpus(0, gpus(3))
    monkeypatch.setattr(backend, "streams", lambda devices: pytest.fail("streams for a small pack"))
    found, right = mean_on(backend, name, gpus(3), gpus(3))
    assert found == [right] * 3


def test_only_several_gpus_have_streams():
    hosts = [host_device(0), host_device(1)]
    assert NumpyBackend().streams(hosts) is None
    torch_backend = pytest.importorskip("crossdevice.backends.torch_backend").TorchBackend()
    for devices in (hosts, [*hosts, Device("cuda", 0)], [Device("mps", 0), Device("mps", 1)]):
        assert torch_backend.streams(devices) is None


@pytest.mark.parametrize("seed", range(20))
def test_side_streams_begin_after_the_current_ones_which_go_on_until_they_join(seed):
    devices = [Device("cuda", 0), Device("cuda", 1)]
    gpus = LateGpus(seed, devices)
    done = []

    def put(what):
        for device in devices:
            gpus.late(device, lambda device=device: done.append((what, device.index)))

    put("before")
    current = dict(gpus.current)
    side = SideStreams(LateStreams(gpus, devices))
    with side:
        put("aside")
    assert gpus.current == current
    put("beside")
    assert not side.are_done()
    side.join()
    put("after")
    gpus.run_all()
    assert side.are_done()
    for index in range(2):
        order = [what for what, number in done if number == index]
        assert order.index("before") < order.index("aside") < order.index("after")
        assert order.index("before") < order.index("beside") < order.index("after")
