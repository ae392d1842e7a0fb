"""Groups on Unix sockets, with ranks as threads: who meets whom, what is refused, and what is left."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from crossdevice.errors import DeadlineError, OptionError, ProcessGroupError
from crossdevice.process_groups.cluster import environments_of_ranks
from crossdevice.process_groups.engines import local_meeting
from crossdevice.process_groups.engines.local_engine import LocalEngine, form_group, form_in_cluster
from crossdevice.process_groups.protocol import Message, RankLostError
from crossdevice.values.launchers import launched

SECONDS = 60.0


@pytest.fixture
def folder(tmp_path_factory):
    """A short path: those of sockets have at most 107 bytes."""
    return tmp_path_factory.mktemp("s")


def together(size, function):
    """What the function gives or raises, called with each rank at the same time."""

    def call(rank):
        try:
            return function(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(call, range(size)))


def engines(folder, size, **options):
    found = together(size, lambda rank: LocalEngine(folder, rank, size, timeout_seconds=SECONDS, **options))
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


def test_a_message_of_any_size_arrives_whole_both_ways(folder):
    one, other = engines(folder, 2)
    random = np.random.default_rng(3)
    for lengths in ([1], [65519, 65520, 65521], [5 << 20, 3, 1 << 20], [7] * 200):
        sent = [[random.integers(0, 255, length, np.uint8) for length in lengths] for _ in range(2)]
        got = [[np.zeros(length, np.uint8) for length in lengths] for _ in range(2)]

        def exchange(rank, sent=sent, got=got):
            peer = 1 - rank
            (one, other)[rank].exchange(
                [Message(peer, part) for part in sent[rank]],
                [Message(peer, part) for part in got[rank]],
                9,
                SECONDS,
            )

        assert together(2, exchange) == [None, None]
        for rank in (0, 1):
            assert all(map(np.array_equal, got[rank], sent[1 - rank]))
    one.close()
    other.close()
    assert list(folder.iterdir()) == []


def test_a_message_of_another_tag_is_left_alone(folder):
    one, other = engines(folder, 2)
    one.exchange([Message(1, np.full(3, 5, np.uint8))], [], 7, SECONDS)
    memory = np.zeros(3, np.uint8)
    with pytest.raises(TimeoutError):
        other.exchange([], [Message(0, memory)], 8, 0.05)
    assert memory.tolist() == [0, 0, 0]
    other.exchange([], [Message(0, memory)], 7, SECONDS)
    assert memory.tolist() == [5, 5, 5]
    waiting = other.begin([], [Message(0, memory)], 8)
    one.close()
    with pytest.raises(RankLostError, match="closed its connection"):
        waiting.wait(SECONDS)
    other.close()


def test_what_was_sent_before_a_rank_left_arrives(folder):
    one, other = engines(folder, 2)
    one.exchange([Message(1, np.arange(9, dtype=np.uint8))], [], 1, SECONDS)
    one.post("gone")
    one.close()
    memory = np.zeros(9, np.uint8)
    other.exchange([], [Message(0, memory)], 1, SECONDS)
    assert memory.tolist() == list(range(9))
    assert other.notes() == {0: "gone"}
    with pytest.raises(RankLostError):
        other.exchange([], [Message(0, memory)], 2, SECONDS)
    other.close()
    assert list(folder.iterdir()) == []


def test_the_nth_group_is_made_with_the_nth(folder):
    def form(rank):
        for number in range(20):
            with form_group(rank, 3, folder, timeout_seconds=SECONDS) as group, group.call("x", b"x") as call:
                assert call.all_gather(b"%d%02d" % (rank, number)) == [
                    b"%d%02d" % (r, number) for r in range(3)
                ]

    assert together(3, form) == [None] * 3
    assert list(folder.iterdir()) == []


def test_who_waited_in_vain_meets_the_others_when_it_tries_again(folder):
    with pytest.raises(DeadlineError, match="rank 1 did not come; rank 0 came"):
        LocalEngine(folder, 0, 2, timeout_seconds=0.1)
    for engine in engines(folder, 2):
        engine.close()


def test_a_rank_that_was_left_out_of_groups_of_the_others_catches_up(folder):
    for engine in engines(folder, 2):
        engine.close()
    for engine in engines(folder, 3):  # for rank 2 the first
        engine.close()


def test_a_socket_whose_process_is_gone_is_in_nobodys_way(folder):
    code = "import os, socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1])"
    key = local_meeting.Meeting(folder, "", 0, 2, 1.0)._path
    subprocess.run([sys.executable, "-c", code, str(key)], check=True)
    assert key.exists()
    for engine in engines(folder, 2):
        engine.close()


def test_two_processes_of_one_rank_are_refused_and_everybody_is_told(folder, monkeypatch):
    monkeypatch.setattr(local_meeting, "_places", _NoLocks())
    ranks = [0, 1, 1]
    found = together(3, lambda n: LocalEngine(folder, ranks[n], 3, timeout_seconds=SECONDS))
    for error in found:
        assert isinstance(error, OptionError), found
        assert "two processes call themselves rank 1 of 3" in str(error)
    with pytest.raises(OptionError, match="two processes call themselves rank 1 of 3"):
        LocalEngine(folder, 2, 3, timeout_seconds=SECONDS)
    for engine in engines(folder, 3):  # they have a second try
        engine.close()


@pytest.mark.parametrize(
    ("ranks", "sizes", "reason"),
    [
        ((1, 1, 0), (3, 3, 3), "two processes call themselves rank 1 of 3"),
        ((0, 0, 1, 2), (3, 3, 3, 3), "two processes call themselves rank 0 of 3"),
        ((1, 2, 0), (3, 4, 3), "ranks disagree about how many they are"),
        ((2, 3, 1, 0), (4, 5, 4, 4), "ranks disagree about how many they are"),
    ],
)
def test_whoever_comes_after_the_first_two_were_refused_is_told_the_same(
    ranks, sizes, reason, folder, monkeypatch
):
    monkeypatch.setattr(local_meeting, "_places", _NoLocks())
    found = together(2, lambda n: LocalEngine(folder, ranks[n], sizes[n], timeout_seconds=SECONDS))
    for rank, size in zip(ranks[2:], sizes[2:], strict=True):  # the others have left
        found += together(1, lambda _, r=rank, n=size: LocalEngine(folder, r, n, timeout_seconds=SECONDS))
    for error in found:
        assert isinstance(error, OptionError), found
        assert reason in str(error)


def test_a_rank_is_in_no_group_before_all_ranks_have_met_all(folder, monkeypatch):
    """Else a reason that one of them finds late would reach the others as a lost connection."""
    has_met = threading.Event()
    say_ready = local_meeting.Meeting._say_ready

    def say_ready_but_rank_1(meeting):
        if meeting._rank != 1:
            say_ready(meeting)
        elif not has_met.is_set():
            has_met.set()

    monkeypatch.setattr(local_meeting, "_places", _NoLocks())
    monkeypatch.setattr(local_meeting.Meeting, "_say_ready", say_ready_but_rank_1)

    def come(number):
        if number == 3:
            has_met.wait()
        return LocalEngine(folder, (0, 1, 2, 1)[number], 3, timeout_seconds=SECONDS)

    for error in together(4, come):
        assert isinstance(error, OptionError)
        assert "two processes call themselves rank 1 of 3" in str(error)


class _NoLocks(dict):
    """As if each thread were a process of its own."""

    def setdefault(self, _, lock):
        return lock


COMES = """
import sys
from crossdevice.errors import CrossDeviceError
from crossdevice.process_groups.engines.local_engine import LocalEngine
folder, rank, size = sys.argv[1], *map(int, sys.argv[2:])
try:
    engine = LocalEngine(__import__("pathlib").Path(folder), rank, size, timeout_seconds=60.0)
except CrossDeviceError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
else:
    print("formed", flush=True)
    sys.stdin.readline()
    engine.close()
"""


@pytest.mark.more("one more launch")
def test_processes_that_do_not_fit_a_group_that_is_there_are_refused_and_leave_it_whole(folder):
    def process(rank, size):
        command = [sys.executable, "-c", COMES, folder, str(rank), str(size)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    members = [process(0, 2), process(1, 2)]
    assert [each.stdout.readline() for each in members] == ["formed\n"] * 2
    notes = {path.name for path in folder.iterdir()}
    others = [process(1, 2), process(2, 3)]
    for other in others:  # each by its own reason, or by the other one's
        answer, _ = other.communicate()
        assert answer.startswith("OptionError"), answer
        assert "themselves rank 1 of 2" in answer or "disagree about how many" in answer
        assert any(f"process {each.pid}" in answer for each in members)
    assert notes <= {path.name for path in folder.iterdir()}
    for each in members:
        each.communicate("\n")
    members = [process(0, 2), process(1, 2)]  # another launch, for which this is no reason
    assert [each.stdout.readline() for each in members] == ["formed\n"] * 2
    for each in members:
        each.communicate("\n")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("sizes", [(2, 3), (3, 3, 4), (4, 3, 3)])
def test_ranks_that_disagree_about_their_number_are_all_told(sizes, folder):
    found = together(len(sizes), lambda rank: LocalEngine(folder, rank, sizes[rank], timeout_seconds=SECONDS))
    for error in found:
        assert isinstance(error, OptionError), found
        assert "ranks disagree about how many they are (WORLD_SIZE)" in str(error)
        assert f"says {max(sizes)}" in str(error)
        assert f"says {min(sizes)}" in str(error)


def test_under_crossdevice_run_another_world_size_of_one_rank_is_told_to_everybody(folder):
    started = environments_of_ranks(3, str(folder))
    started[2]["WORLD_SIZE"] = "4"
    launches = [launched(environment) for environment in started]
    found = together(3, lambda rank: form_in_cluster(launches[rank], name="", timeout_seconds=SECONDS))
    for error in found:
        assert isinstance(error, OptionError), found
        assert "ranks disagree about how many they are (WORLD_SIZE): rank " in str(error)


def test_a_rank_that_comes_after_a_group_was_formed_learns_who_was_there(folder, monkeypatch):
    made = engines(folder, 2)
    monkeypatch.setattr(local_meeting, "own_name", lambda: "elsewhere, process 5")
    with pytest.raises(DeadlineError, match=rf"; another process, .*{os.getpid()}, has been rank 1 before"):
        LocalEngine(folder, 1, 2, timeout_seconds=0.1)
    for engine in made:
        engine.close()


def test_a_folder_that_others_can_enter_is_refused(folder):
    folder.chmod(0o755)
    with pytest.raises(OptionError, match=r"mode 0700.*drwxr-xr-x"):
        LocalEngine(folder, 0, 2, timeout_seconds=SECONDS)
    link = folder.parent / "link"
    link.symlink_to(folder)
    with pytest.raises(OptionError, match="lrwx"):
        LocalEngine(link, 0, 2, timeout_seconds=SECONDS)
    link.unlink()


def test_a_path_that_is_too_long_and_a_rank_that_is_none_are_refused(folder):
    with pytest.raises(OptionError, match="AF_UNIX path too long"):
        LocalEngine(folder / ("x" * 120), 0, 2, timeout_seconds=SECONDS)
    with pytest.raises(OptionError, match="got rank 2 of 2"):
        LocalEngine(folder, 2, 2)


def test_a_second_group_of_one_name_waits_for_its_turn(folder):
    def form():
        with pytest.raises(DeadlineError):
            LocalEngine(folder, 0, 2, timeout_seconds=3.0)

    engine = threading.Thread(target=form)
    engine.start()
    while not any(folder.iterdir()):
        time.sleep(0.001)
    with pytest.raises(DeadlineError, match="forms another group of this name"):
        LocalEngine(folder, 0, 2, timeout_seconds=0.1)
    engine.join()


def test_a_closed_engine_says_so(folder):
    def program(rank):
        group = form_group(rank, 2, folder, timeout_seconds=SECONDS, shared_memory=False)
        group._engine.close()
        with group.call("x", b"x") as call:
            call.all_gather(b"x")

    assert [type(error) for error in together(2, program)] == [ProcessGroupError] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")
def test_a_forked_process_keeps_no_connection_open(folder):
    one, other = engines(folder, 2)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(read, 1)
        os._exit(0)
    one._connections[1].socket.close()  # as if this rank had been killed
    with pytest.raises(RankLostError):
        other.exchange([], [Message(0, np.zeros(1, np.uint8))], 1, SECONDS)
    os.write(write, b".")
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)
    other.close()
