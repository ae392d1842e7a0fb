"""Groups on threads: what happens when ranks do not make the same calls in time."""

import os
import threading
import time

import pytest

from crossdevice.errors import DeadlineError, MismatchError, OptionError, ProcessGroupError
from crossdevice.process_groups import group as group_module
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.thread_group import Room, ThreadEngine, run_ranks


@pytest.fixture(autouse=True)
def _others_get_less_time(monkeypatch):
    monkeypatch.setattr(group_module, "GRACE_SECONDS", 0.6)


def gather(group, what="gather", signature=b"same", seconds=None):
    with group.call(what, signature, seconds) as call:
        return call.all_gather(b"%d" % group.rank)


def refused(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        return error
    return None


def test_calls_that_differ_are_named_on_every_rank():
    def differ(group):
        return refused(gather, group, "reduce" if group.rank == 1 else "gather", b"%d" % (group.rank == 1))

    for error in run_ranks(3, differ):
        assert isinstance(error, MismatchError)
        assert "call 1 is not the same on all ranks: rank 1 (" in str(error)
        assert "calls reduce; ranks 0, 2 call gather" in str(error)


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
    errors = []

    def wait_alone(group):
        if group.rank == 0:
            refused(gather, group, "gather", b"same", 0.1)
            errors.append(refused(gather, group))

    run_ranks(2, wait_alone)
    (error,) = errors
    assert isinstance(error, ProcessGroupError)
    assert "formed: call 1 (gather) was not done in 0.1 seconds (timeout_seconds): rank 1 (" in str(error)


def test_a_rank_that_gives_up_is_named_by_one_error_without_others_behind_it():
    def give_up(group):
        return group.give_up("KeyError: 'w'") if group.rank == 1 else refused(gather, group)

    error = run_ranks(2, give_up)[0]
    assert isinstance(error, ProcessGroupError)
    assert "gave up: KeyError: 'w'; rank 0 is there" in str(error)
    assert error.__cause__ is None


def test_a_closed_group_refuses_calls():
    group = ProcessGroup(ThreadEngine(Room(1), 0))
    group.close()
    group.close()
    with pytest.raises(ProcessGroupError, match="it was closed"):
        gather(group)


def test_a_forked_process_is_refused(monkeypatch):
    group = ProcessGroup(ThreadEngine(Room(1), 0))
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    with pytest.raises(ProcessGroupError, match=f"formed in process {parent}, and this one was forked"):
        gather(group)
    monkeypatch.undo()
    group.close()


def test_unknown_checks_are_refused():
    with pytest.raises(OptionError, match="one of new, always, off; got 'sometimes'"):
        ProcessGroup(ThreadEngine(Room(1), 0), checks="sometimes")


class Broken(ThreadEngine):
    """Fails in its second exchange, and remembers that it was abandoned; its board is out of reach."""

    num_exchanges = 0
    num_visits = 0
    is_abandoned = False

    def exchange(self, sends, receives, tag, timeout_seconds):
        self.num_exchanges += 1
        if self.num_exchanges > 1:
            raise ConnectionError("the line is dead")
        super().exchange(sends, receives, tag, timeout_seconds)

    def post(self, note):
        self.num_visits += 1
        time.sleep(2.0)

    def abandon(self):
        self.is_abandoned = True


def test_an_engine_that_fails_is_abandoned_and_its_board_is_not_asked_twice_at_once():
    room, engines = Room(2), {}

    def be(rank):
        engines[rank] = Broken(room, rank)
        group = ProcessGroup(engines[rank])
        errors[rank] = refused(gather, group)
        group.close()

    errors = {}
    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(2):
        assert isinstance(errors[rank], ProcessGroupError)
        assert "the board of notes cannot be reached" in str(errors[rank])
        assert "(threads: the line is dead)" in str(errors[rank])
        assert errors[rank].__cause__ is None  # one traceback, not one for each layer
        assert engines[rank].is_abandoned
        assert engines[rank].num_visits == 1


def test_a_note_of_an_earlier_exchange_is_no_mismatch():
    """A rank that waited in the first exchange says nothing new while the second one is slow."""

    def run(group):
        if group.rank == 2:
            time.sleep(0.6)
        with group.call("reduce", b"first", 20.0) as call:
            call.all_gather(b"1")
            call.signature = b"second"
            if group.rank == 1:
                time.sleep(0.6)
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
    done = threading.Barrier(2)

    def close(group):
        error = None
        if group.rank == 0:
            threading.Timer(0.5, group.close).start()
            error = refused(gather, group)
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
        ProcessGroup(Dead(Room(2), 0))
    (thread,) = threads
    thread.join(10.0)
    assert not thread.is_alive()
    assert caught.tb is not None  # which holds the group, so that nobody has forgotten it


def test_others_are_told_of_a_rank_that_is_interrupted_while_it_waits():
    class Interrupted(ThreadEngine):
        def check_contact(self, silent):
            if self.rank == 0:
                raise KeyboardInterrupt

    room, done, errors = Room(3), threading.Barrier(3), {}

    def be(rank):
        group = ProcessGroup(Interrupted(room, rank), timeout_seconds=60.0)
        try:
            if rank != 2:
                gather(group)
        except BaseException as error:
            errors[rank] = error
        done.wait()
        group.close()

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
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
    assert [type(error) for error in errors] == [DeadlineError, ProcessGroupError]
    assert "gave up, since its deadline passed" in str(errors[1])
