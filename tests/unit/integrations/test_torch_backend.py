"""How PyTorch finds the backend, its options, and the work that it hands out."""

from __future__ import annotations

import subprocess
import sys
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
    works = [StartedWork(queue, lambda number=number: order.append(number), [number]) for number in range(50)]
    for work in works:
        queue.start(work)
    works[30].wait()
    assert order[:31] == list(range(31))
    works[-1].wait()
    assert order == list(range(50))
    assert all(work.is_success() for work in works)
    assert works[7].get_future().wait() == [7]
    queue.stop()


def test_an_error_is_raised_by_wait_and_is_the_future_s_too():
    from crossdevice.integrations.torch.distributed.work import CallQueue, StartedWork

    def fail():
        raise DeadlineError("rank 3 did not come")

    queue = CallQueue("test")
    work = StartedWork(queue, fail, [])
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
    work = StartedWork(queue, go_on.wait, [1])
    queue.start(work)
    with pytest.raises(DeadlineError, match="timeout"):
        work.wait(timedelta(seconds=0.05))
    assert not work.is_completed()
    go_on.set()
    assert work.wait()
    assert work.result() == [1]
    queue.stop()
