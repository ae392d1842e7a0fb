"""The odd ones out among replicas or ranks that should agree, in words."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

PLURALS = {"calls": "call", "has": "have", "holds": "hold"}

MAX_NUMBERS = 16
"""More members than this are counted, not listed."""


def disagreement(
    answers: Mapping[int, Hashable],
    names: Sequence[str],
    verb: str,
    describe: Callable[[Any], str] = str,
    place: str = "",
) -> str | None:
    """Who differs from the usual answer, and what that is; None if all agree.

    Args:
        answers: by number. The one that most give is the usual one; among equals, the first.
        names: of all members by number, such as "replica 3 (cpu:3)" or "rank 0 (host, process 7)".
        verb: such as "has shape".
        place: where in a structure, such as " at value['kernel']".

    >>> shapes = {0: (2, 4), 1: (4, 2), 2: (2, 4)}
    >>> disagreement(shapes, [f"replica {k} (cpu:{k})" for k in shapes], "has shape", place=" at value['w']")
    "replica 1 (cpu:1) has shape (4, 2) at value['w']; the other 2 have (2, 4)"
    """
    parties: dict[Hashable, list[int]] = {}
    for number, answer in answers.items():
        parties.setdefault(answer, []).append(number)
    if len(parties) <= 1:
        return None
    usual = max(parties, key=lambda answer: len(parties[answer]))
    others = parties.pop(usual)
    parts = [
        f"{_named(members, names)} {_conjugated(verb, members)} {describe(answer)}{place}"
        for answer, members in parties.items()
    ]
    is_all_others = len(others) > 1 and len(answers) == len(names)
    who = f"the other {len(others)}" if is_all_others else _named(others, names)
    return "; ".join([*parts, f"{who} {_conjugated(verb.partition(' ')[0], others)} {describe(usual)}"])


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """ "rank 2", "ranks 0, 1", or "20 ranks"."""
    if len(numbers) > MAX_NUMBERS:
        return f"{len(numbers)} {noun}s"
    return f"{noun}{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"


def _named(members: Sequence[int], names: Sequence[str]) -> str:
    """One by its full name, several by their numbers."""
    first = names[members[0]]
    return first if len(members) == 1 else numbered(first.partition(" ")[0], members)


def _conjugated(verb: str, members: Sequence[int]) -> str:
    one, space, rest = verb.partition(" ")
    return verb if len(members) == 1 else PLURALS[one] + space + rest
