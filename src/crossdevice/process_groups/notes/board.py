"""Notes of ranks in long calls: where each waits, and which are silent."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from crossdevice.process_groups.background import BackgroundCall, BackgroundThread
from crossdevice.process_groups.notes.introduction import Signer
from crossdevice.process_groups.protocol import Engine, SaysFarewell
from crossdevice.values.disagreement import disagreement, numbered

PATIENCE_SECONDS = 0.25
"""Duration of a call after which its rank puts up a note; quick calls put up none."""

GRACE_SECONDS = 2.0
"""Time for others to put up their notes before a rank that gives up reads them."""

MAX_LETTERS = 150
"""Maximum length of each text of a note that does not fit the page, and of a farewell."""

REFUSED = "refused"
"""Stands for the signature of a refused call; real signatures are hexadecimal."""


class Refused(NamedTuple):
    """A call that a rank has not made, and why; none as yet."""

    number: int = -1
    why: str = ""


class Note(NamedTuple):
    """Position of a rank: its call, the exchange in it, the operation, and a counter.

    Exchanges count from 1; a rank that makes no more calls is at 0 of the first one it will not do.
    `signature` is equal on two ranks only if their calls fit together. `beat` counts its notes. `gave_up`
    gives the reason it stopped waiting, `refused` and `why` the call it has not made, if any.
    """

    call: int
    exchange: int
    what: str
    signature: str
    beat: int
    gave_up: str = ""
    refused: int = -1
    why: str = ""
    lost: tuple[int, ...] = ()
    """The ranks that are gone, as far as this one knows."""
    is_agreeing: bool = False
    """True from a lost contact until it hangs up: while it agrees with the others on who is gone."""

    @property
    def place(self) -> tuple[int, int]:
        """Its call and exchange, in program order."""
        return self.call, self.exchange

    def written(self) -> str:
        """Encodes the note as text."""
        return json.dumps(self)

    @classmethod
    def read(cls, text: str) -> Note:
        """Decodes a note."""
        note = cls(*json.loads(text))
        return note._replace(lost=tuple(note.lost))

    def shortened(self, length: int) -> Note:
        """Returns the note with texts of at most this length."""
        what, gave_up, why = (text[:length] for text in (self.what, self.gave_up, self.why))
        return self._replace(what=what, gave_up=gave_up, why=why)


class Found(NamedTuple):
    """The notes that could be read."""

    notes: Mapping[int, Note]
    is_complete: bool = True
    """True if ranks without a note have put up none."""
    has_farewells: bool = False
    """True if ranks that hang up say so to each of the others."""


class Page(Protocol):
    """Shared memory for the notes of ranks of one host, available even if other ranks are gone."""

    def put_note(self, text: str) -> bool:
        """Puts this rank's note in place of its last one; returns False if it is too long."""

    def notes(self) -> Mapping[int, str]:
        """Returns the existing notes, by ranks of this host."""


class Board:
    """The board of one group, as one rank reaches it through its engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._farewells = engine if isinstance(engine, SaysFarewell) else None
        self._thread = BackgroundThread(f"crossdevice notes of rank {engine.rank}")
        self._exchanged: BackgroundCall | None = None
        self._page: Page | None = None
        self._page_ranks: Sequence[int] = ()
        self._beats = itertools.count()
        self.signer = Signer()
        self.due = time.monotonic() if getattr(engine, "sends_notes", False) else math.inf
        """Time of the next reading without a question: on engines that send notes they pile up otherwise."""

    def add_page(self, page: Page, ranks: Sequence[int]) -> None:
        """Adds a page of these ranks, which share a host, for notes to be posted and read there as well."""
        self._page, self._page_ranks = page, ranks

    def exchange_notes(self, note: Note) -> Found:
        """Puts up this rank's note, and reads all that can be reached."""
        text = self._put_up(note)

        def exchange() -> dict[int, str]:
            self._engine.post(text)
            return dict(self._engine.notes())

        # The last exchange may not be done yet.
        exchanged = self._exchanged = self._exchanged or self._thread.submit(exchange)
        found = [] if self._page is None else [self._read_page()]
        is_complete = len(self._page_ranks) == self._engine.size
        if exchanged.wait(PATIENCE_SECONDS if found else GRACE_SECONDS):
            self._exchanged = None
            with contextlib.suppress(Exception):  # the engine's own: who keeps the board may be gone
                found.append(self._read(exchanged.result()))
                is_complete = True
        if self._farewells is not None:
            found.append(self._read(self._farewells.farewells()))
        notes: dict[int, Note] = {}
        for rank, theirs in ((rank, theirs) for each in found for rank, theirs in each.items()):
            if rank not in notes or notes[rank].beat < theirs.beat:
                notes[rank] = theirs
        return Found(notes, is_complete, self._farewells is not None)

    def leave(self, note: Note) -> None:
        """Puts up the last note of this rank."""
        text = self._put_up(note)
        self._thread.submit(lambda: self._engine.post(text)).wait(GRACE_SECONDS)

    def _put_up(self, note: Note) -> str:
        """Signs the note, writes it to the page and as farewell; returns the text for the engine's board."""
        note = note._replace(beat=next(self._beats))
        text, short = (
            self.signer.signed(each.written(), self._engine.rank)
            for each in (note, note.shortened(MAX_LETTERS))
        )
        if self._page is not None and not self._page.put_note(text):
            self._page.put_note(short)
        if self._farewells is not None:
            self._farewells.farewell = short
        return text

    def _read_page(self) -> dict[int, Note]:
        assert self._page is not None
        return self._read({self._page_ranks[number]: text for number, text in self._page.notes().items()})

    def _read(self, texts: Mapping[int, str]) -> dict[int, Note]:
        """Decodes the notes with a valid signature."""
        found = {rank: self.signer.verified(text, rank) for rank, text in texts.items()}
        return {rank: Note.read(text) for rank, text in found.items() if text is not None}

    def read_unasked(self) -> None:
        """Reads notes in the background and sets when the next ones are due: ranks post a few per second."""
        self._thread.submit(self._engine.notes)
        self.due = time.monotonic() + PATIENCE_SECONDS

    def stop(self) -> None:
        """Ends the exchange of notes."""
        self._thread.stop()


def odd_ones_out(notes: Mapping[int, Note], mine: int, members: Sequence[str]) -> str | None:
    """Describes how the ranks at this call differ in it; None if they do not.

    Only notes about the same exchange count: an older one may be of a rank that has moved on since.
    A rank that has refused this call differs, wherever it is now.

    >>> notes = {rank: Note(3, 1, what, what, 0) for rank, what in enumerate(["reduce", "gather", "reduce"])}
    >>> odd_ones_out(notes, 0, ["rank 0 (here)", "rank 1 (there)", "rank 2 (there)"])
    'rank 1 (there) calls gather; the other 2 call reduce'
    """
    own = notes[mine]
    signatures = {
        rank: note.signature
        for rank, note in sorted(notes.items())
        if note.refused != own.call and note.place == own.place
    }
    what = {signature: notes[rank].what for rank, signature in signatures.items()}
    # After those who make the call, and each by itself: a refusal is never what is usual.
    for rank, note in notes.items():
        if note.refused == own.call:
            signatures[rank] = f"{REFUSED} by {rank}"
            what[signatures[rank]] = f"nothing ({note.why})"
    return disagreement(signatures, members, "calls", what.__getitem__)


def roll_call(
    notes: Mapping[int, Note],
    is_fresh: Mapping[int, bool],
    members: Sequence[str],
    call: int,
    *,
    lost: Collection[int] | None = None,
    awaited: Collection[int] = (),
    is_complete: bool = True,
    has_farewells: bool = False,
    keeper: int | None = None,
) -> str:
    """Lists the ranks at a call, and the positions of the others.

    Args:
        lost: the ranks that are gone, if contact was lost: every live rank has given up since. Else None.
        awaited: the ranks with messages that may not have come, if that is known.
        is_complete: whether ranks without a note have put up none.
        has_farewells: whether those that hang up say so without the board, too.
        keeper: the rank that keeps the board, if one of them does. If the board cannot be reached it is named
            first: others may have hung up because of it, and could not say so. Once it has given up itself,
            nothing is missing from the board: it has only left before others.

    >>> roll_call({0: Note(2, 1, "reduce", "a", 4)}, {0: True}, ["rank 0 (here)", "rank 1 (there)"], 2)
    'rank 1 (there) has not arrived; rank 0 is there'
    """
    gone = lost or ()
    last = None if keeper is None else notes.get(keeper)
    is_complete = is_complete or (last is not None and bool(last.gave_up))
    unreachable = None if is_complete or keeper in gone else keeper
    # A rank that hangs up because of the keeper cannot report it.
    because = "" if is_complete or has_farewells or keeper is None else ", maybe only because of that"
    ended: list[str] = []
    missing, present, silent = [], [], []
    for rank, member in enumerate(members):
        note = notes.get(rank)
        is_final = note is not None and note.exchange == 0 and note.call <= call
        # What a rank said that died while it agreed with others says nothing about where it is.
        has_left = note is not None and note.gave_up and (not note.is_agreeing or is_fresh.get(rank))
        if note is not None and has_left and (is_final or rank in gone):
            missing.append(f"{member} gave up: {note.gave_up}")
        elif note is not None and has_left and note.call != call:
            missing.append(f"{member} gave up at call {note.call} ({note.gave_up})")
        elif rank == unreachable:
            ended.insert(0, f"{member}, which keeps the board of notes, cannot be reached")
        elif rank in gone:
            place, why = (0, "") if rank == keeper else (len(ended), because)
            ended.insert(place, f"the connection to {member} has ended{why}")
        elif note is not None and note.call == call and (has_left or (lost is None and is_fresh.get(rank))):
            present.append(rank)
        elif rank in awaited and not is_complete:
            missing.append(f"nothing is known to have come from {member}")
        elif gone or (awaited and not is_complete):
            silent.append(rank)  # it may be on its way, and is not what this is about
        elif note is not None and note.call == call:
            missing.append(f"{member} arrived, but is not heard from any more")
        elif note is not None and note.call > call:
            missing.append(f"{member} is already at call {note.call} ({note.what})")
        else:
            missing.append(f"{member} has not arrived")
    if not is_complete and unreachable is None:
        missing.append("the board of notes cannot be reached")
    if silent and is_complete:
        missing.append(f"{numbered('rank', silent)} {'has' if len(silent) == 1 else 'have'} not answered")
    there = f"{numbered('rank', present)} {'is' if len(present) == 1 else 'are'} there"
    return "; ".join([*ended, *missing, there if present else "nobody is there"])
