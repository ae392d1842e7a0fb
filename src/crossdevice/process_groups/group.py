"""A group of processes that make the same calls: numbered, compared, and not waited for beyond a deadline."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from crossdevice.errors import DeadlineError, MismatchError, OptionError, ProcessGroupError
from crossdevice.process_groups.background import (
    EXIT_SECONDS,
    BackgroundCall,
    BackgroundThread,
    end_with_python,
    is_background_thread,
    is_python_ending,
)
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.process_groups.notes.board import PATIENCE_SECONDS, REFUSED, Board, Note, Refused
from crossdevice.process_groups.notes.introduction import introduced
from crossdevice.process_groups.notes.watch import Watch
from crossdevice.process_groups.protocol import Contact, Engine, GaveUpError, GoneRanks, RankLostError, Waited
from crossdevice.process_groups.shared.host_agreement import Hosts, found_hosts
from crossdevice.process_groups.shared.shared_arrays import empty_array, empty_tree
from crossdevice.process_groups.shared.shared_memory import SharedMemory, is_wanted
from crossdevice.values.registry import loaded

Checks = Literal["new", "always", "off"]
CHECKS: tuple[Checks, ...] = ("new", "always", "off")

Answer = TypeVar("Answer")

TIMEOUT_SECONDS = 300.0
"""Default deadline of a call."""

LATER_SECONDS = 10.0
"""Time by which an engine's own deadline is later than ours."""

CLOSED = "it was closed"
"""Reason recorded on a normal close."""

INTRODUCTION = b"introduction 2"
"""Version of what ranks say in it: ranks with different versions are told so."""

LONGEST_SECONDS = 30 * 86400.0
"""Stands for "no deadline" in engines that need one."""


class Turn(threading.local):
    """A thread's place in the order of calls, taken even by a call that is refused before ranks meet."""

    has_begun = True
    """True once this call has its number, or outside of a call."""


class ProcessGroup:
    """The processes that take part in reductions, each with its own devices; this one is `rank` of `size`.

    Every rank makes the same calls in the same order, from one thread at a time. A group counts them, so
    that it can tell a rank that makes another call from one that is late. After an error in which data may
    still be on its way the group is broken: later calls are refused, and a new group has to be formed.

    Args:
        engine: carries the bytes; `Cluster.form_group` makes it.
        timeout_seconds: the deadline of each call, unless its options say otherwise.
        checks: `"new"` compares what ranks call before data moves, the first time each kind of call is
            made; `"always"` does so each time; `"off"` never does. Once ranks are found to bring different
            numbers of replicas, `"new"` becomes `"always"`; if they first do so in a call that some of them
            know, it is a MismatchError, and the group is broken.
        shared_memory: whether arrays go through shared memory between ranks that turn out to be on one
            host; if None, unless CROSSDEVICE_SHARED_MEMORY is 0. Notes and NCCL keep to the engine.

    Raises:
        OptionError: `checks` or the deadline is outside its range.

    >>> from crossdevice.testing import run_ranks
    >>> run_ranks(2, lambda group: (group.rank, group.size))
    [(0, 2), (1, 2)]
    """

    def __init__(
        self,
        engine: Engine,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        checks: Checks = "new",
        shared_memory: bool | None = None,
    ) -> None:
        if checks not in CHECKS:
            raise OptionError(f"checks must be one of {', '.join(CHECKS)}; got {checks!r}")
        wants_memory = is_wanted(shared_memory)
        self._engine = engine
        self.rank, self.size = engine.rank, engine.size
        self.timeout_seconds, self.checks = timeout_seconds, checks
        self.agreed: dict[Any, Any] = {}  # what ranks have compared, by kind of call
        self.compared_courses: set[Any] = set()  # kinds of call with tasks that ranks have compared
        self.members: tuple[str, ...] = tuple(f"rank {rank}" for rank in range(self.size))
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._holder = self._number = self._num_calls = 0
        self._conflict: str | None = None
        self.turn = Turn()
        self._last_refused = Refused()
        self._broken: str | None = None
        self._background = BackgroundThread(f"crossdevice rank {self.rank}")
        self._board = Board(engine)
        self._memory: SharedMemory | None = None  # of the ranks of this host
        self.shared: SharedMemory | None = None  # the same, if these are all ranks
        self.hosts: Hosts | None = None  # if there are several, and one of them has several ranks
        self.not_shared_reason = ""
        end_with_python(self)
        try:
            with self.call("form a group", INTRODUCTION) as call:
                self.members, self._board.signer = introduced(call, CHECKS.index(checks), CHECKS)
                self._memory, self.hosts, self.not_shared_reason = found_hosts(call, wanted=wants_memory)
                self.shared = self._memory if self.hosts is None else None
                if self._memory is not None:
                    own = range(self.size) if self.hosts is None else self.hosts.own
                    self._board.add_page(self._memory, own)
        except BaseException:
            self.close()
            raise

    @property
    def engine_name(self) -> str:
        """The engine, as users know it."""
        return self._engine.name

    @property
    def is_broken(self) -> bool:
        """True if an error has left the group unusable."""
        return self._broken is not None

    @property
    def _is_usable(self) -> bool:
        """True if the group is neither closed nor broken, and this process formed it, not its parent."""
        return self._broken is None and os.getpid() == self._process

    def check_usable(self) -> None:
        """Refuses calls that would fail later: the group is closed or broken, or another process's."""
        self._check_process()
        if self._broken is not None:
            raise ProcessGroupError(f"this group is broken, so a new one has to be formed: {self._broken}")

    def reduces_on(self, device_type: str) -> bool:
        """Returns True if the engine all-reduces PyTorch's tensors on such devices in place."""
        return device_type in self._engine.device_collectives

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """Makes an array that reductions with other ranks of this host need not copy.

        No other rank takes part in the call.

        Args:
            shape: the length of each axis, or one number.
            dtype: any dtype of NumPy.

        Returns:
            A new ndarray, not initialized.

        Raises:
            ValueError: a length is negative.
            TypeError: the dtype is unknown.
        """
        return empty_array(None if self.shared is None else self.shared.arrays, shape, dtype)

    def empty_like(self, tree: Any) -> Any:
        """Makes arrays in shared memory like those of a structure: for NumPy, or for PyTorch on the host.

        Args:
            tree: an array, or a structure of arrays.

        Returns:
            A structure of new arrays, not initialized.

        Raises:
            TypeError: a leaf has a dtype that cannot be shared.
        """
        return empty_tree(None if self.shared is None else self.shared.arrays, tree)

    def check_same(self, tree: Any) -> None:
        """Compares the bits of a structure of arrays on all ranks; all of them call it.

        The message of the error names the ranks in the minority, or both sides of a tie, and the leaves in
        which they differ. What travels are fingerprints: 16 bytes for each rank where all is well. Of a
        distributed value every component counts as one of the rank's replicas.

        Args:
            tree: an array, a structure of arrays, or a distributed value.

        Raises:
            BitsMismatchError: ranks differ, raised on all of them.
            ConversionError: something cannot be read as an array.
            DeadlineError: other processes did not come in time.
            ProcessGroupError: a process of the group was lost.

        >>> from crossdevice.testing import run_ranks
        >>> run_ranks(5, lambda group: group.check_same({"w": group.rank > 2}), return_errors=True)[0]
        BitsMismatchError("ranks 3, 4 differ at value['w'] from the other 3, which hold the same")
        """
        loaded("crossdevice.execution.fingerprints:check_same_in_group")(self, tree)

    def compare_always(self) -> None:
        """Compares every call from now on, unless checks are off.

        For ranks that bring different numbers of replicas: what is new to one may be known to another.
        """
        if self.checks == "new":
            self.checks = "always"

    @contextmanager
    def call(self, what: str, signature: bytes, timeout_seconds: float | None = None) -> Iterator[GroupCall]:
        """Starts the next call of this group; one at a time.

        Args:
            what: for people, such as "reduce SUM of 3 values".
            signature: equal on all ranks whose calls fit together.
        """
        before = self._num_calls
        if os.getpid() != self._process or self._lock.locked():
            self._check_free(what)
        self.turn.has_begun = True
        with self._lock:
            call = self._begun(before, what, signature, timeout_seconds)
            try:
                yield call
                self._check_ended(call)
            except BaseException as error:
                self._leave(call, error)
                raise

    def make_call(
        self,
        work: Callable[..., Answer],
        what: str,
        signature: bytes,
        timeout_seconds: float | None = None,
        *args: Any,
    ) -> Answer:
        """Runs `work(call, *args)` in the next call; `call` is inlined, since a generator takes longer."""
        before = self._num_calls
        if os.getpid() != self._process or self._lock.locked():
            self._check_free(what)
        self.turn.has_begun = True
        with self._lock:
            call = self._begun(before, what, signature, timeout_seconds)
            try:
                answer = work(call, *args)
                self._check_ended(call)
            except BaseException as error:
                self._leave(call, error)
                raise
        return answer

    def _begun(self, before: int, what: str, signature: bytes, timeout_seconds: float | None) -> GroupCall:
        if self._num_calls != before:  # another thread came in between
            self._check_free(what)
        self._holder = threading.get_ident()
        if self._broken is not None:
            self.check_usable()
        seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        call = GroupCall(self, self._num_calls, what, signature, seconds)
        self._number = call.number
        self._num_calls += 1
        return call

    def _check_ended(self, call: GroupCall) -> None:
        if self.size > 1 and not call.has_heard:
            call.meet()
        if call.began > self._board.due and self.shared is not None:
            self._board.read_unasked()
        if self._conflict is not None:
            raise ProcessGroupError(self._conflict)

    def _leave(self, call: GroupCall, error: BaseException) -> None:
        # Others are in the middle of it, unless they got the same error.
        is_shared = isinstance(error, MismatchError) and error.is_on_all_ranks
        if call.num_exchanges and not is_shared:
            self.give_up(f"call {call.number} ({call.what}) was left early: {error!r}")

    def give_up(self, why: str) -> None:
        """Breaks the group and tells the others, which would wait for this rank until their deadlines."""
        if self._is_usable:
            self._broken = why
            try:
                self._say_last(why)
            finally:
                self._abandon()

    def close(self) -> None:
        """Ends the group on this rank, from any thread, and gives up unfinished messages."""
        self.end("it closed the group")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.end("it closed the group" if error is None else f"it closed the group after {error!r}")

    def __repr__(self) -> str:
        return f"<ProcessGroup: rank {self.rank} of {self.size} on {self.engine_name}>"

    def end(self, why: str) -> None:
        """Ends the group on this rank and tells the others why."""
        # Not under the lock: a call that waits holds it, maybe of this very thread (a signal's handler).
        if self._broken == CLOSED:
            return
        was_broken, self._broken = self._broken is not None, CLOSED
        if os.getpid() == self._process:  # else threads and connections are those of the process that forked
            if not was_broken:
                self._say_last(why)
            self._background.stop()
            self._board.stop()
            if self._memory is not None:
                self._memory.steps.abandon()
            self._engine.close()

    def _check_free(self, what: str) -> None:
        """Refuses a call in a fork, and a concurrent call, since ranks could not agree on the order."""
        self._check_process()
        if self._holder == threading.get_ident():
            why = (
                f"{what} was called in the middle of call {self._number}, by the same thread: by a signal's "
                "handler? Let that take note only, and call once the group is free"
            )
            if self.turn.has_begun:
                self.refuse(why)
            raise ProcessGroupError(why)
        if self.size > 1:
            why = self._conflict = (
                f"two threads made calls at once: {what} during call {self._number}. Other ranks cannot tell "
                "which is which; make calls from one thread, or form a group for each"
            )
            self.turn.has_begun = True
            self.give_up(why)
            raise ProcessGroupError(why)

    def _check_process(self) -> None:
        if os.getpid() != self._process:  # whose threads and connections were left behind
            self.turn.has_begun = True
            raise ProcessGroupError(
                f"this group was formed in process {self._process}, and this one was forked from it; "
                "use it there, or form another one here"
            )

    # ---------------------------------------------------------------- what a call asks for

    def _carry(self, call: GroupCall, function: Callable[[float], None]) -> BackgroundCall:
        """Calls a function of the engine in the background, with a timeout."""
        self._check_whole(call)
        # The engine's own deadline comes after ours, which knows who is missing.
        later = min(call.seconds_left() + LATER_SECONDS, LONGEST_SECONDS)
        return self._background.submit(lambda: function(later))

    def _check_whole(self, call: GroupCall) -> None:
        """Refuses to go on with a call if another thread has ended the group meanwhile."""
        if self._broken is not None:
            raise self._not_done(call)

    def _wait(self, call: GroupCall, waited: Waited) -> None:
        """Waits for the end of an exchange, until the call's deadline at most."""
        try:
            if not waited.wait(min(PATIENCE_SECONDS, call.seconds_left())):
                contact = waited if isinstance(waited, Contact) else self._engine
                self._watch(call).wait(waited, contact, is_broken=lambda: self.is_broken)
            waited.result()
        except (MismatchError, DeadlineError) as error:
            self._break(str(error))
            raise
        except ProcessGroupError:  # of a signal's handler
            self.give_up(f"call {call.number} ({call.what}) was interrupted by a call of this group")
            raise
        except (ConnectionError, GaveUpError) as error:
            raise self._lost(call, error) from None  # the message says all there is to know
        except Exception as error:
            raise self._lost(call, error) from error
        except BaseException as error:
            self.give_up(f"call {call.number} ({call.what}) was interrupted: {error!r}")
            raise

    def _lost(self, call: GroupCall, error: Exception) -> ProcessGroupError | MismatchError | DeadlineError:
        """Returns the error for a failed engine: mostly a rank is gone, or a rank or thread has given up."""
        if is_python_ending() and not is_background_thread():
            # Only daemons are left, whose traceback would be the last thing printed.
            time.sleep(EXIT_SECONDS)
        if self._broken is not None:
            self._abandon()
            return self._not_done(call)
        watch = self._watch(call)
        first_hand = {error.rank} if isinstance(error, RankLostError) else set()
        gone_ranks: GoneRanks = getattr(self._engine, "gone_ranks", tuple)
        watch.agree_on_lost(self._ended_ranks, lambda: {*first_hand, *gone_ranks()})
        odd = watch.odd_ones_out()
        if odd is not None:  # the first rank to see it has hung up
            text = f"call {call.number} is not the same on all ranks: {odd}"
            self._break(text)
            return MismatchError(text)
        text = f"call {call.number} ({call.what}) lost contact: {watch.waited_in_vain()}{watch.roll_call()}"
        if not isinstance(error, GaveUpError):
            text += f" ({self.engine_name}: {str(error).strip().partition(chr(10))[0]})"
        self._break(text)
        # Who comes after the others' deadline raises what they have raised.
        return DeadlineError(text) if watch.waited_in_vain() else ProcessGroupError(text)

    def _ended_ranks(self) -> Collection[int]:
        """Returns the ranks of this host with ended processes, also those that are not awaited."""
        if self._memory is None:
            return ()
        own = range(self.size) if self.hosts is None else self.hosts.own
        return [own[number] for number in self._memory.steps.ended_ranks()]

    def _watch(self, call: GroupCall) -> Watch:
        keeper = getattr(self._engine, "board_keeper", None)  # engines of others need not tell
        return Watch(self._board.exchange_notes, call, self.members, self.rank, self._last_refused, keeper)

    def _not_done(self, call: GroupCall) -> ProcessGroupError:
        """Returns the error for a call that continues after another thread has ended the group."""
        why = "the group was closed" if self._broken == CLOSED else self._broken
        return ProcessGroupError(f"call {call.number} ({call.what}) was not done: {why}")

    def _break(self, why: str) -> None:
        """Marks the group broken: nothing is sent after this."""
        if self._broken is None:  # else it was closed meanwhile
            self._broken = why
        self._abandon()

    def _abandon(self) -> None:
        """Ends messages under way with an error on all ranks."""
        if self._memory is not None:
            self._memory.steps.abandon()
        self._engine.abandon()

    def refuse(self, why: str) -> None:
        """Uses up the number of a call that is not made, and says so: other ranks may make it.

        They would take this rank's next call for it.
        """
        self.turn.has_begun = True
        if self._is_usable:
            self._last_refused = Refused(self._num_calls, why)
            self._num_calls += 1
            self._board.exchange_notes(
                Note(self._last_refused.number, 1, "nothing", REFUSED, 0, "", *self._last_refused)
            )

    def _say_last(self, why: str) -> None:
        """Puts up the last note of this rank, which makes no more calls."""
        if self.size > 1:
            number = self._number if self._lock.locked() else self._num_calls
            # With the call it refused last, for which others may still be waiting.
            self._board.leave(Note(number, 0, "nothing more", "", 0, why, *self._last_refused))
