"""The odd ones out among replicas or ranks that should agree, in words."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

PLURALS = {"calls": "call", "differs": "differ", "has": "have", "holds": "hold"}

MAX_NUMBERS = 16
"""More members than this are counted, not listed."""

MAX_LEAVES = 5
"""More leaves than this are counted, not listed."""


def disagreement(
    answers: Mapping[int, Hashable],
    names: Sequence[str],
    verb: str,
    describe: Callable[[Any], str] = str,
    place: str = "",
) -> str | None:
    """Names the members that differ from the usual answer, and the answer; None if all agree.

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


def differing_leaves(answers: Sequence[Mapping[str, str]], names: Sequence[str]) -> str | None:
    """Names the members with other leaves than most, and which; None if all hold the same.

    Where no two parties can be told apart by their size, all of them are named.

    Args:
        answers: a digest of each leaf, by its path, for every member.
        names: of all members, such as "replica 3 (cpu:3)".

    >>> leaves = {"value['w']": "a", "value['b']": "b"}
    >>> differing_leaves([leaves, leaves | {"value['w']": "c"}, leaves], ["rank 0", "rank 1", "rank 2"])
    "rank 1 differs at value['w'] (1 of 2 leaves) from the other 2, which hold the same"
    >>> differing_leaves([leaves, leaves | {"value['w']": "c"}], ["rank 0", "rank 1"])
    "rank 0 and rank 1 differ at value['w'] (1 of 2 leaves); no side has a majority"
    """
    parties: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for number, leaves in enumerate(answers):
        parties.setdefault(tuple(sorted(leaves.items())), []).append(number)
    if len(parties) <= 1:
        return None
    most = max(map(len, parties.values()))
    largest = [members for members in parties.values() if len(members) == most]
    if len(largest) > 1:
        sides = list(parties.values())
        who = " and ".join(_named(members, names) for members in sides)
        return f"{who} differ{_leaves_apart(answers, [side[0] for side in sides])}; no side has a majority"
    (usual,) = largest
    odd = [
        f"{_named(members, names)} {_conjugated('differs', members)}"
        f"{_leaves_apart(answers, [usual[0], members[0]])}"
        for members in parties.values()
        if members is not usual
    ]
    is_rest = len(parties) == 2
    others = f"the other {len(usual)}" if is_rest else _named(usual, names)
    return f"{'; '.join(odd)} from {others}, which hold the same"


def _leaves_apart(answers: Sequence[Mapping[str, str]], members: Sequence[int]) -> str:
    """Returns the leaves that are not the same for all of these members."""
    leaves = [answers[member] for member in members]
    paths = dict.fromkeys(path for each in leaves for path in each)
    apart = [path for path in paths if len({each.get(path) for each in leaves}) > 1]
    named = ", ".join(apart[:MAX_LEAVES]) + (
        f" and {len(apart) - MAX_LEAVES} more" if len(apart) > MAX_LEAVES else ""
    )
    if len(paths) > 1:
        return f" at {named} ({len(apart)} of {len(paths)} leaves)"
    return "" if named.isidentifier() else f" at {named}"


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """Formats numbers as "rank 2", "ranks 0, 1", or "20 ranks"."""
    if len(numbers) > MAX_NUMBERS:
        return f"{len(numbers)} {noun}s"
    return f"{noun}{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"


def _named(members: Sequence[int], names: Sequence[str]) -> str:
    """Names one member in full, several by their numbers."""
    first = names[members[0]]
    return first if len(members) == 1 else numbered(first.partition(" ")[0], members)


def _conjugated(verb: str, members: Sequence[int]) -> str:
    one, space, rest = verb.partition(" ")
    return verb if len(members) == 1 else PLURALS[one] + space + rest
