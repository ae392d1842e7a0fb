"""Agreement on which ranks share a host; between several hosts, the exchange that sends nothing twice.

Each rank creates an anonymous file (a memfd), which is freed with the last process that has it open. Other
ranks try to open it through /proc, and compare its first bytes with those that its owner announced. Names of
hosts prove nothing. A rank in another container, or of another user, cannot open the file and reports why.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
import struct
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from crossdevice import runtime
from crossdevice.process_groups.protocol import Engine, Message, RankLostError, Waited
from crossdevice.process_groups.shared.shared_arrays import mapped_file, name_of
from crossdevice.process_groups.shared.shared_exchange import SharedExchange
from crossdevice.process_groups.shared.shared_memory import (
    SharedMemory,
    memory_bytes,
    shared_memory_unavailable,
)
from crossdevice.process_groups.shared.shared_steps import start_time_of
from crossdevice.values.disagreement import numbered

if TYPE_CHECKING:
    from crossdevice.process_groups.group_call import GroupCall


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
        return "; ".join(numbered("rank", host) for host in self.ranks)

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


TOKEN_BYTES = 16
REASON_BYTES = 200
_OFFER = struct.Struct(f"<qqq{TOKEN_BYTES}s{TOKEN_BYTES}s{REASON_BYTES}s")
_ANSWER = struct.Struct(f"<q{REASON_BYTES}s")


class _Offer(NamedTuple):
    """A rank's offer to share memory: its process, its file and the first bytes, or the reason against."""

    process: int
    start_time: int
    descriptor: int
    token: bytes
    host: bytes
    """Digest of CROSSDEVICE_HOST."""
    reason: bytes


class _Answer(NamedTuple):
    """The lowest rank with memory that this rank could open, and why it is not a lower one."""

    first: int
    reason: bytes


def found_hosts(call: GroupCall, *, wanted: bool) -> tuple[SharedMemory | None, Hosts | None, str]:
    """Returns the memory that this host's ranks share, the hosts if several, and why not all ranks share it.

    Returns None for the hosts if each has one rank only.
    """
    rank, size, members = call.group.rank, call.group.size, call.group.members
    if size == 1:
        return None, None, "there is one rank"
    if len({member.partition(" ")[2].partition(" ")[2] for member in members}) < size:
        return None, None, "several ranks are threads of one process"
    reason = (
        shared_memory_unavailable()
        if wanted
        else f"it was switched off (shared_memory=False or {runtime.SHARED_MEMORY.variable}=0)"
    )
    mapped: mmap.mmap | None = None
    token, descriptor = secrets.token_bytes(TOKEN_BYTES), -1
    if reason is None:
        try:
            descriptor = os.memfd_create(name_of(_number(token)), os.MFD_CLOEXEC)
            os.ftruncate(descriptor, memory_bytes(size))
            mapped = mapped_file(descriptor, memory_bytes(size))
            mapped[:TOKEN_BYTES] = token
        except OSError as error:
            reason = f"no memory could be made: {error}"
    try:
        process = os.getpid()
        host = hashlib.blake2b(runtime.HOST.read().encode(), digest_size=TOKEN_BYTES).digest()
        offer = _Offer(process, start_time_of(process) or 0, descriptor, token, host, _short(reason))
        offers = [_Offer(*_OFFER.unpack(record)) for record in call.all_gather(_OFFER.pack(*offer))]
        first = rank
        if reason is None:
            first, found, reason = _lowest_opened(offers[:rank], offer, memory_bytes(size))
            mapped = found or mapped
        told = call.all_gather(_ANSWER.pack(first, _short(reason)))
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    answers = [_Answer(*_ANSWER.unpack(record)) for record in told]
    ranks = _grouped([answer.first for answer in answers])
    own = next(host for host in ranks if rank in host)
    memory = None
    if len(own) > 1:
        assert mapped is not None
        processes = [(offers[peer].process, offers[peer].start_time) for peer in own]
        memory = SharedMemory(mapped, own.index(rank), processes)
    if len(ranks) == 1:
        return memory, None, ""
    why = {number: answer.reason.rstrip(b"\0") for number, answer in enumerate(answers)}
    without = [number for number, offered in enumerate(offers) if offered.reason.rstrip(b"\0")]
    odd, *more = without or [number for number in why if why[number] and number not in ranks[0]]
    others = f" (and {len(more)} more)" if more else ""
    text = f"{members[odd]}{others}: {why[odd].decode(errors='replace')}"
    return memory, None if len(ranks) == size else Hosts(ranks, rank, memory), text


def _lowest_opened(
    offers: Sequence[_Offer], own: _Offer, num_bytes: int
) -> tuple[int, mmap.mmap | None, str | None]:
    """Returns the first rank with memory that can be opened, that memory, and why it is not rank 0."""
    first_reason = None
    for number, offer in enumerate(offers):
        if offer.reason.rstrip(b"\0"):
            continue
        if offer.host == own.host:
            mapped, reason = _opened(number, offer, num_bytes)
        else:
            mapped, reason = None, f"rank {number} is on another host: {runtime.HOST.variable} says so"
        if mapped is not None:
            return number, mapped, first_reason
        first_reason = first_reason or reason
    return len(offers), None, first_reason


def _opened(number: int, offer: _Offer, num_bytes: int) -> tuple[mmap.mmap | None, str | None]:
    """Opens a rank's memory; returns the reason if that fails."""
    place = f"/proc/{offer.process}/fd/{offer.descriptor}"
    elsewhere = f"rank {number} is in another container or on another host"
    try:
        # The name is compared first: in another container this id may be that of an unrelated process, which
        # might be disturbed if one of its files were opened.
        if os.readlink(place) != f"/memfd:{name_of(_number(offer.token))} (deleted)":
            return None, f"{elsewhere}: {place} is something else"
        descriptor = os.open(place, os.O_RDWR | os.O_CLOEXEC)
        try:
            mapped = mapped_file(descriptor, num_bytes)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return None, f"{elsewhere}: {place} is not there"
    except OSError as error:
        return None, f"the memory of rank {number} cannot be opened: {error}"
    if mapped[:TOKEN_BYTES] != offer.token:
        return None, f"{elsewhere}: the memory is not its own"
    return mapped, None


def _grouped(firsts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Groups the ranks of one host: those that opened the memory of the same rank, which opened none.

    A rank stays alone if the rank it opened has itself opened that of another one.
    """
    hosts: dict[int, list[int]] = {}
    for rank, first in enumerate(firsts):
        hosts.setdefault(first if firsts[first] == first else rank, []).append(rank)
    return tuple(map(tuple, hosts.values()))


def _number(token: bytes) -> int:
    """Returns the half of the token in the file's name; the memory holds all of it."""
    return int.from_bytes(token[: TOKEN_BYTES // 2], "little")


def _short(reason: str | None) -> bytes:
    return (reason or "").encode()[:REASON_BYTES]
