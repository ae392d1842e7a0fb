"""Groups on threads: what happens when ranks do not make the same calls in time."""

import os
import re
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.errors import DeadlineError, MismatchError, OptionError, ProcessGroupError
from crossdevice.process_groups import group as group_module
from crossdevice.process_groups.background import BackgroundThread
from crossdevice.process_groups.engines.thread_engine import Mailboxes, ThreadEngine, run_ranks
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.notes import board as board_module
from crossdevice.process_groups.notes import introduction
from crossdevice.process_groups.notes import watch as watch_module
from crossdevice.process_groups.notes.board import Note
from crossdevice.process_groups.notes.introduction import CODE_BYTES, Signer
from crossdevice.process_groups.protocol import Message, RankLostError


@pytest.fixture(autouse=True)
def _others_get_less_time(monkeypatch):
    for module in (board_module, watch_module):
        monkeypatch.setattr(module, "GRACE_SECONDS", 0.6)


def gather(group, what="gather", signature=b"same", seconds=None):
    with group.call(what, signature, seconds) as call:
        return call.all_gather(b"%d" % group.rank)


def until_noted(group, rank, is_enough):
    """Waits for a note of a rank that is enough; returns the note."""
    boxes = group._engine._boxes

    def latest():
        text = boxes.notes.get(rank)
        note = None if text is None else Note.read(text[2 * CODE_BYTES :])
        return note if note is not None and is_enough(note) else None

    with boxes.changed:
        note = boxes.changed.wait_for(latest, 20.0)
    assert note is not None
    return note


def until_read(group, rank, place):
    """Waits until a rank that is at a place has read the board once more."""
    first = until_noted(group, rank, lambda note: note.place == place)
    until_noted(group, rank, lambda note: note.place > place or note.beat > first.beat + 1)


def refused(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        return error
    return None


def each_in_a_thread(be, number):
    """Calls `be(rank)` for each rank, in a thread whose name says which."""
    threads = [threading.Thread(target=be, args=(rank,), name=f"rank {rank}") for rank in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_calls_that_differ_are_named_on_every_rank():
    def differ(group):
        return refused(gather, group, "reduce" if group.rank == 1 else "gather", b"%d" % (group.rank == 1))

    for error in run_ranks(3, differ):
        assert isinstance(error, MismatchError)
        assert "call 1 is not the same on all ranks: rank 1 (" in str(error)
        assert "calls reduce; the other 2 call gather" in str(error)


def test_a_rank_that_is_late_is_named_by_those_who_waited():
    done = threading.Barrier(3)

    def be_late(group):
        if group.rank == 1:
            done.wait()
            return None
        error = refused(gather, group, "gather", b"same", 0.3)
        done.wait()
        return error

    errors = run_ranks(3, be_late)
    for rank in (0, 2):
        assert isinstance(errors[rank], DeadlineError)
        assert "rank 1 (" in str(errors[rank])
        assert "has not arrived; ranks 0, 2 are there" in str(errors[rank])


def test_a_broken_group_refuses_later_calls_and_says_why():
    done = threading.Barrier(2)

    def wait_alone(group):
        error = None
        if group.rank == 0:
            refused(gather, group, "gather", b"same", 0.1)
            error = refused(gather, group)
        done.wait()
        return error

    error = run_ranks(2, wait_alone)[0]
    assert isinstance(error, ProcessGroupError)
    assert "formed: call 1 (gather) was not done in 0.1 seconds (timeout_seconds): rank 1 (" in str(error)


def test_a_rank_that_gives_up_is_named_by_one_error_without_others_behind_it():
    def give_up(group):
        return group.give_up("KeyError: 'w'") if group.rank == 1 else refused(gather, group)

    error = run_ranks(2, give_up)[0]
    assert isinstance(error, ProcessGroupError)
    assert "gave up: KeyError: 'w'; rank 0 is there" in str(error)
    assert error.__cause__ is None


def test_a_rank_that_is_gone_with_the_board_it_kept_is_named_whoever_hung_up_first():
    def lose(rank):
        def fail(*arguments):
            raise RankLostError(rank, "Connection closed by peer")

        return fail

    def cut_off(group):
        if group.rank == 1:
            engine = group._engine
            engine.exchange, engine.post, engine.board_keeper = lose(2), lose(0), 0
            return group.members, refused(gather, group)
        return None

    members, error = run_ranks(3, cut_off)[1]
    assert isinstance(error, ProcessGroupError)
    assert f"lost contact: {members[0]}, which keeps the board of notes, cannot be reached; the" in str(error)
    assert f"the connection to {members[2]} has ended, maybe only because of that; " in str(error)


def test_a_rank_that_refuses_a_call_and_leaves_at_once_is_not_waited_for():
    def refuse(group):
        if group.rank == 1:
            group.refuse("ZeroDivisionError: no examples")
            return None
        return gather(group)

    errors = run_ranks(2, lambda group: refused(refuse, group), timeout_seconds=5.0)
    assert isinstance(errors[0], MismatchError)
    assert "calls nothing (ZeroDivisionError: no examples)" in str(errors[0])


def test_a_rank_that_closes_its_group_is_noticed_long_before_the_deadline():
    def close(group):
        return group.close() if group.rank == 1 else refused(gather, group)

    start = time.monotonic()
    errors = run_ranks(3, close, timeout_seconds=60.0)
    assert time.monotonic() - start < 30.0
    for rank in (0, 2):
        assert isinstance(errors[rank], ProcessGroupError)
        assert "rank 1 (" in str(errors[rank])
        assert "gave up: it closed the group" in str(errors[rank])


def test_a_rank_that_leaves_its_group_by_an_exception_says_which():
    def leave(group):
        if group.rank == 0:
            return refused(gather, group)
        with pytest.raises(ValueError, match="no examples"), group:
            raise ValueError("no examples")
        return None

    error = run_ranks(2, leave, timeout_seconds=60.0)[0]
    assert "gave up: it closed the group after ValueError('no examples')" in str(error)


def test_a_rank_that_has_done_its_part_may_close_while_others_still_wait():
    """Rank 0 waits for rank 2 only, in the call that rank 1 has left, and closed its group after."""
    closed = threading.Event()

    def send_and_leave(group):
        with group.call("to rank 0", b"same", 60.0) as call:
            if group.rank == 2:
                closed.wait()
                until_read(group, 0, (1, 1))
            if group.rank == 0:
                got = [np.empty(1) for _ in range(2)]
                call.exchange([], [Message(rank, buffer) for rank, buffer in zip((1, 2), got, strict=True)])
                return [array.item() for array in got]
            call.has_heard = True  # not from rank 0, whom nobody asks
            call.exchange([Message(0, np.full(1, group.rank + 0.5))], [])
        group.close()
        closed.set()
        return None

    assert run_ranks(3, send_and_leave)[0] == [1.5, 2.5]


def test_a_late_rank_does_not_wait_for_one_whose_deadline_has_passed():
    gave_up = threading.Event()

    def receive(group):
        with group.call("receive", b"same", 0.1 if group.rank == 0 else 60.0) as call:
            call.exchange([], [Message(1 - group.rank, np.empty(1))])

    def be_late(group):
        if group.rank == 1:
            gave_up.wait()
        start = time.monotonic()
        error = refused(receive, group)
        gave_up.set()
        return error, time.monotonic() - start

    (first, _), (second, seconds) = run_ranks(2, be_late)
    assert isinstance(first, DeadlineError)
    assert "gave up, since its deadline passed" in str(second)
    assert seconds < 30.0


def test_a_call_without_data_meets_the_others_too():
    """Else a rank for which there is nothing to send would be done while others wait for it."""

    def differ(group):
        return refused(exchange_nothing if group.rank == 0 else gather, group)

    def exchange_nothing(group):
        with group.call("nothing", b"at all") as call:
            call.exchange([], [])

    for error in run_ranks(2, differ, timeout_seconds=60.0):
        assert isinstance(error, MismatchError)


def test_a_call_inside_of_a_call_is_refused_and_others_hear_of_it():
    """As a signal's handler makes it, in the thread that waits."""
    handled = threading.Event()

    def interrupt(group):
        errors = []
        with group.call("outer", b"outer") as call:
            if group.rank == 0:
                errors.append(refused(gather, group, "inner"))
                handled.set()
            handled.wait()
            call.all_gather(b"0")
        errors.append(refused(gather, group, "after", b"after"))
        return errors

    (nested, first), (second,) = run_ranks(2, interrupt, timeout_seconds=60.0)
    assert isinstance(nested, ProcessGroupError)
    assert "inner was called in the middle of call 1, by the same thread: by a signal's handler?" in str(
        nested
    )
    for error in (first, second):  # rank 0 is one call ahead of rank 1, whose handler has not run
        assert isinstance(error, (MismatchError, ProcessGroupError))
    assert "calls nothing (inner was called in the middle of call 1" in str(second)


def test_a_handler_that_reduces_while_its_thread_waits_does_not_hang():
    """With a real signal, sent while the main thread waits for a rank that does not come."""
    found = subprocess.run([sys.executable, "-c", REDUCES_IN_A_HANDLER], capture_output=True, timeout=240)
    assert (found.returncode, found.stderr.decode()) == (0, "")


REDUCES_IN_A_HANDLER = """
import signal, threading
import numpy as np
import crossdevice as cd
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.engines.thread_engine import Mailboxes, ThreadEngine

boxes, groups = Mailboxes(2), {}

def form(rank):
    groups[rank] = ProcessGroup(ThreadEngine(boxes, rank), timeout_seconds=30.0)
    # What is imported in a first call is there when the signal comes.
    cd.CollectiveAllReduce(group=groups[rank]).reduce("sum", np.ones(3), "cpu:0")

threads = [threading.Thread(target=form, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()

ops = cd.CollectiveAllReduce(group=groups[0])

def handle(number, frame):
    ops.reduce("max", np.ones(1), "cpu:0")

signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.5)
try:
    ops.reduce("sum", np.ones(2), "cpu:0")
except cd.errors.ProcessGroupError as error:
    assert "by a signal's handler?" in str(error), error
else:
    raise AssertionError("nobody was told")
"""


def test_two_threads_that_call_at_once_are_both_refused():
    """Else the first call of one rank could be taken for the second of another."""
    is_inside, has_tried = threading.Barrier(2), threading.Barrier(2)

    def race(group):
        def first():
            with group.call("sum", b"same") as call:
                is_inside.wait()
                has_tried.wait()
                call.all_gather(b"0")

        if group.rank == 1:
            return refused(gather, group)
        errors = []
        thread = threading.Thread(target=lambda: errors.append(refused(first)))
        thread.start()
        is_inside.wait()
        errors.append(refused(gather, group, "sum", b"same"))
        has_tried.wait()
        thread.join()
        return errors

    of_threads, other = run_ranks(2, race, timeout_seconds=60.0)
    for error in of_threads:
        assert isinstance(error, ProcessGroupError)
        assert "two threads made calls at once: sum during call 1" in str(error)
    assert "two threads made calls at once" in str(other)


def test_two_threads_of_a_group_of_one_wait_for_each_other():
    group = ProcessGroup(ThreadEngine(Mailboxes(1), 0))
    is_inside, answers = threading.Event(), []

    def second():
        is_inside.wait()
        answers.append(gather(group))

    thread = threading.Thread(target=second)
    thread.start()
    with group.call("first", b""):
        is_inside.set()
    thread.join()
    assert answers == [[b"0"]]
    group.close()


def test_ranks_with_different_checks_are_told_when_they_form_a_group():
    boxes, errors = Mailboxes(2), {}

    def be(rank):
        errors[rank] = refused(lambda: ProcessGroup(ThreadEngine(boxes, rank), checks=("new", "off")[rank]))

    each_in_a_thread(be, 2)
    for error in errors.values():
        assert isinstance(error, OptionError)
        assert re.search(r"rank 1 \(.*\) has checks 'off'; rank 0 \(.*\) has 'new'", str(error))


def test_forged_notes_are_not_read(monkeypatch):
    monkeypatch.setenv("CROSSDEVICE_GROUP_KEY", "secret")
    forged = Signer().signed(Note(1, 0, "nothing more", "", 0, "I say so").written(), 1)

    def run(group):
        if group.rank == 1:
            group._engine.post(forged)
            until_read(group, 0, (1, 1))
        return gather(group)

    assert run_ranks(2, run) == [[b"0", b"1"]] * 2


def test_a_rank_with_another_key_is_refused(monkeypatch):
    boxes, errors = Mailboxes(2), {}
    keys = {"rank 0": b"ours", "rank 1": b"theirs"}
    monkeypatch.setattr(introduction, "key_from_env", lambda: keys[threading.current_thread().name])

    def be(rank):
        errors[rank] = refused(lambda: ProcessGroup(ThreadEngine(boxes, rank)))

    each_in_a_thread(be, 2)
    for rank, error in errors.items():
        assert isinstance(error, OptionError)
        assert f"CROSSDEVICE_GROUP_KEY must be the same on all ranks: rank {1 - rank} (" in str(error)


def test_what_a_rank_has_said_in_one_group_proves_nothing_in_the_next(monkeypatch):
    monkeypatch.setenv("CROSSDEVICE_GROUP_KEY", "secret")
    recorded, boxes, errors = [], Mailboxes(2), {}

    class Recording(ThreadEngine):
        def exchange(self, sends, receives, tag, timeout_seconds):
            recorded.append(([(peer, memory.copy()) for peer, memory in sends], tag))
            super().exchange(sends, receives, tag, timeout_seconds)

    def member():
        ProcessGroup(Recording(boxes, 1)).close()

    def stranger():  # who has no key, and says again what was said with it
        engine = ThreadEngine(boxes, 1)
        for sends, tag in recorded:
            engine.exchange([Message(*each) for each in sends], [], tag, 60.0)

    def be_host(number):
        errors[number] = refused(lambda: ProcessGroup(ThreadEngine(boxes, 0), timeout_seconds=60.0).close())

    for number, other in enumerate((member, stranger)):
        boxes.mail.clear()
        boxes.notes.clear()
        threads = [threading.Thread(target=be_host, args=(number,)), threading.Thread(target=other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(recorded) == 2
    assert errors[0] is None
    assert isinstance(errors[1], OptionError)
    assert "CROSSDEVICE_GROUP_KEY must be the same on all ranks: rank 1 (" in str(errors[1])


def test_ranks_with_another_version_are_refused(monkeypatch):
    boxes, errors = Mailboxes(3), {}
    versions = {"rank 0": "0.2.0", "rank 1": "0.3.0", "rank 2": "0.2.0"}

    monkeypatch.setattr(introduction, "own_version", lambda: versions[threading.current_thread().name])

    def be(rank):
        errors[rank] = refused(lambda: ProcessGroup(ThreadEngine(boxes, rank)))

    each_in_a_thread(be, 3)
    for error in errors.values():
        assert isinstance(error, OptionError)
        assert re.search(
            r"version of crossdevice: rank 1 \(.*\) has 0.3.0; the other 2 have 0.2.0", str(error)
        )


def test_nothing_is_bound_to_a_closed_group():
    def run(group):
        ops = cd.CollectiveAllReduce(group=group)
        group.close()
        return refused(lambda: ops.bind("sum", np.ones(3), "cpu:0"))

    for error in run_ranks(2, run):
        assert isinstance(error, ProcessGroupError)
        assert "it was closed" in str(error)


def test_a_closed_group_refuses_calls():
    group = ProcessGroup(ThreadEngine(Mailboxes(1), 0))
    group.close()
    group.close()
    with pytest.raises(ProcessGroupError, match="it was closed"):
        gather(group)


def test_a_forked_process_is_refused(monkeypatch):
    group = ProcessGroup(ThreadEngine(Mailboxes(1), 0))
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    with pytest.raises(ProcessGroupError, match=f"formed in process {parent}, and this one was forked"):
        gather(group)
    monkeypatch.undo()
    group.close()


def test_unknown_checks_are_refused():
    with pytest.raises(OptionError, match="one of new, always, off; got 'sometimes'"):
        ProcessGroup(ThreadEngine(Mailboxes(1), 0), checks="sometimes")


class Broken(ThreadEngine):
    """Fails after the introduction, and remembers that it was abandoned; its board is out of reach."""

    num_exchanges = 0
    num_visits = 0
    is_abandoned = False
    board_answers = threading.Event()

    def exchange(self, sends, receives, tag, timeout_seconds):
        self.num_exchanges += 1
        if self.num_exchanges > 2:
            raise ConnectionError("the line is dead")
        super().exchange(sends, receives, tag, timeout_seconds)

    def post(self, note):
        self.num_visits += 1
        self.board_answers.wait(120)

    def abandon(self):
        self.is_abandoned = True


def test_an_engine_that_fails_is_abandoned_and_its_board_is_not_asked_twice_at_once():
    boxes, engines = Mailboxes(2), {}

    def be(rank):
        engines[rank] = Broken(boxes, rank)
        group = ProcessGroup(engines[rank])
        errors[rank] = refused(gather, group)
        group.close()

    errors = {}
    each_in_a_thread(be, 2)
    for rank in range(2):
        assert isinstance(errors[rank], ProcessGroupError)
        assert "the board of notes cannot be reached" in str(errors[rank])
        assert "(threads: the line is dead)" in str(errors[rank])
        assert errors[rank].__cause__ is None  # one traceback, not one for each layer
        assert engines[rank].is_abandoned
        assert engines[rank].num_visits == 1
    Broken.board_answers.set()


def test_a_note_of_an_earlier_exchange_is_no_mismatch():
    """A rank that waited in the first exchange says nothing new while the second one is slow."""

    def run(group):
        if group.rank == 2:
            for rank in (0, 1):
                until_noted(group, rank, lambda note: note.place == (1, 1))
        with group.call("reduce", b"first", 20.0) as call:
            call.all_gather(b"1")
            call.signature = b"second"
            if group.rank == 1:
                until_read(group, 0, (1, 2))
            return call.all_gather(b"2")

    assert run_ranks(3, run) == [[b"2"] * 3] * 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_call_that_is_left_between_two_exchanges_breaks_the_group(error):
    def left(group):
        with group.call("two", b"exchanges") as call:
            call.all_gather(b"first")
            raise error

    def leave(group):
        with pytest.raises(error):
            left(group)
        return group.is_broken, str(refused(gather, group))

    for is_broken, text in run_ranks(2, leave):
        assert is_broken
        assert f"call 1 (two) was left early: {error.__name__}" in text


def test_others_are_told_of_a_call_that_was_left_early():
    def leave(group):
        with group.call("two", b"exchanges") as call:
            call.all_gather(b"first")
            if group.rank == 0:
                raise MemoryError("no room")
            call.all_gather(b"second")

    errors = run_ranks(2, lambda group: refused(leave, group), timeout_seconds=60.0)
    assert [type(error) for error in errors] == [MemoryError, ProcessGroupError]
    assert "gave up: call 1 (two) was left early: MemoryError('no room')" in str(errors[1])


def test_a_call_that_is_left_before_anything_is_sent_breaks_nothing():
    def leave(group):
        with pytest.raises(MemoryError), group.call("nothing", b"yet"):
            raise MemoryError
        return gather(group)

    assert run_ranks(2, leave) == [[b"0", b"1"]] * 2


def test_a_group_can_be_closed_while_another_thread_waits_in_a_call():
    done, groups = threading.Barrier(2), {}

    def close(group):
        error = None
        groups[group.rank] = group
        if group.rank == 0:
            error = refused(gather, group)
        else:
            until_noted(group, 0, lambda note: note.call == 1)
            groups[0].close()
        done.wait()
        return error

    error = run_ranks(2, close, timeout_seconds=60.0)[0]
    assert isinstance(error, ProcessGroupError)
    assert str(error) == "call 1 (gather) was not done: the group was closed"


def test_a_group_that_could_not_be_formed_leaves_no_thread():
    class Dead(ThreadEngine):
        def exchange(self, sends, receives, tag, timeout_seconds):
            threads.append(threading.current_thread())
            raise ConnectionError("the line is dead")

    threads = []
    with pytest.raises(ProcessGroupError, match="the line is dead") as caught:
        ProcessGroup(Dead(Mailboxes(2), 0))
    (thread,) = threads
    thread.join(120)
    assert not thread.is_alive()
    assert caught.tb is not None  # which holds the group, so that nobody has forgotten it


def test_others_are_told_of_a_rank_that_is_interrupted_while_it_waits():
    class Interrupted(ThreadEngine):
        def check_contact(self, silent):
            if self.rank == 0:
                raise KeyboardInterrupt

    boxes, done, errors = Mailboxes(3), threading.Barrier(3), {}

    def be(rank):
        group = ProcessGroup(Interrupted(boxes, rank), timeout_seconds=60.0)
        try:
            if rank != 2:
                gather(group)
        except BaseException as error:
            errors[rank] = error
        done.wait()
        group.close()

    each_in_a_thread(be, 3)
    assert isinstance(errors[0], KeyboardInterrupt)
    assert isinstance(errors[1], ProcessGroupError)
    assert "gave up: call 1 (gather) was interrupted: KeyboardInterrupt()" in str(errors[1])


def test_a_late_rank_does_not_wait_for_one_whose_deadline_passed_an_exchange_ago():
    gave_up = threading.Event()

    def be_late(group):
        if group.rank == 1:
            gave_up.wait()
        with group.call("two", b"exchanges", 0.3 if group.rank == 0 else 60.0) as call:
            call.all_gather(b"first")
            call.all_gather(b"second")

    def run(group):
        error = refused(be_late, group)
        gave_up.set()
        return error

    errors = run_ranks(2, run)
    assert [type(error) for error in errors] == [DeadlineError, DeadlineError]
    assert "gave up, since its deadline passed" in str(errors[1])


def test_a_background_call_that_fails_while_python_ends_is_back_at_once(monkeypatch):
    monkeypatch.setattr(group_module, "is_python_ending", lambda: True)

    def program(group):
        if group.rank == 0:
            background = BackgroundThread("started work").submit(lambda: gather(group))
            assert background.wait(4.0)  # a program that ends waits for it
            with pytest.raises(ProcessGroupError, match="gave up: it closed the group"):
                background.result()
        else:
            group.close()

    run_ranks(2, program)
