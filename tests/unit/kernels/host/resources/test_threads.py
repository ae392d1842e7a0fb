"""Worker threads: as many as granted, asleep unless invited, not waited for in vain, new after a fork."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time

import pytest

from crossdevice.errors import OptionError
from crossdevice.kernels.host.resources import threads
from crossdevice.kernels.host.resources.threads import num_threads, run_together, set_num_threads
from interrupts.stepping import interrupted_at_each_step, may_meet_finalizers


@pytest.fixture(autouse=True)
def own_settings():
    yield
    set_num_threads(None)


def test_the_default_is_what_the_machine_grants(monkeypatch):
    monkeypatch.delenv("CROSSDEVICE_NUM_THREADS", raising=False)
    set_num_threads(None)
    assert 1 <= num_threads() <= (os.cpu_count() or 1)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not tell")
def test_affinity_is_respected():
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from crossdevice.kernels.host.resources.threads import num_threads\n"
        "assert num_threads() == 1"
    )
    environment = {name: value for name, value in os.environ.items() if name != "CROSSDEVICE_NUM_THREADS"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


@pytest.mark.parametrize(
    ("membership", "files", "share"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000\n", "a/cpu.max": "150000 100000\n"}, 0.5),
        ("0::/../elsewhere\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {}, math.inf),
        (
            "4:memory:/x\n1:cpu:/y\n",
            {"cpu/y/cpu.cfs_quota_us": "250000", "cpu/y/cpu.cfs_period_us": "100000"},
            2.5,
        ),
        ("3:cpuacct,cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
    ],
)
def test_limits_of_control_groups_are_read(tmp_path, monkeypatch, membership, files, share):
    monkeypatch.setattr(threads, "ROOT", tmp_path / "groups")
    monkeypatch.setattr(threads, "MEMBERSHIP", tmp_path / "membership")
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert threads._share() == share


def test_no_control_groups_are_no_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(threads, "MEMBERSHIP", tmp_path / "missing")
    assert threads._share() == math.inf


def test_the_variable_counts_and_the_call_counts_more(monkeypatch):
    monkeypatch.setenv("CROSSDEVICE_NUM_THREADS", "3")
    set_num_threads(None)
    assert num_threads() == 3
    set_num_threads(5)
    assert num_threads() == 5


@pytest.mark.parametrize("given", ["0", "-1", "two", "1.5"])
def test_a_bad_variable_is_refused_by_name(monkeypatch, given):
    monkeypatch.setenv("CROSSDEVICE_NUM_THREADS", given)
    set_num_threads(None)
    with pytest.raises(OptionError, match="CROSSDEVICE_NUM_THREADS must be a whole number"):
        num_threads()


@pytest.mark.parametrize("given", [0, -2, 1.5, True, "x"])
def test_bad_numbers_are_refused(given):
    with pytest.raises(OptionError, match="1 or more"):
        set_num_threads(given)


def test_all_participants_work_at_once():
    barrier = threading.Barrier(3, timeout=60)
    names = []

    def work():
        barrier.wait()
        names.append(threading.current_thread().name)

    run_together(work, 3)
    assert len(set(names)) == 3


def processors_of_workers(change=lambda: None):
    """The processors of two workers, which then call `change`."""
    meeting, found = threading.Barrier(3, timeout=60), {}

    def work():
        meeting.wait()
        found[threading.get_ident()] = os.sched_getaffinity(0)
        if threading.current_thread() is not threading.main_thread():
            change()

    run_together(work, 3)
    return [where for ident, where in found.items() if ident != threading.get_ident()]


@pytest.fixture
def usable(monkeypatch):
    """The processors of this process, whose workers are new."""
    if sys.platform != "linux":
        pytest.skip("workers keep off a processor on Linux only")
    usable = os.sched_getaffinity(0)
    if len(usable) == 1:
        pytest.skip("there is one processor")
    monkeypatch.setattr(threads, "_workers", threads._Workers())
    yield usable
    assert os.sched_getaffinity(0) == usable


def test_workers_keep_off_the_processor_of_their_caller(usable, monkeypatch):
    for here in sorted(usable)[:2]:
        monkeypatch.setattr(threads, "_current_processor", lambda here=here: here)
        assert processors_of_workers() == [usable - {here}] * 2
    monkeypatch.setattr(threads, "_current_processor", lambda: None)  # as where a system does not say
    assert len(processors_of_workers()) == 2


def test_workers_keep_the_processors_that_a_user_gives_them(usable, monkeypatch):
    first, second = sorted(usable)[:2]
    monkeypatch.setattr(threads, "_current_processor", lambda: first)
    found = processors_of_workers(lambda: os.sched_setaffinity(0, usable))
    assert found == [usable - {first}] * 2
    monkeypatch.setattr(threads, "_current_processor", lambda: second)
    assert processors_of_workers() == [usable] * 2


@pytest.mark.usefixtures("usable")
@pytest.mark.parametrize("name", ["sched_getaffinity", "sched_setaffinity"])
def test_workers_work_where_processors_may_not_be_asked_for(name, monkeypatch):
    def refuse(*given):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(threads, "_current_processor", lambda: 0)
    with monkeypatch.context() as refusing:
        refusing.setattr(os, name, refuse)
        run_together(threading.Barrier(3, timeout=60).wait, 3)


def test_a_caller_does_not_wait_for_workers_that_have_not_begun():
    release, begun = threading.Event(), threading.Semaphore(0)

    def block():
        begun.release()
        release.wait(60)

    blocked = threading.Thread(target=run_together, args=(block, 2))
    blocked.start()
    for _ in range(2):
        assert begun.acquire(timeout=120)
    calls = []
    # Every worker is busy, perhaps more of them than this call would need.
    with_all = [threading.Thread(target=run_together, args=(block, 2)) for _ in range(3)]
    for thread in with_all:
        thread.start()
    for _ in range(3):
        assert begun.acquire(timeout=120)
    run_together(lambda: calls.append(threading.current_thread()), 2)
    assert threading.current_thread() in calls
    release.set()
    for thread in (blocked, *with_all):
        thread.join(120)
        assert not thread.is_alive()


def test_a_failure_in_a_worker_is_the_callers():
    caller = threading.current_thread()
    started = threading.Event()

    def work():
        if threading.current_thread() is not caller:
            started.set()
            raise ArithmeticError("on a worker")
        assert started.wait(60)

    with pytest.raises(ArithmeticError, match="on a worker"):
        run_together(work, 2)


def test_work_is_forgotten_when_done():
    import weakref

    class Work:
        def __call__(self):
            time.sleep(0.001)

    work = Work()
    reference = weakref.ref(work)
    run_together(work, 3)
    del work
    assert reference() is None


FORKED = """
import os, sys, threading
from crossdevice.kernels.host.resources.threads import run_together
def meet(number):
    barrier = threading.Barrier(number, timeout=120)
    run_together(barrier.wait, number)
meet(3)
child = os.fork()
if child == 0:
    meet(3)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
meet(3)
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_has_workers_of_its_own_and_sleeping_workers_do_not_keep_a_process():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert done.stdout == "done\n"


@may_meet_finalizers
def test_no_worker_is_at_work_after_an_interrupt():
    def work():
        time.sleep(0.002)

    for place in interrupted_at_each_step(lambda: run_together(work, 3)):
        assert not at_work_threads(), place


def at_work_threads():
    """The workers that are inside of `work`."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, frame in sys._current_frames().items():
        while frame is not None:
            if frame.f_code.co_name == "work":
                found.append(names.get(ident))
            frame = frame.f_back
    return found


def test_local_processes_share_the_processors(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(32), raising=False)
    monkeypatch.setattr(threads, "_share", lambda: math.inf)
    for number, expected in ((1, 32), (2, 32), (8, 8), (100, 1)):
        monkeypatch.setattr(threads, "local_processes", lambda environ, number=number: number)
        assert threads.granted_processors() == expected
    monkeypatch.setattr(threads, "_share", lambda: 4.0)  # one container for all of them
    monkeypatch.setattr(threads, "local_processes", lambda environ: 2)
    assert threads.granted_processors() == 2
