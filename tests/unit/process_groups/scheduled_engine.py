"""Threads whose exchanges, connections and deaths follow a schedule: a fault has its place every time."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

import numpy as np

from crossdevice.process_groups.engines.thread_engine import Mailboxes, ThreadEngine
from crossdevice.process_groups.protocol import RankLostError


class Fault(NamedTuple):
    """A rank dies in its exchange of that number, counted from 0, or loses its connection to a peer."""

    rank: int
    exchange: int
    peer: int | None = None
    has_sent: bool = False
    """Whether it has sent what it had to send in that exchange, before."""


class Schedule(Mailboxes):
    """Mailboxes that know who is dead, and which connections have ended."""

    def __init__(self, size, faults):
        super().__init__(size)
        self.faults = {(fault.rank, fault.exchange): fault for fault in faults}
        self.dead = set()
        self.ended = set()
        self.has_board = True

    def end(self, one, other):
        with self.changed:
            self.ended |= {(one, other), (other, one)}
            self.changed.notify_all()


class Died(BaseException):
    """In place of the end of a process: no cleaning up follows it."""


class ScheduledEngine(ThreadEngine):
    """One rank, with connections as those of sockets: one that ends is noticed by who waits for it."""

    num_exchanges = 0

    def exchange(self, sends, receives, tag, timeout_seconds):
        boxes, fault = self._boxes, self._boxes.faults.get((self.rank, self.num_exchanges))
        self.num_exchanges += 1
        if fault is not None and not fault.has_sent:
            self._suffer(fault)
        with boxes.changed:
            for peer, memory in sends:
                if (self.rank, peer) in boxes.ended:
                    continue
                boxes.mail.setdefault((self.rank, peer, tag), deque()).append(
                    memory.reshape(-1).view(np.uint8).copy()
                )
            boxes.changed.notify_all()
        if fault is not None and fault.has_sent:
            self._suffer(fault)
        with boxes.changed:
            for peer, memory in receives:
                mail = boxes.mail.setdefault((peer, self.rank, tag), deque())
                while not mail:
                    if (peer, self.rank) in boxes.ended:
                        raise RankLostError(peer, "scheduled")
                    if not boxes.changed.wait(timeout_seconds):
                        raise TimeoutError
                memory.reshape(-1).view(np.uint8)[:] = mail.popleft()

    def post(self, note):
        if self.rank in self._boxes.dead:
            return
        if not self._boxes.has_board:
            raise ConnectionError("the board is gone")
        super().post(note)

    def notes(self):
        if not self._boxes.has_board:
            raise ConnectionError("the board is gone")
        return super().notes()

    def gone_ranks(self):
        return {peer for one, peer in self._boxes.ended if one == self.rank != peer}

    def abandon(self):
        """Hangs up, as real engines do: others learn of it from their connections."""
        if self.rank not in self._boxes.dead:
            for peer in range(self.size):
                self._boxes.end(self.rank, peer)

    def _suffer(self, fault):
        if fault.peer is not None:
            self._boxes.end(self.rank, fault.peer)
            return
        self._boxes.dead.add(self.rank)
        for peer in range(self.size):
            self._boxes.end(self.rank, peer)
        # The thread that exchanges is not the one that waits: that one never comes back to its program.
        raise Died


def run_schedule(size, faults, program, form):
    """What each survivor returns or raises; None for the dead."""
    boxes = Schedule(size, faults)
    results = [None] * size

    def be(rank):
        try:
            results[rank] = program(form(ScheduledEngine(boxes, rank)))
        except BaseException as error:
            results[rank] = None if rank in boxes.dead else error

    threads = [threading.Thread(target=be, args=(rank,), name=f"rank {rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
