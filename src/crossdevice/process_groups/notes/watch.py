"""A waiting rank's view of the board: which ranks came, differ, or gave up."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeAlias

from crossdevice.errors import DeadlineError, MismatchError
from crossdevice.process_groups.notes.board import (
    GRACE_SECONDS,
    PATIENCE_SECONDS,
    Found,
    Note,
    Refused,
    odd_ones_out,
    roll_call,
)
from crossdevice.process_groups.protocol import Contact, GaveUpError, Waited

SILENCE_SECONDS = 2.0
"""Time without a new note after which a rank may be gone; what it sent before has arrived by then."""

DEADLINE_PASSED = "its deadline passed"
CALLS_DIFFER = "calls differ"

ExchangeNotes: TypeAlias = Callable[[Note], Found]
"""Puts up a note and reads all that can be reached."""


class NumberedCall(Protocol):
    """The call that is waited in."""

    number: int
    num_exchanges: int
    what: str
    signature: bytes
    timeout_seconds: float

    def seconds_left(self) -> float:
        """Returns the seconds until its deadline."""


class Watch:
    """One rank's view of the board while it waits."""

    def __init__(
        self,
        exchange_notes: ExchangeNotes,
        call: NumberedCall,
        members: Sequence[str],
        rank: int,
        last_refused: Refused,
        keeper: int | None = None,
    ) -> None:
        self._exchange_notes = exchange_notes
        self._call = call
        self._members = members
        self._rank = rank
        self._last_refused = last_refused
        self._keeper = keeper
        self._notes: dict[int, Note] = {}
        self._fresh: dict[int, bool] = {}
        self._heard = dict.fromkeys(range(len(members)), time.monotonic())
        self._is_reachable = True
        self._has_farewells = False
        self._is_agreeing = False
        self.gave_up = ""
        self.lost: set[int] | None = None
        """The ranks that are gone, as far as this one knows, once it has lost contact."""
        self.awaited: Collection[int] = ()

    def wait(self, waited: Waited, contact: Contact, is_broken: Callable[[], bool]) -> None:
        """Waits for the exchange, while it posts its own notes and reads those of others.

        Raises:
            MismatchError: ranks make different calls.
            DeadlineError: the call's deadline has passed.
            GaveUpError: another rank, or another thread of this one, has given up.
        """
        call = self._call
        while True:
            if is_broken():
                raise GaveUpError
            self.look()
            if self.odd_ones_out() is not None:
                self.look_until_all_came(GRACE_SECONDS)  # with two of three one cannot tell who is odd
                self.gave_up = CALLS_DIFFER
                self.look()
                raise MismatchError(f"call {call.number} is not the same on all ranks: {self.odd_ones_out()}")
            if self.someone_gave_up(call.seconds_left()):
                raise GaveUpError
            if waited.wait(min(PATIENCE_SECONDS, max(call.seconds_left(), 0.01))):
                return
            contact.check_contact(self.silent_ranks())
            if call.seconds_left() <= 0:
                # Those who came just before the deadline have put up no note yet.
                if waited.wait(PATIENCE_SECONDS):
                    return
                self.gave_up, self.awaited = DEADLINE_PASSED, contact.awaited_ranks
                self.look_for(GRACE_SECONDS)
                raise DeadlineError(
                    f"call {call.number} ({call.what}) was not done in {call.timeout_seconds:g} seconds "
                    f"(timeout_seconds): {self.roll_call()}"
                )

    def look(self) -> None:
        """Posts a note and reads the others'."""
        call = self._call
        mine = Note(
            call.number,
            call.num_exchanges,
            call.what,
            call.signature.hex(),
            0,
            self.gave_up,
            *self._last_refused,
            tuple(sorted(self.lost or ())),
            self._is_agreeing,
        )
        found = self._exchange_notes(mine)
        self._is_reachable, self._has_farewells = found.is_complete, found.has_farewells
        for rank, note in found.notes.items():
            if self._notes.get(rank) != note:
                self._fresh[rank] = True
                self._heard[rank] = time.monotonic()
            self._notes[rank] = note
        self._notes[self._rank] = mine

    def look_for(self, seconds: float) -> None:
        """Looks until the others had time to post their positions; a rank without news is not fresh."""
        self._fresh = {self._rank: True}
        end = time.monotonic() + seconds
        self.look()
        while time.monotonic() < end and len(self._fresh) < len(self._members):
            time.sleep(PATIENCE_SECONDS / 2)
            self.look()

    def agree_on_lost(
        self, ended_processes: Callable[[], Collection[int]], ended_connections: Callable[[], Collection[int]]
    ) -> None:
        """Agrees with the others on the ranks that are gone, within their time to answer.

        A rank that has hung up said so before. Until it says so it renews its note, so one with an ended
        connection and an old note died in the middle of this. A rank that learns something new posts it
        too, so ranks that hear each other in time name the same.

        Args:
            ended_processes: ranks with processes that have ended, which is certain.
            ended_connections: ranks with connections that have ended, also because they have hung up.
        """
        begun = time.monotonic()
        end, last = begun + GRACE_SECONDS, begun + 2 * GRACE_SECONDS
        self._is_agreeing = True
        ended = {*ended_processes(), *ended_connections()}
        known, alive, first = set(ended), set[int](), dict[int, float]()
        while True:
            # Before the notes are read: a rank that was held up for long judges the last ones, too.
            now = time.monotonic()
            ended |= set(ended_processes())
            # Where nothing is read, those who hang up because of a lost rank cannot say so.
            if self._is_reachable or self._has_farewells or now < begun + GRACE_SECONDS / 2:
                ended |= set(ended_connections())
            self._give_up(known)
            heard = {rank for rank, note in self._notes.items() if note.gave_up}
            told = {rank for each in heard for rank in self._notes[each].lost}
            left = {rank for rank in heard if not self._notes[rank].is_agreeing} | {self._rank}
            renewed = {rank for rank in heard if self._heard[rank] > now - GRACE_SECONDS / 2} | left
            alive |= {rank for rank in heard if self._heard[rank] > first.setdefault(rank, self._heard[rank])}
            doubted = self._is_reachable and ended & renewed - left
            before, known = known, (ended | told) - renewed
            if known != before:
                end = min(max(end, now + GRACE_SECONDS / 2), last)
            # Those with ended connections may have died since their last note.
            elif now >= (last if doubted else end) or (
                not doubted and len(alive | left) == len(self._members)
            ):
                break
            else:
                time.sleep(PATIENCE_SECONDS / 2)
        self._fresh = dict.fromkeys(renewed, True)
        self._is_agreeing = False
        self._give_up(known)

    def _give_up(self, lost: set[int]) -> None:
        self.lost = lost
        names = ", ".join(self._members[rank] for rank in sorted(lost))
        self.gave_up = f"it lost contact{names and f' to {names}'}"
        self.look()

    def look_until_all_came(self, seconds: float) -> None:
        """Looks until all ranks have put up a note at this call, but no longer than that."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if sum(note.call >= self._call.number for note in self._notes.values()) == len(self._members):
                return
            time.sleep(PATIENCE_SECONDS / 5)
            self.look()

    def silent_ranks(self) -> set[int]:
        """Lists ranks without a new note for long, which may be gone."""
        since = time.monotonic() - SILENCE_SECONDS
        return {rank for rank, heard in self._heard.items() if heard < since and rank != self._rank}

    def odd_ones_out(self) -> str | None:
        """Describes how the ranks at this call differ in it, as far as their notes tell."""
        return odd_ones_out(self._notes, self._rank, self._members)

    def someone_gave_up(self, seconds_left: float) -> bool:
        """Returns True if a rank will not come.

        One that is past this exchange has done its part here. One whose deadline has passed in this very
        exchange does not count if ours is about to: then all can say who is missing.
        """
        here = (self._call.number, self._call.num_exchanges)
        return any(
            note.gave_up
            and note.place <= here
            and (note.place < here or note.gave_up != DEADLINE_PASSED or seconds_left > SILENCE_SECONDS)
            for note in self._notes.values()
        )

    def waited_in_vain(self) -> str:
        """Lists ranks with deadlines that passed before this one came."""
        return "".join(
            f"{self._members[rank]} gave up, since its deadline passed; "
            for rank, note in sorted(self._notes.items())
            if note.gave_up == DEADLINE_PASSED
        )

    def roll_call(self) -> str:
        """Lists where all ranks are."""
        return roll_call(
            self._notes,
            self._fresh,
            self._members,
            self._call.number,
            lost=self.lost,
            awaited=self.awaited,
            is_complete=self._is_reachable,
            has_farewells=self._has_farewells,
            keeper=self._keeper,
        )
