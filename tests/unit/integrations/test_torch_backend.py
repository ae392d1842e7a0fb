"""How PyTorch finds the backend, its options, and the work that it hands out."""

from __future__ import annotations

import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest

import crossdevice
from crossdevice.errors import DeadlineError, OptionError

torch = pytest.importorskip("torch")

SOURCE = Path(crossdevice.__file__).parents[1]


def test_import_torch_registers_the_backend_and_imports_nothing_of_the_package(tmp_path):
    installed = tmp_path / "crossdevice-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: crossdevice\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(
        "[torch.backends]\ncrossdevice = crossdevice_torch_backend:register\n"
    )
    program = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(SOURCE)!r}]\n"
        "import torch\n"
        "print('crossdevice' in torch.distributed.Backend.backend_list, 'crossdevice' in sys.modules)\n"
        "store = torch.distributed.HashStore()\n"
        "torch.distributed.init_process_group('crossdevice', store=store, rank=0, world_size=1)\n"
        "tensor = torch.ones(2)\n"
        "torch.distributed.all_reduce(tensor)\n"
        "print(tensor.tolist(), torch.distributed.get_backend())\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.stdout.splitlines() == ["True False", "[1.0, 1.0] crossdevice"], found.stderr


def test_options_come_from_the_program_and_then_from_the_environment(monkeypatch):
    from crossdevice.integrations.torch import BackendOptions

    assert BackendOptions().precision == "accurate"
    assert BackendOptions().deadline is None
    monkeypatch.setenv("CROSSDEVICE_PRECISION", "exact")
    monkeypatch.setenv("CROSSDEVICE_TIMEOUT_SECONDS", "2.5")
    assert BackendOptions().precision == "exact"
    assert BackendOptions().deadline == timedelta(seconds=2.5)
    chosen = BackendOptions("fast", timedelta(seconds=7))
    assert (chosen.precision, chosen.deadline) == ("fast", timedelta(seconds=7))
    monkeypatch.setenv("CROSSDEVICE_TIMEOUT_SECONDS", "soon")
    with pytest.raises(OptionError, match="CROSSDEVICE_TIMEOUT_SECONDS must be a number of seconds"):
        BackendOptions()


def test_calls_keep_their_order_whoever_runs_them():
    from crossdevice.integrations.torch.distributed.work import CallQueue, StartedWork

    queue, order = CallQueue("test"), []
    works = [
        StartedWork(queue, "all_reduce", lambda number=number: order.append(number), [number])
        for number in range(50)
    ]
    for work in works:
        queue.start(work)
    works[30].wait()
    assert order[:31] == list(range(31))
    works[-1].wait()
    assert order == list(range(50))
    assert all(work.is_success() for work in works)
    assert works[7].get_future().wait() == [7]
    queue.stop()


def test_callbacks_of_futures_may_start_calls_and_wait_for_theirs():
    from crossdevice.integrations.torch.distributed.work import CallQueue, StartedWork

    queue, order = CallQueue("test"), []

    def started(depth):
        work = StartedWork(queue, "all_reduce", lambda: order.append(depth), [depth])
        future = work.get_future()
        queue.start(work)
        return future

    def and_another(future):
        (depth,) = future.value()
        return started(depth + 1).then(and_another).wait() if depth < 3 else depth

    first, behind = started(0).then(and_another), started(10)
    assert first.wait() == 3
    assert behind.wait() == [10]
    assert sorted(order) == [0, 1, 2, 3, 10]
    queue.stop()


def test_an_error_is_raised_by_wait_and_is_the_future_s_too():
    from crossdevice.integrations.torch.distributed.work import CallQueue, StartedWork

    def fail():
        raise DeadlineError("rank 3 did not come")

    queue = CallQueue("test")
    work = StartedWork(queue, "all_reduce", fail, [])
    future = work.get_future()
    queue.start(work)
    for kind in (DeadlineError, RuntimeError, TimeoutError):
        with pytest.raises(kind, match="rank 3 did not come"):
            work.wait()
    assert isinstance(work.exception(), DeadlineError)
    assert work.is_completed()
    assert not work.is_success()
    for each in (future, work.get_future()):
        with pytest.raises(RuntimeError, match="rank 3 did not come"):
            each.wait()
    queue.stop()


def test_wait_gives_up_after_its_timeout_and_may_be_called_again():
    import threading

    from crossdevice.integrations.torch.distributed.work import CallQueue, StartedWork

    go_on, queue = threading.Event(), CallQueue("test")
    work = StartedWork(queue, "all_reduce", go_on.wait, [1])
    queue.start(work)
    with pytest.raises(DeadlineError, match="timeout"):
        work.wait(timedelta(seconds=0.05))
    assert not work.is_completed()
    go_on.set()
    assert work.wait()
    assert work.result() == [1]
    queue.stop()


@pytest.fixture
def lone_group():
    from torch.distributed import HashStore

    from crossdevice.integrations.torch.distributed import BackendOptions, CrossdeviceProcessGroup

    group = CrossdeviceProcessGroup(HashStore(), 0, 1, timedelta(seconds=60), BackendOptions())
    yield group
    group.shutdown()


def test_comm_debug_mode_counts_collectives_as_those_of_other_backends(lone_group):
    from torch.distributed.tensor.debug import CommDebugMode

    tensor, whole = torch.tensor([1.0, 2.0]), torch.zeros(2)
    with CommDebugMode() as mode:
        lone_group.allreduce([tensor]).wait()
        lone_group.broadcast(tensor, root=0).wait()
        lone_group._allgather_base(whole, tensor).wait()
    found = {str(operator): count for operator, count in mode.get_comm_counts().items()}
    assert found == {"c10d.allreduce_": 1, "c10d.broadcast_": 1, "c10d._allgather_base_": 1}
    assert whole.tolist() == [1.0, 2.0]


def test_modes_see_the_operator_and_nothing_of_how_it_is_made(lone_group):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen, strided = [], torch.arange(8.0)[::2]
    with Seen():
        lone_group.allreduce([strided]).wait()
        lone_group.broadcast([strided]).wait()
    assert seen == ["c10d.allreduce_.default", "c10d.broadcast_.default"]
    assert strided.tolist() == [0.0, 2.0, 4.0, 6.0]


def test_tensors_without_data_are_not_exchanged(lone_group):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(3)
        lone_group.allreduce([fake]).wait()
    assert type(fake).__name__ == "FakeTensor"
    lone_group.allreduce([torch.empty(3, device="meta")]).wait()


def test_a_tensor_may_occur_twice_in_a_coalesced_call(lone_group):
    tensor = torch.tensor([1.0, 2.0])
    lone_group.allreduce_coalesced([tensor, tensor]).wait()
    assert tensor.tolist() == [1.0, 2.0]


def test_arguments_are_refused_with_both_types_that_programs_expect(lone_group):
    from torch.distributed import ReduceOp

    one, two, wide = torch.ones(1), torch.ones(2), torch.ones(1, dtype=torch.float64)
    refused = {
        "invalid root rank: 7": lambda: lone_group.broadcast(one, root=7),
        "requires non-empty tensor list": lambda: lone_group.allreduce([]),
        "invalid tensor type": lambda: lone_group.allreduce([one, wide]),
        "invalid tensor size at index 1": lambda: lone_group.allreduce([one, two]),
        "invalid tensor size at index 0 of the outputs": lambda: lone_group.allgather([[two]], [one]),
        "invalid output size": lambda: lone_group.allgather_coalesced([[one, one]], [one]),
        "invalid tensor type at index 0 of the outputs": lambda: lone_group.allgather_coalesced(
            [[wide]], [one]
        ),
        "should be equal to world size": lambda: lone_group.allgather_coalesced([], [one]),
        "Tensors must be contiguous": lambda: lone_group.alltoall_base(two, torch.ones(4)[::2], [], []),
        "Split sizes doesn't match total dim 0 size": lambda: lone_group.alltoall_base(two, two, [1], [2]),
        "send: invalid rank: 3": lambda: lone_group.send([one], 3, 0),
        "recv: invalid rank: 0": lambda: lone_group.recv([one], 0, 0),
        "recv: invalid tag: 1073741824": lambda: lone_group.recv_anysource([one], 1 << 30),
        "Cannot use ReduceOp.BAND with non-integral": lambda: lone_group.allreduce([one], ReduceOp.BAND),
    }
    for text, call in refused.items():
        with pytest.raises(ValueError, match=text) as found:
            call()
        assert isinstance(found.value, RuntimeError)
    lone_group.allreduce([one]).wait()  # nothing was sent


def test_small_reductions_are_bound_once_for_each_length(lone_group):
    for value in (1.0, 2.0):
        for length in (3, 5):
            tensor = torch.full((length,), value)
            lone_group.allreduce([tensor]).wait()
            assert tensor.tolist() == [value] * length
    (reduction,) = lone_group._reductions.values()
    assert {shape for shape, _ in reduction._bound} == {(3,), (5,)}


def test_works_have_the_types_of_their_collectives(lone_group):
    from torch._C._distributed_c10d import OpType

    one = torch.ones(1)
    assert lone_group.allreduce([one])._get_op_type() == int(OpType.ALLREDUCE)
    assert lone_group.broadcast([one])._get_op_type() == int(OpType.BROADCAST)
    assert lone_group.barrier()._get_op_type() == int(OpType.BARRIER)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_half_complex_numbers_are_summed_and_not_multiplied(lone_group):
    from torch.distributed import ReduceOp

    tensor = torch.tensor([1.0 + 2j, 3.0]).to(torch.complex32)
    lone_group.allreduce([tensor]).wait()
    part = torch.zeros(2, dtype=torch.complex32)
    lone_group._reduce_scatter_base(part, tensor).wait()
    assert part.to(torch.complex64).tolist() == [1 + 2j, 3]
    with pytest.raises(ValueError, match=r"PRODUCT with torch\.complex32"):
        lone_group.reduce(tensor, 0, ReduceOp.PRODUCT)


def test_compiled_functions_leave_calls_of_the_group_as_they_are():
    program = (
        "import torch; from torch import distributed as dist\n"
        "import crossdevice.integrations.torch\n"
        "dist.init_process_group('crossdevice', store=dist.HashStore(), rank=0, world_size=1)\n"
        "@torch.compile(backend='eager')\n"
        "def step(tensor):\n"
        "    dist.reduce(tensor, 0)\n"
        "    dist.isend(tensor, 0) if tensor.numel() > 2 else dist.scatter(tensor, [tensor], 0)\n"
        "    return tensor + 1\n"
        "print(step(torch.ones(2)).tolist())\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.stdout.splitlines() == ["[2.0, 2.0]"], found.stderr


def test_it_works_with_a_pytorch_that_has_older_names():
    program = (
        "import types, torch\n"
        "from torch import distributed as dist\n"
        "from torch._C import _distributed_c10d as c10d\n"
        "missing = 'REDUCE_SCATTER_TENSOR_COALESCED'\n"
        "kept = {name: kind for name, kind in vars(c10d.OpType).items() if name != missing}\n"
        "c10d.OpType = types.SimpleNamespace(**kept)\n"
        "suffixes = '_single', '_single_coalesced'\n"
        "for name in [name for name in vars(dist.ProcessGroup) if name.endswith(suffixes)]:\n"
        "    delattr(dist.ProcessGroup, name)\n"
        "import crossdevice.integrations.torch\n"
        "from torch.distributed.tensor.debug import CommDebugMode\n"
        "dist.init_process_group('crossdevice', store=dist.HashStore(), rank=0, world_size=1)\n"
        "group, tensor, out = dist.group.WORLD, torch.tensor([3.0]), torch.zeros(1)\n"
        "with CommDebugMode() as mode:\n"
        "    group._allgather_base(out, tensor).wait()\n"
        "    group.alltoall_base(out, tensor, [], []).wait()\n"
        "    group.reduce_scatter_tensor_coalesced([out], [tensor]).wait()\n"
        "print(out.tolist(), sorted(str(kind) for kind in mode.get_comm_counts()))\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    counted = ["_allgather_base_", "alltoall_base_", "reduce_scatter_tensor_coalesced_"]
    assert found.stdout.strip() == f"[3.0] {[f'c10d.{name}' for name in counted]}", found.stderr


class Arriving:
    """A message of an engine: it comes when somebody waits for it."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.has_come = False

    def wait(self):
        self.has_come = True
        for tensor in self.tensors:
            tensor.fill_(7.0)

    def is_completed(self):
        return self.has_come

    def _source_rank(self):
        return 3


class HostEngine:
    """Sends and receives in memory of the host, and of nothing else."""

    def __init__(self):
        self.sent = []

    def send(self, tensors, dst, tag):
        self.sent += tensors
        return Arriving([])

    def recv_anysource(self, tensors, tag):
        self.received = tensors
        return Arriving(tensors)

    def shutdown(self):
        pass


def test_messages_for_gpus_go_through_the_host(lone_group, monkeypatch):
    from crossdevice.integrations.torch.distributed import process_group

    engine = HostEngine()
    monkeypatch.setattr(lone_group, "_gloo", engine)
    monkeypatch.setattr(lone_group, "_has_no_engine", lambda _: True)  # as if tensors were on a GPU
    monkeypatch.setattr(process_group, "check_peer", lambda *_: None)
    strided = torch.arange(4.0)[::2]
    lone_group.send([strided], 1, 0).wait()
    assert [tensor.tolist() for tensor in engine.sent] == [[0.0, 2.0]]
    assert engine.sent[0].is_contiguous()
    target = torch.zeros(4)[::2]
    work = lone_group.recv_anysource([target], 0)
    assert (work.is_completed(), target.tolist()) == (False, [0.0, 0.0])
    assert engine.received[0].data_ptr() != target.data_ptr()
    work.wait()
    assert (work.is_completed(), target.tolist(), work._source_rank()) == (True, [7.0, 7.0], 3)
    target.zero_()
    work.wait()  # which copies nothing again
    assert target.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("error", [None, RuntimeError("the other rank is gone")])
def test_a_future_of_a_message_for_gpus_does_not_wait_for_it(error, monkeypatch):
    from crossdevice.integrations.torch.distributed import devices, work

    class OnHost(work.StartedWork):  # a collective on a GPU, but for the GPU
        def __init__(self, queue, name, function, results, device, stream):
            super().__init__(queue, name, function, results)

    class Message(Arriving):
        def wait(self):
            assert sent.wait(10)
            if error is not None:
                raise error
            super().wait()

    monkeypatch.setattr(devices, "DeviceWork", OnHost)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    sent, target, received = threading.Event(), torch.zeros(2), torch.zeros(2)
    receiving = devices.ReceivedWork("recv", Message([received]), [received], [target])
    future = receiving.get_future().then(lambda ended: ended.value()[0] + 1)
    assert (future.done(), target.tolist()) == (False, [0.0, 0.0])
    sent.set()
    if error is None:
        assert future.wait().tolist() == [8.0, 8.0]
        assert receiving.wait() is True
        assert receiving.get_future().wait()[0] is target
    else:
        for wait in (future.wait, receiving.wait):
            with pytest.raises(RuntimeError, match="the other rank is gone"):
                wait()


def test_a_loop_of_polls_lets_the_thread_run_that_makes_the_call():
    from crossdevice.integrations.torch.distributed.work import CallQueue, StartedWork

    queue = CallQueue("a queue")
    work = StartedWork(queue, "all_reduce", lambda: None, [])
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # a thread gets its turn only where another one sleeps
    try:
        queue.start(work)
        polls = sum(1 for _ in range(100_000) if not work.is_completed())
    finally:
        sys.setswitchinterval(interval)
        queue.stop()
    assert work.is_completed()
    assert polls < 100_000


@pytest.mark.skipif(sys.platform != "linux", reason="there is no timer to sleep on")
def test_a_started_call_that_is_waited_for_at_once_runs_in_the_waiting_thread(monkeypatch):
    from crossdevice.integrations.torch.distributed.work import CallQueue, StartedWork
    from crossdevice.process_groups import background

    monkeypatch.setattr(background, "_SOON", background._Time(0, 0, 3600, 0))
    queue, seen = CallQueue("a queue"), []
    for _ in range(3):
        works = [
            StartedWork(queue, "all_reduce", lambda: seen.append(threading.current_thread()), [])
            for _ in range(2)
        ]
        for work in works:
            queue.start(work)
        for work in works:
            assert work.wait()
    queue.stop()
    assert seen == [threading.current_thread()] * 6
