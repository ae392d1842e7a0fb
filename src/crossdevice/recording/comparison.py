"""Where two recorded runs part first, and whether what went into that call was the same."""

from __future__ import annotations

import glob
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from crossdevice.errors import FileError
from crossdevice.recording.bits_file import BitsFile, Event, read_bits
from crossdevice.values.disagreement import numbered

Values = dict[str, tuple[bytes, ...]]
"""The digests of all replicas of each leaf."""


class Moment(NamedTuple):
    """One call or mark of a rank: the how-manieth of its name, counted from 1."""

    name: str
    occurrence: int
    is_call: bool
    inputs: Values
    results: Values


class Run(NamedTuple):
    """All ranks of a run, by number."""

    ranks: dict[int, list[Moment]]
    files: list[BitsFile]

    @property
    def num_events(self) -> int:
        """Calls and marks of all ranks."""
        return sum(map(len, self.ranks.values()))


class Parting(NamedTuple):
    """The first event that is not the same in both runs."""

    name: str
    occurrence: int
    is_call: bool
    ranks: list[int]
    leaves: list[str]
    """The leaves that differ: inputs if any do, else results."""
    num_leaves: int
    cause: str
    """ "inputs", "result", "missing" if only one run has the event, or "value" for a mark without inputs."""


class Comparison(NamedTuple):
    """The events that two runs have in common, and the place where they part."""

    num_same: int
    """Events that are the same: on the rank that parts first those before, or all if none parts."""
    parting: Parting | None
    by_name: bool
    """Whether only what is the same on all ranks was compared, since the numbers of ranks differ."""
    num_ranks: int
    """How many ranks were compared one by one."""


def read_run(path: str) -> Run:
    """Reads the file of a run, or those of its ranks: `run.bits` also stands for `run.rank*.bits`.

    A folder stands for all files in it that end in `.bits`; a pattern for all that it matches.
    """
    found = [path] if Path(path).is_file() else []
    if not found:
        place = Path(path)
        pattern = str(place / "*.bits") if place.is_dir() else str(place.with_suffix(f".rank*{place.suffix}"))
        found = sorted(glob.glob(path) if glob.has_magic(path) else glob.glob(pattern))
    if not found:
        raise FileError(f"{path} is neither a file nor a folder of a recorded run, and no rank wrote {path}")
    files = [read_bits(each) for each in found]
    ranks: dict[int, list[Moment]] = {}
    counts: Counter[tuple[int, str]] = Counter()
    for file in files:
        for event in file.events:
            key = event.kind.rank, event.kind.name
            counts[key] += 1
            ranks.setdefault(event.kind.rank, []).append(_moment(event, counts[key]))
    return Run(ranks, files)


def _moment(event: Event, occurrence: int) -> Moment:
    digests = iter(event.digests)
    inputs, results = (
        {path: tuple(next(digests) for _ in range(count)) for path, count in leaves}
        for leaves in (event.kind.inputs, event.kind.results)
    )
    return Moment(event.kind.name, occurrence, event.kind.is_call, inputs, results)


def compare(first: Run, second: Run) -> Comparison:
    """Finds the first event in which two runs differ.

    Events are matched by name and by how often that name has come on a rank. Ranks go through the same
    events, so the one that comes first on its rank is first. Runs with other numbers of ranks are compared in
    what is the same on all ranks of each, by name.
    """
    by_name = first.ranks.keys() != second.ranks.keys() or _num_replicas(first) != _num_replicas(second)
    if by_name:
        return _compared({0: _common(first)}, {0: _common(second)}, by_name=True)
    return _compared(first.ranks, second.ranks, by_name=False)


def _num_replicas(run: Run) -> set[tuple[int, str, tuple[int, ...]]]:
    """Counts the replicas of each call's leaves, where they first appear."""
    return {
        (rank, moment.name, tuple(sorted({len(found) for found in moment.inputs.values()})))
        for rank, moments in run.ranks.items()
        for moment in moments
        if moment.is_call and moment.occurrence == 1
    }


def _compared(
    first: dict[int, list[Moment]], second: dict[int, list[Moment]], *, by_name: bool
) -> Comparison:
    partings: list[tuple[int, int, Parting]] = []
    num_same = 0
    for rank, moments in first.items():
        others = {(moment.name, moment.occurrence): moment for moment in second.get(rank, ())}
        for position, moment in enumerate(moments):
            other = others.pop((moment.name, moment.occurrence), None)
            parting = _parting(moment, other, rank, by_name)
            num_same += parting is None
            if parting is not None:
                partings.append((position, rank, parting))
                break
        else:
            if others:
                extra = next(iter(others.values()))
                partings.append((len(moments), rank, _missing(extra, rank)))
    if not partings:
        return Comparison(num_same, None, by_name, len(first))
    position, _, earliest = min(partings, key=lambda found: found[:2])
    same = [
        found
        for at, _, found in partings
        if at == position and (found.name, found.occurrence) == (earliest.name, earliest.occurrence)
    ]
    # If a rank brought something else, the results of all others follow from it.
    at_fault = [found for found in same if found.cause == "inputs"] or same
    leaves = list(dict.fromkeys(leaf for found in at_fault for leaf in found.leaves))
    ranks = [] if by_name else [rank for found in at_fault for rank in found.ranks]
    return Comparison(position, at_fault[0]._replace(ranks=ranks, leaves=leaves), by_name, len(first))


def _parting(moment: Moment, other: Moment | None, rank: int, by_name: bool) -> Parting | None:
    if other is None:
        return _missing(moment, rank)
    for cause, ours, theirs in (
        ("inputs", moment.inputs, other.inputs),
        ("result", moment.results, other.results),
    ):
        paths = (
            [path for path in ours if path in theirs] if by_name else list(dict.fromkeys((*ours, *theirs)))
        )
        apart = [path for path in paths if ours.get(path) != theirs.get(path)]
        if apart:
            if cause == "result" and not moment.inputs:
                cause = "value"
            return Parting(moment.name, moment.occurrence, moment.is_call, [rank], apart, len(paths), cause)
    return None


def _missing(moment: Moment, rank: int) -> Parting:
    num_leaves = len(moment.inputs) + len(moment.results)
    return Parting(moment.name, moment.occurrence, moment.is_call, [rank], [], num_leaves, "missing")


def _common(run: Run) -> list[Moment]:
    """The events of the lowest rank, with those leaves that all ranks and replicas hold alike."""
    first, *rest = (run.ranks[rank] for rank in sorted(run.ranks))
    others = [{(each.name, each.occurrence): each for each in moments} for moments in rest]
    common = []
    for moment in first:
        beside = [other[key] for other in others if (key := (moment.name, moment.occurrence)) in other]
        inputs = _alike([moment.inputs, *(each.inputs for each in beside)])
        results = _alike([moment.results, *(each.results for each in beside)])
        common.append(moment._replace(inputs=inputs, results=results))
    return common


def _alike(values: Sequence[Values]) -> Values:
    """The leaves that have one digest only."""
    found: dict[str, set[bytes]] = {}
    for path, digests in (item for each in values for item in each.items()):
        found.setdefault(path, set()).update(digests)
    return {path: tuple(digests) for path, digests in found.items() if len(digests) == 1}


def described(comparison: Comparison, first: str, second: str) -> list[str]:
    """A summary that is read in ten seconds."""
    parting = comparison.parting
    how = " that all ranks hold alike, by name" if comparison.by_name else ""
    if parting is None:
        return [f"{first} and {second} are the same in all {comparison.num_same} events{how}"]
    what = "call" if parting.is_call else "mark"
    nth = f"{parting.occurrence}{_ordinal(parting.occurrence)}"
    ranks = f" on {numbered('rank', parting.ranks)}" if comparison.num_ranks > 1 else ""
    head = f"{first} and {second} part at the {nth} {what} {parting.name!r}{ranks}"
    if parting.cause == "missing":
        return [head, "only one of the two runs has it: from here on they do not do the same"]
    few = ", ".join(map(_leaf, parting.leaves[:5]))
    more = f" and {len(parting.leaves) - 5} more" if len(parting.leaves) > 5 else ""
    lines = [head, f"{len(parting.leaves)} of {parting.num_leaves} leaves differ: {few}{more}"]
    lines.append(
        {
            "inputs": "its inputs already differ: look at what made them (data, forward or backward pass)",
            "result": "its inputs are the same and its result is not: it is this that is not reproducible",
            "value": "all that was recorded before is the same",
        }[parting.cause]
    )
    count = comparison.num_same
    lines.append(f"{count} {'event before it is' if count == 1 else 'events before it are'} the same{how}")
    return lines


def _leaf(path: str) -> str:
    """`['layer.weight']` as a person writes it."""
    named = re.fullmatch(r"value\['([^']*)'\]", path)
    return named[1] if named else path


def _ordinal(number: int) -> str:
    if number % 100 in (11, 12, 13):
        return "th"
    return {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")


def as_json(comparison: Comparison, runs: Sequence[Run]) -> dict[str, object]:
    """The comparison for programs."""
    parting = comparison.parting
    return {
        "same": parting is None,
        "num_same": comparison.num_same,
        "by_name": comparison.by_name,
        "first_difference": None if parting is None else parting._asdict(),
        "files": [[str(file.path) for file in run.files] for run in runs],
    }
