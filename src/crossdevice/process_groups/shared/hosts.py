"""Ranks on several hosts: memory within a host, the engine between them, nothing sent twice to one host."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from crossdevice.process_groups.protocol import Engine, Message, RankLostError, Waited
from crossdevice.process_groups.shared.shared_exchange import SharedExchange
from crossdevice.process_groups.shared.shared_memory import SharedMemory


class Round(NamedTuple):
    """One exchange of an all-gather: the parts that a rank sends and receives, with their peers."""

    sends: tuple[tuple[int, int], ...]
    """Pairs of a peer and of the rank that the part belongs to."""
    receives: tuple[tuple[int, int], ...]


class Hosts:
    """The hosts of a group's ranks, seen from one rank; at least one of them has several ranks.

    A rank's counterpart on another host takes what the rank has for all ranks there, and passes it on.
    """

    def __init__(self, ranks: tuple[tuple[int, ...], ...], rank: int, memory: SharedMemory | None) -> None:
        """`ranks` has those of each host, in order; `memory` is this host's, if it has several ranks."""
        self.ranks, self.memory = ranks, memory
        own = next(host for host in ranks if rank in host)
        self.own = own
        """The ranks of this host."""
        self._numbers = {peer: number for number, peer in enumerate(own)}
        self.far = tuple(peer for host in ranks if host is not own for peer in host)
        """All ranks of other hosts."""
        self.all_gather_rounds = self._rounds(rank)

    def __str__(self) -> str:
        return "; ".join(
            f"rank{'s' if len(host) > 1 else ''} {', '.join(map(str, host))}" for host in self.ranks
        )

    def beyond(self, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages to or from other hosts."""
        return [message for message in messages if message.peer not in self._numbers]

    def exchange(
        self,
        place: tuple[int, int, bytes],
        sends: Sequence[Message],
        receives: Sequence[Message],
        engine: Engine,
        waited: Waited | None,
    ) -> Waited | None:
        """Combines both halves of an exchange; `waited` is the engine's, if it has messages."""
        if self.memory is None:
            return waited
        going, coming = (
            [Message(self._numbers[peer], memory) for peer, memory in these if peer in self._numbers]
            for these in (sends, receives)
        )
        within = SharedExchange(self.memory, len(self.own), place, going, coming)
        return HostExchange(self.own, within, engine, waited)

    def _rounds(self, rank: int) -> tuple[Round, Round]:
        """Plans two rounds: own parts to the own host and to counterparts, then parts from other hosts."""
        others = tuple(peer for peer in self.own if peer != rank)
        taken = {
            peer: tuple(whose for whose in self.far if peer in self._counterparts(whose)) for peer in self.own
        }
        first = Round(
            tuple((peer, rank) for peer in (*self._counterparts(rank), *others)),
            tuple((peer, peer) for peer in (*taken[rank], *others)),
        )
        second = Round(
            tuple((peer, whose) for peer in others for whose in taken[rank]),
            tuple((peer, whose) for peer in others for whose in taken[peer]),
        )
        return first, second

    def _counterparts(self, rank: int) -> list[int]:
        (home,) = (host for host in self.ranks if rank in host)
        return [host[home.index(rank) % len(host)] for host in self.ranks if host is not home]


class HostExchange:
    """An exchange through memory for ranks of the own host, and over the engine for the others."""

    def __init__(
        self, ranks: Sequence[int], within: SharedExchange, engine: Engine, waited: Waited | None
    ) -> None:
        """`ranks` are those of this host, numbered as in their group."""
        self._ranks, self._within = ranks, within
        self._engine, self._waited = engine, waited

    def wait(self, seconds: float) -> bool:
        """Waits while the engine works, for at most a number of seconds; returns True if all has come."""
        end = time.monotonic() + seconds
        if not self._within.wait(seconds):
            return False
        return self._waited is None or self._waited.wait(max(end - time.monotonic(), 0.0))

    def result(self) -> None:
        """Raises the engine's error, if any."""
        if self._waited is not None:
            self._waited.result()

    @property
    def awaited_ranks(self) -> Collection[int]:
        """The ranks of this host that have not come, else those that the engine waits for."""
        if self._within.wait(0):
            return self._engine.awaited_ranks
        return [self._ranks[number] for number in self._within.awaited_ranks]

    def check_contact(self, silent: Collection[int]) -> None:
        """Raises RankLostError if an awaited rank is gone, and the engine's own error."""
        if not self._within.wait(0):
            try:
                self._within.check_contact(silent)
            except RankLostError as error:
                raise RankLostError(self._ranks[error.rank], str(error)) from None
        if self._waited is None or self._waited.wait(0):
            self.result()
        else:
            self._engine.check_contact(silent)
