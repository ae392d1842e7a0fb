"""What ranks tell each other when a call takes long: who waits where, and who is not heard from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

REFUSED = "refused"
"""In place of a signature: that of no call, as those are hexadecimal."""


class Refused(NamedTuple):
    """A call that a rank has not made, and why; none as yet."""

    number: int = -1
    why: str = ""


class Note(NamedTuple):
    """Where a rank is: its call, which exchange of that, what it calls, and how often it has said so.

    Exchanges count from 1; a rank that makes no more calls is at 0. `signature` is equal on two ranks only
    if their calls fit together. `gave_up` says why it waits no more, `refused` and `why` which call it has
    not made, if any.
    """

    call: int
    exchange: int
    what: str
    signature: str
    beat: int
    gave_up: str = ""
    refused: int = -1
    why: str = ""

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
    'rank 1 (there) calls gather; ranks 0, 2 call reduce'
    """
    own = notes[mine]
    here = {
        rank: note._replace(signature=REFUSED, what=f"nothing ({note.why})")
        if note.refused == own.call
        else note
        for rank, note in sorted(notes.items())
        if note.refused == own.call or (note.call, note.exchange) == (own.call, own.exchange)
    }
    groups: dict[str, list[int]] = {}
    for rank, note in here.items():
        groups.setdefault(note.signature, []).append(rank)
    if len(groups) == 1:
        return None
    smallest_first = sorted(
        groups.values(), key=lambda ranks: (here[ranks[0]].signature != REFUSED, len(ranks))
    )
    return "; ".join(
        f"{members[ranks[0]]} calls {here[ranks[0]].what}"
        if len(ranks) == 1
        else f"{ranks_named(ranks)} call {here[ranks[0]].what}"
        for ranks in smallest_first
    )


def roll_call(
    notes: Mapping[int, Note], is_fresh: Mapping[int, bool], members: Sequence[str], call: int
) -> str:
    """Which ranks are at a call, and where the others are.

    >>> roll_call({0: Note(2, 1, "reduce", "a", 4)}, {0: True}, ["rank 0 (here)", "rank 1 (there)"], 2)
    'rank 1 (there) has not arrived; rank 0 is there'
    """
    missing, present = [], []
    for rank, member in enumerate(members):
        note = notes.get(rank)
        if note is not None and note.exchange == 0:
            missing.append(f"{member} gave up: {note.gave_up}")
        elif note is not None and note.call == call and (is_fresh.get(rank) or note.gave_up):
            present.append(rank)
        elif note is not None and note.call == call:
            missing.append(f"{member} arrived, but is not heard from any more")
        elif note is not None and note.gave_up:
            missing.append(f"{member} gave up at call {note.call} ({note.gave_up})")
        elif note is not None and note.call > call:
            missing.append(f"{member} is already at call {note.call} ({note.what})")
        else:
            missing.append(f"{member} has not arrived")
    there = (
        f"{ranks_named(present)} {'is' if len(present) == 1 else 'are'} there"
        if present
        else "nobody is there"
    )
    return "; ".join([*missing, there])


def ranks_named(ranks: Sequence[int]) -> str:
    """ "rank 2", or "ranks 0, 1"."""
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
