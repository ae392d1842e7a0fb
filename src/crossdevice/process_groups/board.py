"""What ranks tell each other when a call takes long: who waits where, and who is not heard from."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from crossdevice.values.disagreement import disagreement, numbered

REFUSED = "refused"
"""In place of a signature: that of no call, as those are hexadecimal."""


class Refused(NamedTuple):
    """A call that a rank has not made, and why; none as yet."""

    number: int = -1
    why: str = ""


class Note(NamedTuple):
    """Where a rank is: its call, which exchange of that, what it calls, and how often it has said so.

    Exchanges count from 1; a rank that makes no more calls is at 0 of the first one it will not do.
    `signature` is equal on two ranks only if their calls fit together. `gave_up` says why it waits no more,
    `refused` and `why` which call it has not made, if any.
    """

    call: int
    exchange: int
    what: str
    signature: str
    beat: int
    gave_up: str = ""
    refused: int = -1
    why: str = ""

    @property
    def place(self) -> tuple[int, int]:
        """Its call and exchange, in the order in which ranks come to them."""
        return self.call, self.exchange

    def written(self) -> str:
        """The note as text."""
        return json.dumps(self)

    @classmethod
    def read(cls, text: str) -> Note:
        """The note that was written."""
        return cls(*json.loads(text))


def odd_ones_out(notes: Mapping[int, Note], mine: int, members: Sequence[str]) -> str | None:
    """How the ranks at my call differ in it; None if they do not.

    Only notes about the same exchange count: an older one may be of a rank that has moved on since.
    Whoever has refused my call differs, wherever it is now.

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
    lost: int | None = None,
    awaited: Collection[int] = (),
    is_complete: bool = True,
    keeper: int | None = None,
) -> str:
    """Which ranks are at a call, and where the others are.

    Args:
        lost: the rank whose connection has ended, if that is why it is asked.
        awaited: the ranks whose messages may not have come, if that is known.
        is_complete: whether ranks without a note have put up none.
        keeper: the rank that keeps the board, if one of them does. If the board cannot be reached it is named
            first: others may have hung up because of it, and could not say so.

    >>> roll_call({0: Note(2, 1, "reduce", "a", 4)}, {0: True}, ["rank 0 (here)", "rank 1 (there)"], 2)
    'rank 1 (there) has not arrived; rank 0 is there'
    """
    unreachable = None if is_complete or keeper == lost else keeper
    missing, present = [], []
    for rank, member in enumerate(members):
        note = notes.get(rank)
        told = member if unreachable is None else f"rank {rank}"
        is_final = note is not None and note.exchange == 0 and note.call <= call
        if note is not None and note.gave_up and (is_final or rank == lost):
            missing.append(f"{member} gave up: {note.gave_up}")
        elif note is not None and note.gave_up and note.call != call:
            missing.append(f"{member} gave up at call {note.call} ({note.gave_up})")
        elif rank == unreachable:
            missing.insert(0, f"{member}, which keeps the board of notes, cannot be reached")
        elif rank == lost:
            missing.insert(0 if unreachable is None else 1, f"the connection to {told} has ended")
        elif note is not None and note.call == call and (is_fresh.get(rank) or note.gave_up):
            present.append(rank)
        elif rank in awaited and not is_complete:
            missing.append(f"nothing is known to have come from {told}")
        elif lost is not None or (awaited and not is_complete):
            continue  # it may be on its way, and is not what this is about
        elif note is not None and note.call == call:
            missing.append(f"{member} arrived, but is not heard from any more")
        elif note is not None and note.call > call:
            missing.append(f"{member} is already at call {note.call} ({note.what})")
        else:
            missing.append(f"{member} has not arrived")
    if not is_complete and unreachable is None:
        missing.append("the board of notes cannot be reached")
    there = f"{numbered('rank', present)} {'is' if len(present) == 1 else 'are'} there"
    return "; ".join([*missing, there if present else "nobody is there"])
