"""A group of processes that make the same calls: numbered, compared, and not waited for beyond a deadline."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self

import numpy as np

from crossdevice.errors import DeadlineError, MismatchError, OptionError, ProcessGroupError
from crossdevice.process_groups.board import REFUSED, Note, Refused
from crossdevice.process_groups.courier import Courier, Errand
from crossdevice.process_groups.protocol import Engine, Message
from crossdevice.process_groups.watch import (
    CALLS_DIFFER,
    DEADLINE_PASSED,
    PATIENCE_SECONDS,
    Watch,
)

Checks = Literal["new", "always", "off"]
CHECKS: tuple[Checks, ...] = ("new", "always", "off")

TIMEOUT_SECONDS = 300.0
"""The deadline of a call that was given none."""

GRACE_SECONDS = 2.0
"""How long others get to put up their notes before one who has given up reads them."""

LATER_SECONDS = 10.0
"""By how much an engine's own deadline is later than ours."""

CLOSED = "it was closed"
"""Why a group is broken that nothing has happened to."""

LONGEST_SECONDS = 30 * 86400.0
"""What an engine is told in place of no deadline at all, which engines do not know."""

NAME_BYTES = 96
"""Of a host's name and process, cut or filled up to it."""


class ProcessGroup:
    """The ranks that take part in reductions, each of them a process with devices of its own.

    Every rank makes the same calls in the same order. A group counts them, so that it can tell a rank that
    makes another call from one that is late. After an error in which data may still be on its way the
    group is broken: later calls are refused, and a new group has to be formed.

    Args:
        timeout_seconds: the deadline of each call, unless its options say otherwise.
        checks: `"new"` compares what ranks call before data moves, the first time each kind of call is
            made; `"always"` does so each time; `"off"` never does. Once ranks are found to bring different
            numbers of replicas, `"new"` becomes `"always"`; if they first do so in a call that some of them
            know, it is a MismatchError, and the group is broken.

    >>> from crossdevice.process_groups.thread_group import run_ranks
    >>> run_ranks(2, lambda group: (group.rank, group.size))
    [(0, 2), (1, 2)]
    """

    def __init__(
        self, engine: Engine, *, timeout_seconds: float = TIMEOUT_SECONDS, checks: Checks = "new"
    ) -> None:
        if checks not in CHECKS:
            raise OptionError(f"checks must be one of {', '.join(CHECKS)}; got {checks!r}")
        self._engine = engine
        self.rank = engine.rank
        self.size = engine.size
        self.timeout_seconds = timeout_seconds
        self.checks = checks
        self.agreed: dict[Any, Any] = {}
        """What ranks have compared, by kind of call."""
        self.members: tuple[str, ...] = tuple(f"rank {rank}" for rank in range(self.size))
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._num_calls = 0
        self._turn = threading.local()
        self._last_refused = Refused()
        self._broken: str | None = None
        self._carrying = Courier(f"crossdevice rank {self.rank}")
        self._noting = Courier(f"crossdevice notes of rank {self.rank}")
        self._visit: Errand | None = None
        try:
            self.members = self._introduced()
        except BaseException:
            self.close()
            raise

    @property
    def engine_name(self) -> str:
        """The engine, as users know it."""
        return self._engine.name

    @property
    def is_broken(self) -> bool:
        """Whether an error has left the group unusable."""
        return self._broken is not None

    def reduces_on(self, device_type: str) -> bool:
        """Whether the engine all-reduces PyTorch's tensors on such devices where they are."""
        return device_type in self._engine.device_all_reduces

    def compare_always(self) -> None:
        """From now on every call is compared, unless checks are off.

        For ranks that bring different numbers of replicas: what is new to one may be known to another.
        """
        if self.checks == "new":
            self.checks = "always"

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Around all that leads to a call: an error before it begins takes its place.

        Other ranks may make that call, and would take this rank's next one for it. They are told.
        """
        self._turn.has_begun = False
        try:
            yield
        except BaseException as error:
            if not self._turn.has_begun:
                with self._lock:
                    self._refuse(f"{type(error).__name__}: {error}")
            raise

    @contextmanager
    def call(self, what: str, signature: bytes, timeout_seconds: float | None = None) -> Iterator[Call]:
        """The next call of this group; one at a time.

        Args:
            what: for people, such as "reduce SUM of 3 values".
            signature: equal on all ranks whose calls fit together.
        """
        self._turn.has_begun = True
        if os.getpid() != self._process:  # whose threads and connections were left behind
            raise ProcessGroupError(
                f"this group was formed in process {self._process}, and this one was forked from it; "
                "use it there, or form another one here"
            )
        with self._lock:
            if self._broken is not None:
                raise ProcessGroupError(
                    f"this group is broken, so a new one has to be formed: {self._broken}"
                )
            seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
            call = Call(self, self._num_calls, what, signature, seconds)
            self._num_calls += 1
            try:
                yield call
            except BaseException as error:
                # Others are in the middle of it, unless they got the same error.
                is_shared = isinstance(error, MismatchError) and error.is_on_all_ranks
                if call.num_exchanges and not is_shared:
                    self._give_up(f"call {call.number} ({call.what}) was left early: {error!r}")
                raise

    def give_up(self, why: str) -> None:
        """Breaks the group and tells the others, who would wait for this rank until their deadlines."""
        with self._lock:
            self._give_up(why)

    def close(self) -> None:
        """Ends the group on this rank, from any thread. What is still on its way is given up."""
        # Not under the lock: a call that waits holds it, maybe of this very thread (a signal's handler).
        if self._broken != CLOSED:
            self._broken = CLOSED
            for courier in (self._carrying, self._noting):
                courier.dismiss()
            self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ProcessGroup: rank {self.rank} of {self.size} on {self.engine_name}>"

    def _introduced(self) -> tuple[str, ...]:
        """Ranks with their hosts and processes, by which errors name them."""
        own = f"{socket.gethostname()}, process {os.getpid()}".encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
        with self.call("form a group", b"introduction") as call:
            names = call.all_gather(own)
        return tuple(
            f"rank {rank} ({name.rstrip(bytes(1)).decode(errors='replace')})"
            for rank, name in enumerate(names)
        )

    # ---------------------------------------------------------------- what a call asks for

    def _carry(self, call: Call, function: Callable[[float], None]) -> Errand:
        """Has a function of the engine called with a timeout."""
        # The engine's own deadline comes after ours, which knows who is missing.
        later = min(call.seconds_left() + LATER_SECONDS, LONGEST_SECONDS)
        return self._carrying.send(lambda: function(later))

    def _wait(self, call: Call, errand: Errand) -> None:
        """Waits until the engine is done, but not beyond the call's deadline."""
        try:
            if not errand.wait(min(PATIENCE_SECONDS, call.seconds_left())):
                self._wait_watching(call, errand)
            errand.result()
        except (MismatchError, DeadlineError) as error:
            self._break(str(error))
            raise
        except (ConnectionError, _GaveUpError) as error:
            raise self._lost(call, error) from None  # whose message says all there is to know
        except Exception as error:
            raise self._lost(call, error) from error
        except BaseException as error:
            self._give_up(f"call {call.number} ({call.what}) was interrupted: {error!r}")
            raise

    def _wait_watching(self, call: Call, errand: Errand) -> None:
        """Waits with a note on the board, and an eye on what others put there."""
        watch = Watch(self._note, call, self.members, self.rank, self._last_refused)
        while True:
            if self._broken is not None:
                raise _GaveUpError
            watch.look()
            if watch.odd_ones_out() is not None:
                watch.look_until_all_came(GRACE_SECONDS)  # with two of three one cannot tell who is odd
                watch.gave_up = CALLS_DIFFER
                watch.look()
                raise MismatchError(
                    f"call {call.number} is not the same on all ranks: {watch.odd_ones_out()}"
                )
            if watch.someone_gave_up():
                raise _GaveUpError
            if errand.wait(min(PATIENCE_SECONDS, max(call.seconds_left(), 0.01))):
                return
            self._engine.check_contact(watch.silent_ranks())
            if call.seconds_left() <= 0:
                # Those who came just before the deadline have put up no note yet.
                if errand.wait(PATIENCE_SECONDS):
                    return
                watch.gave_up = DEADLINE_PASSED
                watch.look_for(GRACE_SECONDS)
                raise DeadlineError(
                    f"call {call.number} ({call.what}) was not done in {call.timeout_seconds:g} seconds "
                    f"(timeout_seconds): {watch.roll_call()}"
                )

    def _lost(self, call: Call, error: Exception) -> ProcessGroupError | MismatchError:
        """The engine failed, most often because a rank is gone; or another rank, or thread, has given up."""
        if self._broken is not None:
            self._engine.abandon()
            return ProcessGroupError(f"call {call.number} ({call.what}) was not done: the group was closed")
        watch = Watch(self._note, call, self.members, self.rank, self._last_refused)
        watch.gave_up = "it lost contact"
        watch.look_for(GRACE_SECONDS)
        odd = watch.odd_ones_out()
        if odd is not None:  # whoever saw it first has hung up
            text = f"call {call.number} is not the same on all ranks: {odd}"
            self._break(text)
            return MismatchError(text)
        text = f"call {call.number} ({call.what}) lost contact: {watch.waited_in_vain()}{watch.roll_call()}"
        if not isinstance(error, _GaveUpError):
            text += f" ({self.engine_name}: {str(error).strip().partition(chr(10))[0]})"
        self._break(text)
        return ProcessGroupError(text)

    def _break(self, why: str) -> None:
        """Nothing is sent after this."""
        if self._broken is None:  # else it was closed meanwhile
            self._broken = why
        self._engine.abandon()

    def _refuse(self, why: str) -> None:
        if self._broken is None:
            self._last_refused = Refused(self._num_calls, why)
            self._num_calls += 1
            self._note(Note(self._last_refused.number, 1, "nothing", REFUSED, 0, "", *self._last_refused))

    def _give_up(self, why: str) -> None:
        if self._broken is None:
            self._break(why)
            self._note(Note(self._num_calls, 0, "nothing more", "", 0, why))

    def _note(self, note: Note) -> dict[int, Note] | None:
        """Puts up this rank's note and reads all; None if the board cannot be reached."""

        def visited() -> dict[int, str]:
            self._engine.post(note.written())
            return dict(self._engine.notes())

        if self._visit is None:  # else the last one has not come back yet
            self._visit = self._noting.send(visited)
        if not self._visit.wait(GRACE_SECONDS):
            return None
        visit, self._visit = self._visit, None
        try:
            return {rank: Note.read(text) for rank, text in visit.result().items()}
        except Exception:  # the engine's own: the rank that keeps the board may be the one that is gone
            return None


class Call:
    """One call that all ranks make together: exchanges of bytes, each with tags of its own."""

    def __init__(
        self, group: ProcessGroup, number: int, what: str, signature: bytes, timeout_seconds: float
    ) -> None:
        self.group = group
        self.number = number
        self.what = what
        self.signature = signature
        self.timeout_seconds = timeout_seconds
        self._end = time.monotonic() + timeout_seconds
        self.num_exchanges = 0
        self._errand: Errand | None = None

    def seconds_left(self) -> float:
        """Until the deadline."""
        return self._end - time.monotonic()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Sends and receives all at once.

        Ranks whose calls differ in number or signature use other tags: they wait for each other until one
        of them says so, and never take each other's bytes.
        """
        self.start_exchange(sends, receives)
        self.wait()

    def start_exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Begins an exchange: its memory is left alone until `wait`, which comes before anything else."""
        self.num_exchanges += 1
        key = b"%d %d " % (self.number, self.num_exchanges) + self.signature
        digest = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little")
        tag = digest % (self.group._engine.largest_tag + 1)
        if sends or receives:
            exchange = self.group._engine.exchange
            self._errand = self.group._carry(self, lambda seconds: exchange(sends, receives, tag, seconds))

    def wait(self) -> None:
        """Waits for what was started, if anything was."""
        if self._errand is not None:
            self.group._wait(self, self._errand)
            self._errand = None

    def all_reduce(self, array: Any, device_type: str, op: str) -> None:
        """The engine's own all-reduce of an array in place, on a device it `reduces_on`."""
        self.num_exchanges += 1
        self._errand = self.group._carry(self, self.group._engine.device_all_reduces[device_type](array, op))
        self.wait()

    def all_gather(self, record: bytes) -> list[bytes]:
        """Every rank's record, all of one length."""
        own = np.frombuffer(record, np.uint8)
        rooms = {rank: np.empty(len(record), np.uint8) for rank in self.others()}
        self.exchange(
            [Message(rank, own) for rank in rooms], [Message(rank, room) for rank, room in rooms.items()]
        )
        return [rooms[rank].tobytes() if rank in rooms else record for rank in range(self.group.size)]

    def all_gather_uneven(self, record: bytes) -> list[bytes]:
        """Every rank's record, of any lengths."""
        lengths = [
            int.from_bytes(length, "little") for length in self.all_gather(len(record).to_bytes(8, "little"))
        ]
        own = np.frombuffer(record, np.uint8)
        rooms = {rank: np.empty(lengths[rank], np.uint8) for rank in self.others()}
        self.exchange(
            [Message(rank, own) for rank in rooms if own.size],
            [Message(rank, room) for rank, room in rooms.items() if room.size],
        )
        return [rooms[rank].tobytes() if rank in rooms else record for rank in range(self.group.size)]

    def others(self) -> list[int]:
        """The other ranks, the next one first, so that not all of them start with the same."""
        rank, size = self.group.rank, self.group.size
        return [(rank + step) % size for step in range(1, size)]


class _GaveUpError(Exception):
    """Another rank has said that it will not come, or another thread has closed the group."""
