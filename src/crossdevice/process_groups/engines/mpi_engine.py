"""Groups on MPI: bytes and notes travel over communicators of their own, on whatever MPI mpi4py finds."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from mpi4py import MPI

from crossdevice import runtime
from crossdevice.errors import DeadlineError, OptionError
from crossdevice.process_groups.background import end_all
from crossdevice.process_groups.group import TIMEOUT_SECONDS, Checks, ProcessGroup
from crossdevice.process_groups.protocol import DeviceCollectives, Message
from crossdevice.values.launchers import Launch

EAGER_SECONDS = 0.002
"""Time that a wait polls without sleeping; later it sleeps in between, to free the core."""

PAUSE_SECONDS = 0.0001
"""Time between two polls: shared memory or a socket fills with a few MiB at most in this time."""

CLOSING_SECONDS = 5.0
"""Time for other ranks to end by themselves after an error, before a rank ends the job."""

NOTES_SECONDS = 0.1
"""Time that notes may lie unread: a rank puts up a few in a second, while it waits."""

LARGEST_MESSAGE_BYTES = 1 << 30
"""Larger ones are cut, because not every MPI counts beyond 2 GiB."""


def form_group(
    communicator: MPI.Intracomm | None = None,
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    checks: Checks = "new",
    shared_memory: bool | None = None,
) -> ProcessGroup:
    """Forms a group of all processes of an MPI communicator, or of all that MPI has started; collective.

    Args:
        timeout_seconds: for forming the group, and then for each of its calls.
        shared_memory: as of ProcessGroup.
    """
    engine = MpiEngine(communicator, timeout_seconds=timeout_seconds)
    return ProcessGroup(engine, timeout_seconds=timeout_seconds, checks=checks, shared_memory=shared_memory)


def form_in_cluster(cluster: Launch, *, name: str, timeout_seconds: float) -> MpiEngine:  # noqa: ARG001
    """Returns the engine of this process of a launch."""
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (cluster.rank, cluster.size):
        raise OptionError(
            f"MPI says that this is rank {world.rank} of {world.size}, but recognised {cluster.recognised}; "
            f"mpi4py uses {_name()}: is the launcher that of another MPI?"
        )
    return MpiEngine(world, timeout_seconds=timeout_seconds)


class MpiEngine:
    """One rank of MPI, on two copies of a communicator: one for data, one for notes."""

    board_keeper: int | None = None
    awaited_ranks: Collection[int] = ()
    sends_notes = True
    device_collectives: Mapping[str, DeviceCollectives] = MappingProxyType({})

    def __init__(
        self, communicator: MPI.Intracomm | None = None, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise OptionError(
                "MPI was started without MPI_THREAD_MULTIPLE, but data and notes travel from two threads; "
                "mpi4py asks for it unless mpi4py.rc.thread_level says otherwise"
            )
        self.name = _name()
        end = time.monotonic() + timeout_seconds
        self._data = _copied(MPI.COMM_WORLD if communicator is None else communicator, end)
        self._notices = _copied(self._data, end)
        self.rank: int = self._data.rank
        self.size: int = self._data.size
        # The attribute may be missing; so much the standard promises.
        self.largest_tag = int(self._data.Get_attr(MPI.TAG_UB) or 32767)
        self.is_abandoned = False
        self._begun: _Messages | None = None
        _ending.joined(self._notices)
        self._posting: list[tuple[MPI.Request, bytes]] = []
        self._notes: dict[int, str] = {}
        self._reading = threading.Lock()
        self._read_at = -math.inf

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int, timeout_seconds: float
    ) -> None:
        """Exchanges all messages at once; MPI keeps messages of one tag in order."""
        messages = self.begin(sends, receives, tag)
        is_done = False
        try:
            is_done = messages.wait(timeout_seconds)
        finally:
            if not is_done:
                messages.leave_behind()
        if not is_done:
            raise TimeoutError(f"no answer in {timeout_seconds:g} seconds")

    def begin(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> _Messages:
        """Begins an exchange that the caller polls."""
        coming = [
            self._data.Irecv([piece, MPI.BYTE], peer, tag)
            for peer, memory in receives
            for piece in _pieces(memory)
        ]
        going = [
            self._data.Isend([piece, MPI.BYTE], peer, tag)
            for peer, memory in sends
            for piece in _pieces(memory)
        ]
        self._begun = _Messages(self, coming, going)
        return self._begun

    def post(self, note: str) -> None:
        """Sends a small message to all others, read or not."""
        text = note.encode()
        self._posting = [(request, sent) for request, sent in self._posting if not request.Test()]
        self._posting += [
            (self._notices.Isend([text, MPI.BYTE], peer, 0), text)
            for peer in range(self.size)
            if peer != self.rank
        ]
        with self._reading:
            self._notes[self.rank] = note

    def notes(self) -> Mapping[int, str]:
        """Returns the latest note from each rank."""
        self.read_notes()
        with self._reading:
            return dict(self._notes)

    def check_contact(self, silent: Collection[int]) -> None:
        """Does nothing: the launcher ends the job when a rank is gone."""

    def abandon(self) -> None:
        """Stops waiting. At exit MPI would wait for all ranks, so then it may have to end the whole job."""
        self.is_abandoned = True
        _ending.is_in_doubt = True
        # What another thread waits for is left behind by that.
        if self._begun is not None and self._begun.thread == threading.get_ident():
            self._begun.leave_behind()

    def close(self) -> None:
        """Communicators stay until MPI ends, since all ranks would have to give them up together."""
        self.is_abandoned = True

    def read_notes_now_and_then(self) -> None:
        """Reads notes after some exchanges: exchanges poll MPI often, and notes are much rarer."""
        if time.monotonic() - self._read_at > NOTES_SECONDS:
            self.read_notes()
            self._read_at = time.monotonic()

    def read_notes(self) -> None:
        """Receives all pending notes, which would pile up if they were never requested."""
        with self._reading:
            status = MPI.Status()
            while (message := self._notices.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
                text = bytearray(status.Get_count(MPI.BYTE))
                message.Recv([text, MPI.BYTE])
                self._notes[status.source] = text.decode()


def _copied(communicator: MPI.Intracomm, end: float) -> MPI.Intracomm:
    """Returns a communicator for our messages only."""
    copy, request = communicator.Idup()
    if not _wait(request.Test, end):
        _ending.is_in_doubt = True
        _ending.pending.append(request)
        raise DeadlineError(
            f"the group of {communicator.size} was not formed: not all ranks came. "
            "All processes that mpirun has started must form it"
        )
    return copy


# Not time.sleep(0), for which Linux takes some 50 us.
_let_others_run: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


def _wait(is_done: Callable[[], bool], end: float, is_over: Callable[[], bool] = lambda: False) -> bool:
    """Polls until the end, which makes MPI progress; returns whether it is done."""
    eager_end = time.monotonic() + EAGER_SECONDS
    while not is_done():
        now = time.monotonic()
        if now > end or is_over():
            return False
        if now < eager_end:
            _let_others_run()
        else:
            time.sleep(PAUSE_SECONDS)
    return True


_left_behind: list[_Messages] = []


class _Messages:
    """Messages on their way. Requests hold their memory, which MPI may use until they are done."""

    def __init__(self, engine: MpiEngine, coming: list[MPI.Request], going: list[MPI.Request]) -> None:
        self.thread = threading.get_ident()
        self._engine = engine
        self._coming = coming
        self._requests = [*coming, *going]
        self._is_over = False

    def wait(self, seconds: float) -> bool:
        """Waits for at most a number of seconds; returns whether all messages are sent and received."""
        if not self._is_over:
            end = time.monotonic() + seconds
            self._is_over = _wait(
                lambda: MPI.Request.Testall(self._requests), end, lambda: self._engine.is_abandoned
            )
            if self._is_over:
                self._coming, self._requests = [], []  # and the memory with them
                self._engine.read_notes_now_and_then()
        return self._is_over

    def result(self) -> None:
        """Returns when the exchange has ended; raises its error."""

    def leave_behind(self) -> None:
        """Takes back the receives, and keeps the memory as long as MPI runs."""
        if not self._is_over and self not in _left_behind:
            for request in self._coming:
                if request != MPI.REQUEST_NULL:
                    request.Cancel()
            _left_behind.append(self)


def _pieces(memory: Any) -> list[Any]:
    flat = memory.reshape(-1).view(np.uint8)
    if flat.size <= LARGEST_MESSAGE_BYTES:
        return [flat] if flat.size else []
    return [
        flat[start : start + LARGEST_MESSAGE_BYTES] for start in range(0, flat.size, LARGEST_MESSAGE_BYTES)
    ]


def _name() -> str:
    vendor, version = MPI.get_vendor()
    return f"{vendor} {'.'.join(map(str, version))}"


class _Ending:
    """A wait of all ranks for each other before MPI ends, which needs all of them.

    After an error that is not waited for long, unless all ranks have formed another group since: then the
    whole job is ended.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._communicators: list[MPI.Intracomm] = []
        self.pending: list[MPI.Request] = []
        self.is_in_doubt = False

    def joined(self, communicator: MPI.Intracomm) -> None:
        """Counts a new group."""
        self._communicators.append(communicator)
        if communicator.size == MPI.COMM_WORLD.size:
            self.is_in_doubt = False

    def finish(self) -> None:
        """Waits for the others when Python is about to end."""
        if os.getpid() != self._process or MPI.Is_finalized():
            return
        end_all()  # others may be waiting for this rank
        requests = [*self.pending, *(communicator.Ibarrier() for communicator in self._communicators)]
        end = time.monotonic() + (CLOSING_SECONDS if self.is_in_doubt else math.inf)
        if not _wait(lambda: MPI.Request.Testall(requests), end):
            MPI.COMM_WORLD.Abort(1)


_ending = _Ending()
runtime.end_with_process(_ending.finish)
