"""Ranks as threads of which one runs at a time, in an order that a seed decides, with a clock of their own.

Whatever a rank does with others (a message, a note, a wait) is a step, after which any rank may go on. The
clock stands still while some rank can; else it jumps to the next thing that happens. So waits of minutes take
no time, nothing depends on how busy the machine is, and a seed gives the same run every time.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from types import MappingProxyType, SimpleNamespace
from typing import NamedTuple

import numpy as np

from crossdevice.process_groups import group as group_module
from crossdevice.process_groups import group_call
from crossdevice.process_groups.background import BackgroundCall
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.notes import board, watch
from crossdevice.process_groups.notes.introduction import CODE_BYTES
from crossdevice.process_groups.protocol import RankLostError
from crossdevice.process_groups.shared.host_agreement import Round

MAX_STEPS = 100_000
"""For a rank that goes on for ever."""


class Fault(NamedTuple):
    """In its step of that number, a rank dies, loses its connection to a peer, or is late."""

    rank: int
    step: int
    peer: int | None = None
    late_seconds: float = 0.0


class World(NamedTuple):
    """What ranks are connected by, and how fast news of all kinds is: each takes up to so many seconds."""

    message_seconds: float = 0.0
    note_seconds: float = 0.0
    hang_up_seconds: float = 0.0
    board_keeper: int | None = None
    """With this rank the board ends."""
    ends_with_programs: bool = False
    """Whether it ends with that rank's last call, too, as where programs end after an error."""
    sees_ends: bool = True
    """Whether a rank can tell whose connections have ended without waiting for them, as on sockets."""
    hosts: tuple[tuple[int, ...], ...] = ()
    """Ranks that share memory: notes there need no board, and the end of a process is seen."""


class Died(BaseException):
    """In place of the end of a process: no cleaning up follows it."""


class Schedule:
    """Who runs, what is on its way, who is dead, and what time it is."""

    def __init__(self, size, seed, faults, world):
        self.size, self.world = size, world
        self.faults = {(fault.rank, fault.step): fault for fault in faults}
        self.now = 0.0
        self.random = random.Random(seed)
        self.dead = {}  # when each died, by rank
        self.left = set()  # whose programs have ended, where that matters
        self.steps = [0] * size
        self.mail = {}  # sender, receiver, tag: pairs of when it is there, and what it is
        self.ends = {}  # one side, other side: when that one sees that the connection has ended
        self.board, self.pages = {}, {}  # all notes of each rank, with the time from which they are seen
        self.farewells = {}  # one side, other side: what that one said as it hung up, read once that is seen
        self._events = set()
        self._waiting = {}  # by rank: until when, and for what
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._has_started, self._is_over = threading.Barrier(size + 1), threading.Semaphore(0)
        self._ranks = {}

    # ------------------------------------------------------------------------------ whose turn it is

    def start(self, rank):
        """Called by the thread of each rank: waits for its first turn."""
        self._ranks[threading.get_ident()] = rank
        self._has_started.wait()
        self._turns[rank].acquire()

    def finish(self):
        """Called by the thread of each rank at its end."""
        self._hand_over()

    def run(self, threads):
        """Has all threads started, and waits until they have ended."""
        self._waiting = dict.fromkeys(range(self.size), (0.0, None))
        for thread in threads:
            thread.start()
        self._has_started.wait()
        self._hand_over()
        self._is_over.acquire()
        for thread in threads:
            thread.join()

    def monotonic(self):
        """In place of that of the module `time`."""
        return self.now

    def sleep(self, seconds):
        """In place of that of the module `time`."""
        self.step(self._ranks[threading.get_ident()], seconds)

    def step(self, rank, seconds=0.0, is_ready=None):
        """Lets others go on until time is up, or what is waited for is there; suffers what is due."""
        if rank in self.dead:
            return
        self.steps[rank] += 1
        assert self.steps[rank] < MAX_STEPS
        fault = self.faults.get((rank, self.steps[rank]))
        if fault is not None:
            self._suffer(fault)
            seconds += fault.late_seconds
            is_ready = None if fault.late_seconds else is_ready
        self._waiting[rank] = self.now + seconds, is_ready
        if self._hand_over() != rank:
            self._turns[rank].acquire()

    def at(self, most_seconds):
        """When something that takes up to so long has happened."""
        time = self.now + self.random.uniform(0.0, most_seconds)
        self._events.add(time)
        return time

    def _hand_over(self):
        if not self._waiting:
            self._is_over.release()
            return None
        while True:
            able = [
                rank
                for rank, (until, is_ready) in sorted(self._waiting.items())
                if until <= self.now or (is_ready is not None and is_ready())
            ]
            if able:
                break
            self._events = {time for time in self._events if time > self.now}
            self.now = min([*self._events, *(until for until, _ in self._waiting.values())])
        rank = self.random.choice(able)
        del self._waiting[rank]
        if self._ranks.get(threading.get_ident()) != rank:
            self._turns[rank].release()
        return rank

    # ------------------------------------------------------------------------------ what goes wrong

    def _suffer(self, fault):
        if fault.peer is not None:
            self.end(fault.rank, fault.peer)
        elif not fault.late_seconds:
            self.dead[fault.rank] = self.now
            self.hang_up(fault.rank)
            raise Died

    def hang_up(self, rank, farewell=""):
        for peer in range(self.size):
            if (peer, rank) not in self.ends:
                self.farewells[peer, rank] = farewell
            self.end(rank, peer)

    def end(self, one, other):
        for side, far in ((one, other), (other, one)):
            if side != far and (side, far) not in self.ends:
                self.ends[side, far] = self.at(self.world.hang_up_seconds)

    def has_ended(self, rank, peer):
        return self.ends.get((rank, peer), self.now + 1.0) <= self.now

    # ------------------------------------------------------------------------------ notes

    def put(self, home, rank, text):
        home.setdefault(rank, []).append((self.at(self.world.note_seconds), text))

    def seen(self, home):
        texts = {rank: [text for time, text in notes if time <= self.now] for rank, notes in home.items()}
        return {rank: each[-1] for rank, each in texts.items() if each}

    @property
    def has_board(self):
        return self.world.board_keeper not in {*self.dead, *self.left}

    def has_given_up(self, rank, *, and_left=False):
        """True if a rank has said so on the board or on its page; and, if asked, that it hangs up."""
        notes = [text for home in (self.board, *self.pages.values()) for _, text in home.get(rank, ())]
        read = [board.Note.read(text[2 * CODE_BYTES :]) for text in notes]
        return any(note.gave_up and not (and_left and note.is_agreeing) for note in read)


class Messages:
    """The messages of an exchange: the rank that waits makes them go on."""

    def __init__(self, schedule, rank, sends, receives, tag):
        self._schedule, self._rank, self._tag = schedule, rank, tag
        self._missing = deque(receives)
        self._lost = None
        for peer, memory in sends:
            schedule.step(rank)
            if (rank, peer) not in schedule.ends:
                mail = schedule.mail.setdefault((rank, peer, tag), deque())
                mail.append((schedule.at(schedule.world.message_seconds), memory.tobytes()))

    @property
    def awaited_ranks(self):
        return [peer for peer, _ in self._missing]

    def wait(self, seconds):
        self._schedule.step(self._rank, seconds, self._can_go_on)
        while self._missing and self._can_go_on():
            peer, memory = self._missing[0]
            mail = self._mail(peer)
            if not mail or mail[0][0] > self._schedule.now:
                self._lost = RankLostError(peer, "scheduled")
                return True
            memory.reshape(-1).view(np.uint8)[:] = np.frombuffer(mail.popleft()[1], np.uint8)
            self._missing.popleft()
        return not self._missing

    def check_contact(self, silent):
        """A connection that has ended is noticed by whoever waits for it."""

    def result(self):
        if self._lost is not None:
            raise self._lost

    def _can_go_on(self):
        if not self._missing:
            return True
        peer, mail = self._missing[0][0], self._mail(self._missing[0][0])
        # What was sent before a connection ended arrives.
        return mail[0][0] <= self._schedule.now if mail else self._schedule.has_ended(self._rank, peer)

    def _mail(self, peer):
        return self._schedule.mail.setdefault((peer, self._rank, self._tag), deque())


class ScheduledEngine:
    """One rank of a schedule."""

    name = "schedule"
    largest_tag = (1 << 31) - 1
    device_collectives = MappingProxyType({})
    awaited_ranks = ()

    def __init__(self, schedule, rank):
        self._schedule, self.rank, self.size = schedule, rank, schedule.size
        self.board_keeper = schedule.world.board_keeper
        if schedule.world.sees_ends:
            self.gone_ranks = lambda: [
                peer for peer in range(self.size) if peer != rank and schedule.has_ended(rank, peer)
            ]
        if self.board_keeper is not None:
            self.farewell = ""
            self.farewells = self._farewells

    def begin(self, sends, receives, tag):
        return Messages(self._schedule, self.rank, sends, receives, tag)

    def post(self, note):
        self._schedule.step(self.rank)
        if not self._schedule.has_board:
            raise ConnectionError("the board is gone")
        if self.rank not in self._schedule.dead:
            self._schedule.put(self._schedule.board, self.rank, note)

    def notes(self):
        self._schedule.step(self.rank)
        if not self._schedule.has_board:
            raise ConnectionError("the board is gone")
        return self._schedule.seen(self._schedule.board)

    def check_contact(self, silent):
        """There is nothing else to ask."""

    def abandon(self):
        """Hangs up, as real engines do."""
        if self.rank not in self._schedule.dead:
            self._schedule.hang_up(self.rank, getattr(self, "farewell", ""))

    def _farewells(self):
        """Those of ranks that are seen to have hung up."""
        said = {
            peer: text
            for (side, peer), text in self._schedule.farewells.items()
            if side == self.rank and self._schedule.has_ended(side, peer)
        }
        return {peer: text for peer, text in said.items() if text}

    def close(self):
        self.abandon()
        if self._schedule.world.ends_with_programs:
            self._schedule.left.add(self.rank)


class Page:
    """What ranks of one host share: notes, and the ends of processes."""

    def __init__(self, schedule, rank, host):
        self._schedule, self._rank, self._host = schedule, rank, host
        self._home = schedule.pages.setdefault(host, {})
        self.steps = SimpleNamespace(abandon=lambda: None, ended_ranks=self._ended_ranks)

    def put_note(self, text):
        self._schedule.step(self._rank)
        if self._rank not in self._schedule.dead:
            self._home[self._rank] = [(self._schedule.now, text)]
        return True

    def notes(self):
        self._schedule.step(self._rank)
        return {self._host.index(rank): text for rank, text in self._schedule.seen(self._home).items()}

    def _ended_ranks(self):
        return [number for number, rank in enumerate(self._host) if rank in self._schedule.dead]


def hosts_of(schedule, rank):
    """What a group finds out about hosts, where messages go the same way all the same."""
    host = next((host for host in schedule.world.hosts if rank in host), None)
    if host is None:
        return None, None, "there are no hosts"
    others = [peer for peer in range(schedule.size) if peer != rank]
    everybody = Round(tuple((peer, rank) for peer in others), tuple((peer, peer) for peer in others))
    hosts = SimpleNamespace(
        own=host,
        beyond=lambda messages: messages,
        exchange=lambda place, sends, receives, engine, waited: waited,
        all_gather_rounds=(everybody,),
    )
    return Page(schedule, rank, host), hosts, ""


class AtOnce:
    """In place of the thread in which notes are put up and read: a schedule has threads enough."""

    def __init__(self, name):
        pass

    def submit(self, function):
        call = BackgroundCall(function)
        call.run()
        if isinstance(call._error, Died):
            raise call._error
        return call

    def stop(self):
        pass


def run_schedule(monkeypatch, size, program, *, seed, faults=(), world, timeout_seconds=300.0):
    """What each rank returns or raises, None for the dead, and when; and the schedule at the end."""
    schedule = Schedule(size, seed, faults, world)
    results = [None] * size
    ended = [None] * size

    def be(rank):
        schedule.start(rank)
        try:
            with ProcessGroup(ScheduledEngine(schedule, rank), timeout_seconds=timeout_seconds) as group:
                results[rank] = program(group)
        except BaseException as error:
            results[rank] = None if rank in schedule.dead else error
        finally:
            ended[rank] = schedule.now
            schedule.finish()

    threads = [threading.Thread(target=be, args=(rank,), name=f"rank {rank}") for rank in range(size)]
    with monkeypatch.context() as patched:
        for module in (group_call, group_module, board, watch):
            patched.setattr(module, "time", schedule)
        patched.setattr(board, "BackgroundThread", AtOnce)
        patched.setattr(group_module, "found_hosts", lambda call, wanted: hosts_of(schedule, call.group.rank))
        schedule.run(threads)
    return results, ended, schedule
