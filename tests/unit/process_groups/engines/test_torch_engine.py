"""Gloo between threads that meet in a store of one process; real processes are in tests/multiprocess."""

import gc
import os
import re
import socket
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from crossdevice.errors import DeadlineError, OptionError, ProcessGroupError
from multiprocess.launching import free_port

torch = pytest.importorskip("torch")

from crossdevice.process_groups.engines import torch_engine, torch_meeting, torch_store  # noqa: E402
from crossdevice.process_groups.protocol import Message  # noqa: E402
from crossdevice.values.launchers import Launch  # noqa: E402

SOON_SECONDS = 30.0
"""After a deadline, on a machine that has other things to do as well."""


@pytest.fixture
def store():
    return torch.distributed.HashStore()


def run(size, function, store, **options):
    def be(rank):
        with torch_engine.form_group(
            rank, size, "127.0.0.1", store=store, **{"timeout_seconds": 120.0, **options}
        ) as group:
            return function(group)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(be, range(size)))


def gather(group):
    with group.call("gather", b"ranks") as call:
        return call.all_gather(b"%d" % group.rank)


def test_a_long_wait_for_ranks_is_said_once(store, monkeypatch, caplog):
    monkeypatch.setattr(torch_meeting, "SILENT_SECONDS", 0.05)
    with pytest.raises(DeadlineError):
        torch_engine.form_group(0, 3, "127.0.0.1", store=store, timeout_seconds=1.0)
    assert [record.getMessage() for record in caplog.records] == [
        "waiting for ranks 1, 2 to form a group of 3"
    ]


def test_a_rank_that_does_not_come_is_named(store):
    with pytest.raises(DeadlineError, match="ranks 1, 2 did not come; rank 0 came"):
        torch_engine.form_group(0, 3, "127.0.0.1", store=store, timeout_seconds=0.2)


def test_a_store_that_is_gone_while_ranks_come_is_named(store, monkeypatch):
    def lost(*arguments):
        raise RuntimeError("Failed to recv, got 0 bytes")

    monkeypatch.setattr(torch_meeting.Meeting, "_wait_for_all", lost)
    with pytest.raises(ProcessGroupError, match=r"rank 1 waited .* is gone: .* got 0 bytes"):
        torch_engine.form_group(1, 3, "127.0.0.1", store=store)


def test_a_listener_that_says_nothing_is_not_waited_for_beyond_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        with pytest.raises(ProcessGroupError, match=r"could not be reached: .* \(no answer in 0.5 seconds\)"):
            torch_engine.form_group(1, 2, *silent.getsockname(), timeout_seconds=0.5)
        assert time.monotonic() - start < SOON_SECONDS


def test_a_store_that_falls_silent_is_not_waited_for_beyond_the_deadline():
    class Silent(torch.distributed.Store):
        def add(self, key, amount):
            silence.wait(4 * SOON_SECONDS)
            return 1

    silence, start = threading.Event(), time.monotonic()
    with pytest.raises(DeadlineError, match="the store in which rank 1 waits does not answer"):
        torch_engine.form_group(1, 2, "127.0.0.1", store=Silent(), timeout_seconds=0.5)
    assert time.monotonic() - start < SOON_SECONDS
    silence.set()


def test_an_interrupt_ends_the_forming_of_a_group():
    found = subprocess.run(
        [sys.executable, "-c", IS_INTERRUPTED], capture_output=True, text=True, timeout=240
    )
    assert (found.returncode, found.stdout) == (0, "interrupted\n"), found.stderr


IS_INTERRUPTED = """
import os, signal, socket, threading
from crossdevice.process_groups.engines.torch_engine import form_group

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background does not inherit
with socket.create_server(("127.0.0.1", 0)) as silent:
    def interrupt():
        kept = [silent.accept() for _ in range(2)]  # a knock, then the store that waits for an answer
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait()

    threading.Thread(target=interrupt, daemon=True).start()
    try:
        form_group(1, 2, *silent.getsockname(), timeout_seconds=50.0)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    os._exit(0)
"""


def test_a_rank_that_gave_up_first_is_not_said_to_have_stayed_away(store):
    def fail(rank):
        with pytest.raises(DeadlineError) as caught:
            torch_engine.form_group(rank, 3, "127.0.0.1", store=store, timeout_seconds=0.3 + 5.0 * rank)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(fail, range(2))
    assert "rank 2 did not come; ranks 0, 1 came. Are" in first
    assert "rank 2 did not come; ranks 0, 1 came; rank 0 has given up. Are" in second


def test_a_process_may_form_two_groups_at_once(store):
    """As two models do whose first gradients come at the same time."""

    def both(rank):
        with ThreadPoolExecutor(2) as pool:
            formed = pool.map(lambda _: form(rank), range(2))
        return sorted(group.size for group in formed)

    def form(rank):
        return torch_engine.form_group(rank, 2, "127.0.0.1", store=store, timeout_seconds=20.0)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(both, range(2))) == [[2, 2]] * 2


def test_two_processes_with_one_rank_are_refused_and_everybody_is_told(store, monkeypatch):
    monkeypatch.setattr(torch_meeting, "own_name", lambda: threading.current_thread().name)
    monkeypatch.setattr(torch_meeting.Meeting, "_ask", lambda meeting, function: function())

    def be(rank):
        with pytest.raises(OptionError, match="two processes call themselves rank 1 of 3: "):
            torch_engine.form_group(rank, 3, "127.0.0.1", store=store, timeout_seconds=90.0)

    start = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(be, (0, 1, 1)))
    be(2)  # which comes when they have left
    assert time.monotonic() - start < 60.0


def test_ranks_of_a_launch_that_disagree_about_their_number_are_all_told(store, monkeypatch):
    monkeypatch.setattr(torch_engine, "default_store", lambda: store)

    def be(rank, size):
        launch = Launch(rank, size, None, None, "by hand")
        with pytest.raises(OptionError, match=r"how many they are \(WORLD_SIZE\).*says [34].*says [34]"):
            torch_engine.form_in_cluster(launch, name="", timeout_seconds=90.0)

    start = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(be, range(3), (3, 3, 4)))
    assert time.monotonic() - start < 60.0


def test_ranks_that_wait_for_groups_of_different_sizes_are_told(store):
    def fail(size):
        seconds = {2: 3.0, 3: 9.0}[size]
        with pytest.raises(DeadlineError) as caught:
            torch_engine.form_group(size - 2, size, "127.0.0.1", store=store, timeout_seconds=seconds)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        first, _ = pool.map(fail, (2, 3))
    assert re.search(r"rank 1 did not come; rank 0 came; rank 1 \(.*\) waits for a group of 3\. Are", first)


def test_a_group_that_was_formed_is_not_mistaken_for_one_of_another_size(store):
    run(3, gather, store)
    with pytest.raises(DeadlineError, match=r"rank 1 did not come; rank 0 came\. Are"):
        torch_engine.form_group(0, 2, "127.0.0.1", store=store, timeout_seconds=0.2)


@pytest.mark.skipif(sys.platform != "linux", reason="sockets are read from /proc")
def test_a_store_at_an_address_listens_there_only():
    port = free_port()
    torch_store.store_at("127.0.0.1", port, is_keeper=True, timeout_seconds=120.0)
    listening = [
        fields[1]
        for table in ("tcp", "tcp6")
        for fields in map(str.split, Path(f"/proc/net/{table}").read_text().splitlines()[1:])
        if fields[3] == "0A" and fields[1].endswith(f":{port:04X}")
    ]
    assert listening == [f"0100007F:{port:04X}"]


def test_an_unauthenticated_store_is_said_once_for_this_host_and_once_for_others(monkeypatch, caplog):
    torch_store._say_unauthenticated.cache_clear()
    monkeypatch.setattr(torch_store, "_opened", lambda *arguments: torch.distributed.HashStore())
    monkeypatch.setattr(torch_store, "_open_stores", {})
    for address in ("127.0.0.1", "10.0.0.1", "node7"):
        torch_store.store_at(address, 1, is_keeper=True, timeout_seconds=1.0)
    one, other = (record.getMessage() for record in caplog.records)
    assert "the store, which any user of this host can, can join or break a group" in one
    assert "whoever can reach the store can join or break a group" in other


def test_a_rank_that_waited_in_vain_meets_the_others_when_it_tries_again(store):
    for _ in range(2):
        with pytest.raises(DeadlineError, match="rank 1 did not come"):
            torch_engine.form_group(0, 2, "127.0.0.1", store=store, timeout_seconds=0.1)
    with pytest.raises(DeadlineError, match="ranks 0, 1 came; rank 0 has given up"):
        torch_engine.form_group(1, 2, "127.0.0.1", store=store, timeout_seconds=0.1)
    assert run(2, gather, store) == [[b"0", b"1"]] * 2


def test_a_group_may_have_no_deadline_at_all(store):
    assert run(2, gather, store, timeout_seconds=float("inf")) == [[b"0", b"1"]] * 2


def test_a_rank_beyond_the_size_is_refused(store):
    with pytest.raises(OptionError, match="got rank 2 of 2"):
        torch_engine.form_group(2, 2, store=store)


def test_without_a_store_an_address_is_needed():
    with pytest.raises(OptionError, match="got neither"):
        torch_engine.form_group(0, 2)


def test_a_store_that_cannot_be_reached_is_named():
    started = time.monotonic()
    with pytest.raises(
        ProcessGroupError, match=r"127.0.0.1:1, .* could not be reached: is rank 0 there"
    ) as lost:
        torch_engine.form_group(1, 2, "127.0.0.1", 1, timeout_seconds=0.5)
    assert time.monotonic() - started < SOON_SECONDS
    assert len(str(lost.value)) < 500  # without the traces of PyTorch's C++


def test_groups_follow_each_other_in_one_store(store):
    for size in (2, 3, 2):
        assert run(size, gather, store) == [[b"%d" % rank for rank in range(size)]] * size


def test_names_tell_groups_apart(store):
    with ThreadPoolExecutor(2) as pool:
        ours, theirs = pool.map(lambda name: run(2, gather, store, name=name), ["ours", "theirs"])
    assert ours == theirs == [[b"0", b"1"]] * 2


def test_memory_is_sent_as_it_is_and_without_a_warning(store):
    values = np.arange(6, dtype=np.float16).reshape(2, 3)
    values.flags.writeable = False

    def swap(group):
        got = np.empty_like(values)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tensor = torch_engine._tensor(values)
        assert tensor.data_ptr() == values.ctypes.data
        with group.call("swap", b"") as call:
            other = 1 - group.rank
            call.exchange([Message(other, values)], [Message(other, got)])
        return got.tolist()

    assert run(2, swap, store) == [values.tolist()] * 2


def test_the_interface_named_by_the_environment_is_used(store, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    with pytest.raises(ProcessGroupError, match="GLOO_SOCKET_IFNAME"):
        run(1, gather, store)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert run(1, gather, store) == [[b"0"]]


def joined(size, store, **options):
    """Engines of a group, by rank."""

    def join(rank):
        address = "127.0.0.1"
        return torch_engine.TorchEngine(store, rank, size, address=address, timeout_seconds=20.0, **options)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(join, range(size)))


def test_a_program_may_send_over_the_gloo_group_with_lower_tags(store):
    engines = joined(2, store, first_tag=torch_engine.UPPER_TAGS)
    tag, received = 7, [torch.zeros(1, dtype=torch.uint8) for _ in range(2)]
    waiting = [engines[rank].gloo.recv([received[rank]], 1 - rank, tag) for rank in range(2)]

    def swap(rank):
        got = np.zeros(1, np.uint8)
        messages = [Message(1 - rank, np.full(1, 10 + rank, np.uint8))], [Message(1 - rank, got)]
        engines[rank].exchange(*messages, tag, 20.0)  # of the same number
        sent = torch.full((1,), 20 + rank, dtype=torch.uint8)
        engines[rank].gloo.send([sent], 1 - rank, tag).wait()
        waiting[rank].wait()
        return got.item(), received[rank].item()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(swap, range(2))) == [(11, 21), (10, 20)]


@pytest.mark.parametrize("leaves", [False, True], ids=["all are there", "the next rank is gone"])
def test_closing_ends_what_is_on_its_way(leaves, store):
    """Long before the engine's own deadline."""
    engines = joined(3, store)
    if leaves:
        engines[1].close()
        with pytest.raises(ConnectionError):
            engines[0].exchange([], [Message(1, np.empty(4))], 6, 20.0)
        engines[0]._is_out = False
    ended = threading.Event()

    def wait_in_vain():
        try:
            engines[0].exchange([], [Message(2, np.empty(4))], 7, 250.0)
        except ConnectionError:
            ended.set()

    waiting = threading.Thread(target=wait_in_vain)
    waiting.start()
    while not engines[0]._is_out:
        pass
    engines[0].close()
    waiting.join()
    assert ended.is_set()
    for engine in engines[1:]:
        engine.close()


def test_only_a_silent_rank_is_asked_whether_it_is_there(store):
    """What is sent to one that has just left destroys what is still on its way from it."""

    class Gloo:
        def __init__(self):
            self.asked = []

        def send(self, tensors, peer, tag):
            self.asked.append(peer)
            raise RuntimeError("it is gone")

    (engine,) = joined(1, store)
    engine._gloo = gloo = Gloo()
    engine._left = [torch_engine._Awaited(1, None)]
    engine.check_contact({0, 2})
    assert gloo.asked == []
    engine.check_contact({1})  # once may be chance
    with pytest.raises(ConnectionError, match="it is gone"):
        engine.check_contact({1})


def test_whoever_comes_after_a_deadline_gets_nothing_that_was_written_since(store):
    turns = threading.Barrier(2, timeout=120)

    def swap(group):
        mine, got, other = np.full(1000, group.rank), np.full(1000, -1), 1 - group.rank
        if group.rank == 1:
            turns.wait()  # for rank 0 to give up
        try:
            with group.call("swap", b"", 0.3 if group.rank == 0 else 20.0) as call:
                call.exchange([Message(other, mine)], [Message(other, got)])
            return f"got {got[0]}"
        except (DeadlineError, ProcessGroupError) as error:
            return str(error)
        finally:
            if group.rank == 0:
                mine[:] = 7
                turns.wait()
            turns.wait()  # for rank 1 to have come

    first, second = run(2, swap, store)
    assert "has not arrived" in first
    assert "gave up, since its deadline passed" in second


def test_a_forgotten_group_leaves_no_thread(store):
    def thread_of(group):
        gather(group)
        return group._background._thread

    def be(rank):
        return thread_of(torch_engine.form_group(rank, 2, "127.0.0.1", store=store, timeout_seconds=20.0))

    with ThreadPoolExecutor(2) as pool:
        threads = list(pool.map(be, range(2)))
    gc.collect()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()


def test_gloo_errors_are_cut_to_what_they_tell():
    error = RuntimeError("[/a/pair.cc:1] Connection closed by peer [::1]:2. This is typically a crash\nframe")
    assert torch_store.reason_of(error) == "Connection closed by peer [::1]:2"


ENDS_IN_AN_EXCHANGE = """
import threading
from torch.distributed import HashStore
from crossdevice.process_groups.engines.torch_engine import form_group

store, groups = HashStore(), {}

def form(rank):
    groups[rank] = form_group(rank, 2, "127.0.0.1", store=store)

threads = [threading.Thread(target=form, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()

is_out = threading.Event()

def wait_for_rank_1():
    with groups[0].call("gather", b"alone") as call:
        is_out.set()
        call.all_gather(b"0")

threading.Thread(target=wait_for_rank_1, daemon=True).start()
is_out.wait()
"""


def test_a_process_that_ends_in_the_middle_of_an_exchange_ends_in_order():
    found = subprocess.run(
        [sys.executable, "-c", ENDS_IN_AN_EXCHANGE], capture_output=True, text=True, timeout=240
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


FORKS = """
import os, sys, threading
from torch.distributed import HashStore
from crossdevice.process_groups.engines.torch_engine import form_group, store_at

kept = store_at("127.0.0.1", int(sys.argv[1]), is_keeper=True, timeout_seconds=120.0)
store, groups = HashStore(), {}

def form(rank):
    groups[rank] = form_group(rank, 2, "127.0.0.1", store=store)

threads = [threading.Thread(target=form, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for ending in (
    "pass",
    "groups[0].close()",
    "groups.clear()",
    "groups[0].__exit__(None, None, None)",
    "groups[0].give_up('')",
):
    child = os.fork()
    if not child:
        exec(ending)
        sys.exit(3)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), "after", ending, flush=True)

def gather(rank):
    with groups[rank].call("gather", b"still there") as call:
        call.all_gather(b"0")

threads = [threading.Thread(target=gather, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_forked_processes_end_and_leave_the_group_to_their_parent():
    environment = {**os.environ, "CROSSDEVICE_GROUP_KEY": "secret"}  # without it a warning is printed
    found = subprocess.run(
        [sys.executable, "-c", FORKS, str(free_port())],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert [line.split()[0] for line in found.stdout.splitlines()] == ["3"] * 5, found.stdout


def test_ranks_with_ended_connections_are_told_from_the_others(store):
    has_left, are_done = threading.Event(), threading.Barrier(2)

    def be(rank):
        engine = torch_engine.TorchEngine(store, rank, 3, address="127.0.0.1", timeout_seconds=90.0)
        assert rank == 2 or set(engine.gone_ranks()) <= {2}
        if rank == 2:
            torch_engine._hang_up(engine._gloo, [0, 1])
            has_left.set()
            return
        has_left.wait()
        end = time.monotonic() + 60.0
        while engine.gone_ranks() != [2]:
            assert time.monotonic() < end
            time.sleep(0.01)
        are_done.wait()
        engine.close()
        assert engine.gone_ranks() == []

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(be, range(3)))


def test_a_rank_that_leaves_at_once_does_not_keep_others_from_having_an_engine(store, monkeypatch):
    connected, has_left = torch_engine.TorchEngine._connected, threading.Event()

    def connected_late(engine, host, deadline):
        gloo = connected(engine, host, deadline)
        if engine.rank == 0:
            assert has_left.wait(60.0)
            end = time.monotonic() + 60.0
            while torch_engine._refused(gloo, 1) is None:
                assert time.monotonic() < end
                time.sleep(0.01)
        return gloo

    def be(rank):
        engine = torch_engine.TorchEngine(store, rank, 2, address="127.0.0.1", timeout_seconds=90.0)
        if rank == 1:
            torch_engine._hang_up(engine._gloo, [0])
            has_left.set()
        else:
            assert engine.gone_ranks() == [1]
            assert engine.farewells() == {}
        engine.close()

    monkeypatch.setattr(torch_engine.TorchEngine, "_connected", connected_late)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(be, range(2)))


def test_a_rank_that_hangs_up_says_its_last_note_to_each_of_the_others_without_the_store(store):
    engines = joined(4, store)
    engines[1].farewell = "rank 3 is gone"
    engines[2].farewell = "x" * torch_engine.FAREWELL_BYTES  # too long to be sent
    engines[1]._is_store_gone = True
    engines[1].abandon()
    engines[2].close()
    end = time.monotonic() + 60.0
    while engines[0].gone_ranks() != [1, 2]:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert engines[0].farewells() == {1: "rank 3 is gone"}
    engines[1].close()
    engines[3].close()
    engines[0].close()
