"""Comparison of two recorded runs: where they part first, and whether that call got the same."""

from __future__ import annotations

import glob
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from crossdevice.errors import FileError
from crossdevice.recording.bits_file import BitsFile, Event, path_of_rank, read_bits
from crossdevice.values.disagreement import numbered
from crossdevice.values.quantities import counted

OF_REPLICA = re.compile(r" in replica \d+$")
"""Suffix of marks made in a replica's function."""

Values = dict[str, tuple[bytes, ...]]
"""The digests of all replicas of each leaf."""


class Moment(NamedTuple):
    """One call or mark of a rank: the how-manieth of its name, counted from 1."""

    name: str
    occurrence: int
    is_call: bool
    inputs: Values
    results: Values
    has_all_inputs: bool = True
    """False if some inputs were left out, since ranks or replicas had different ones."""


class Run(NamedTuple):
    """All ranks of a run, by number."""

    ranks: dict[int, list[Moment]]
    files: list[BitsFile]

    @property
    def absent_ranks(self) -> list[int]:
        """Ranks of the launch without a file."""
        return sorted(set(range(self.files[0].header.size)) - {file.header.rank for file in self.files})


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
    """ "inputs", "result", "value" for a mark without inputs; "missing in the first" or "... second"."""
    after: tuple[str, int] | None
    """The last event before it, and its occurrence."""


class Comparison(NamedTuple):
    """The events that two runs have in common, and the place where they part."""

    num_same: int
    """Number of equal events: on the first rank that parts those before, or all if none parts."""
    parting: Parting | None
    by_name: bool
    """True if only values equal on all ranks were compared, since the numbers of ranks differ."""
    num_ranks: int
    """Number of ranks that were compared one by one."""
    left_out: tuple[list[str], list[str]] = ([], [])
    """Names of marks that only the first run has, and those that only the second has."""
    is_whole: bool = True
    """True if all ranks of both runs were compared: else one that was not may have brought something else."""


def read_run(path: str) -> Run:
    """Reads the file of a run, or those of its ranks: `run.bits` also stands for `run.rank*.bits`.

    A folder stands for all files in it that end in `.bits`; a pattern for all that it matches.
    """
    place = Path(path)
    of_ranks = sorted(glob.glob(str(path_of_rank(place, "*")))) if place.suffix else []
    if place.is_file():
        if of_ranks:
            raise FileError(
                f"{path} and {of_ranks[0]} are of two runs; remove one of them, or name the second as "
                f"'{path_of_rank(place, '*')}'"
            )
        found = [path]
    elif place.is_dir():
        found = sorted(map(str, place.glob("*.bits")))
    else:
        found = sorted(glob.glob(path)) if glob.has_magic(path) else of_ranks
    if not found:
        raise FileError(f"{path} is neither a file nor a folder of a recorded run, and no rank wrote {path}")
    files = [read_bits(each) for each in found]
    _check_one_run(files)
    ranks: dict[int, list[Moment]] = {}
    counts: Counter[tuple[int, str]] = Counter()
    for file in files:
        for event in file.events:
            key = event.kind.rank, event.kind.name
            counts[key] += 1
            ranks.setdefault(event.kind.rank, []).append(_moment(event, counts[key]))
    if not ranks:
        raise FileError(
            f"{path} has no events: its program called nothing of crossdevice while it was recorded, and "
            "marked nothing with mark_bits or ModuleBits"
        )
    return Run(ranks, files)


def _check_one_run(files: Sequence[BitsFile]) -> None:
    first, *others = files
    for file in others:
        if file.header.size != first.header.size:
            own, other = (counted(each.header.size, "process", "processes") for each in (file, first))
            raise FileError(
                f"{file.path} is of a run of {own}, {first.path} of one of {other}; "
                "remove what an earlier run has left"
            )
    for rank, number in Counter(file.header.rank for file in files).items():
        if number > 1:
            same = ", ".join(str(file.path) for file in files if file.header.rank == rank)
            raise FileError(f"{same} are all of rank {rank}; expected the files of one run")


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
    what is the same on all ranks of each, by name. Names of marks that only one run has are left out: it was
    recorded with more marks.
    """
    if first.files[0].header.size == second.files[0].header.size > 1:
        # Nothing can be said about a rank without a file in one run.
        both = first.ranks.keys() & second.ranks.keys()
        first, second = (
            run._replace(ranks={rank: run.ranks[rank] for rank in both or run.ranks})
            for run in (first, second)
        )
    replicas = _num_replicas(first), _num_replicas(second)
    by_name = first.ranks.keys() != second.ranks.keys() or any(
        # A call that only one run has, as before a kill, says nothing of the number of replicas.
        replicas[0][call] != replicas[1][call]
        for call in replicas[0].keys() & replicas[1].keys()
    )
    events = [{0: _common(run)} if by_name else run.ranks for run in (first, second)]
    names = [{moment.name for moments in ranks.values() for moment in moments} for ranks in events]
    marks = [
        {moment.name for moments in ranks.values() for moment in moments if not moment.is_call}
        for ranks in events
    ]
    left_out = sorted(marks[0] - names[1]), sorted(marks[1] - names[0])
    ranks = [_without(each, set(names)) for each, names in zip(events, left_out, strict=True)]
    is_whole = not (first.absent_ranks or second.absent_ranks)
    compared = _compared(ranks[0], ranks[1], by_name=by_name)
    if compared.parting is None and compared.num_same == 0:
        why = "no mark of one run has the name of one of the other, and there are no calls"
        if by_name:
            why = (
                f"one run has {_places(first)}, the other {_places(second)}, so only leaves that all of a "
                "run hold alike count, and no event has one in both; record as many ranks and replicas"
            )
        raise FileError(f"nothing can be compared: {why}")
    return compared._replace(left_out=left_out, is_whole=is_whole)


def _without(ranks: dict[int, list[Moment]], names: set[str]) -> dict[int, list[Moment]]:
    return {
        rank: [moment for moment in moments if moment.name not in names] for rank, moments in ranks.items()
    }


def _num_replicas(run: Run) -> dict[tuple[int, str], tuple[int, ...]]:
    """Counts the replicas of the leaves of each rank's calls, by name, where they first appear."""
    return {
        (rank, moment.name): tuple(sorted({len(found) for found in moment.inputs.values()}))
        for rank, moments in run.ranks.items()
        for moment in moments
        if moment.is_call and moment.occurrence == 1
    }


def _compared(
    first: dict[int, list[Moment]], second: dict[int, list[Moment]], *, by_name: bool
) -> Comparison:
    partings: list[tuple[int, int, int, Parting]] = []
    num_same = 0
    for rank, moments in first.items():
        others = {(moment.name, moment.occurrence): moment for moment in second.get(rank, ())}
        last: tuple[str, int] | None = None
        count = 0
        for position, moment in enumerate(moments):
            key = moment.name, moment.occurrence
            other = others.pop(key, None)
            parting = _parting(moment, other, rank, by_name)
            if parting is not None:
                partings.append((position, rank, count, parting._replace(after=last)))
                break
            if not by_name or (other is not None and _has_common_leaves(moment, other)):
                count, last = count + 1, key
        else:
            if others:
                extra = _missing(next(iter(others.values())), rank, "first")
                partings.append((len(moments), rank, count, extra._replace(after=last)))
        num_same += count
    if not partings:
        return Comparison(num_same, None, by_name, len(first))
    position, _, num_before, earliest = min(partings, key=lambda found: found[:2])
    same = [
        found
        for at, _, _, found in partings
        if at == position and (found.name, found.occurrence) == (earliest.name, earliest.occurrence)
    ]
    # If a rank brought something else, the results of all others follow from it.
    at_fault = [found for found in same if found.cause == "inputs"] or same
    leaves = list(dict.fromkeys(leaf for found in at_fault for leaf in found.leaves))
    ranks = [] if by_name else [rank for found in at_fault for rank in found.ranks]
    parting = at_fault[0]._replace(ranks=ranks, leaves=leaves)
    return Comparison(num_before, parting, by_name, len(first))


def _has_common_leaves(moment: Moment, other: Moment) -> bool:
    """Returns True if something of two events was compared: all ranks of each run held it alike."""
    return bool(moment.inputs.keys() & other.inputs.keys() or moment.results.keys() & other.results.keys())


def _parting(moment: Moment, other: Moment | None, rank: int, by_name: bool) -> Parting | None:
    if other is None:
        return _missing(moment, rank, "second")
    for cause, ours, theirs in (
        ("inputs", moment.inputs, other.inputs),
        ("result", moment.results, other.results),
    ):
        paths = (
            [path for path in ours if path in theirs] if by_name else list(dict.fromkeys((*ours, *theirs)))
        )
        apart = [path for path in paths if ours.get(path) != theirs.get(path)]
        if apart:
            are_known = moment.inputs.keys() == other.inputs.keys() and bool(moment.inputs)
            if cause == "result" and not (are_known and moment.has_all_inputs and other.has_all_inputs):
                cause = "value"
            return Parting(
                moment.name, moment.occurrence, moment.is_call, [rank], apart, len(paths), cause, None
            )
    return None


def _missing(moment: Moment, rank: int, run: str) -> Parting:
    num_leaves, cause = len(moment.inputs) + len(moment.results), f"missing in the {run}"
    return Parting(moment.name, moment.occurrence, moment.is_call, [rank], [], num_leaves, cause, None)


def _common(run: Run) -> list[Moment]:
    """Returns the events of the lowest rank, with the leaves that are equal on all ranks and replicas."""
    found: dict[tuple[str, int], list[Moment]] = {}
    for position, rank in enumerate(sorted(run.ranks)):
        for moment in run.ranks[rank]:
            key = OF_REPLICA.sub("", moment.name), moment.occurrence
            if position == 0 or key in found:
                found.setdefault(key, []).append(moment)
    common = []
    for (name, occurrence), moments in found.items():
        inputs, results = (
            _alike([each.inputs for each in moments]),
            _alike([each.results for each in moments]),
        )
        has_all = all(each.inputs.keys() == inputs.keys() for each in moments)
        common.append(Moment(name, occurrence, moments[0].is_call, inputs, results, has_all))
    return common


def _alike(values: Sequence[Values]) -> Values:
    """Returns the leaves that have one digest only."""
    found: dict[str, set[bytes]] = {}
    for path, digests in (item for each in values for item in each.items()):
        found.setdefault(path, set()).update(digests)
    return {path: tuple(digests) for path, digests in found.items() if len(digests) == 1}


def described(comparison: Comparison, first: str, second: str) -> list[str]:
    """Summarizes the comparison in a few lines."""
    parting, count = comparison.parting, comparison.num_same
    if parting is None:
        return [f"{first} and {second} are the same in {_all_events(count)}"]
    what = "call" if parting.is_call else "mark"
    ranks = f" on {numbered('rank', parting.ranks)}" if comparison.num_ranks > 1 else ""
    lines = [f"{first} and {second} part at the {_nth(parting.occurrence)} {what} {parting.name!r}{ranks}"]
    if parting.leaves:
        few = ", ".join(map(_leaf, parting.leaves[:5]))
        more = f" and {len(parting.leaves) - 5} more" if len(parting.leaves) > 5 else ""
        verb = "differs" if len(parting.leaves) == parting.num_leaves == 1 else "differ"
        lines.append(
            f"{len(parting.leaves)} of {counted(parting.num_leaves, 'leaf', 'leaves')} {verb}: {few}{more}"
        )
    lines.append(
        {
            "inputs": "its inputs already differ: look at what made them (data, forward or backward pass)",
            "result": "its inputs are the same and its result is not: it is this that is not reproducible"
            if comparison.is_whole
            else "its inputs are the same on the ranks that were compared; another may have brought others",
            "value": "what it was made from is not recorded, or not the same on all ranks",
            "missing in the first": f"only {second} has it: {first} ended before it, or does something else",
            "missing in the second": f"only {first} has it: {second} ended before it, or does something else",
        }[parting.cause]
    )
    if parting.after is None:
        return [*lines, "no event comes before it"]
    name, occurrence = parting.after
    before = f"{counted(count, 'event')} before it {'is' if count == 1 else 'are'}"
    return [*lines, f"{before} the same; the last is the {_nth(occurrence)} {name!r}"]


def notes(comparison: Comparison, runs: Sequence[tuple[str, Run]]) -> list[str]:
    """Lists notes on a comparison: what was not compared."""
    said = []
    if comparison.by_name:
        places = " and ".join(f"{path} has {_places(run)}" for path, run in runs)
        said.append(f"{places}: what all of them hold alike was compared, by name")
    for (path, run), names in zip(runs, comparison.left_out, strict=True):
        if run.absent_ranks:
            size = run.files[0].header.size
            said.append(f"{path} has no file of {numbered('rank', run.absent_ranks)} of its {size}")
        said += [
            f"the end of {file.path} is missing, as after a kill; what is whole was compared"
            for file in run.files
            if file.is_cut
        ]
        if names:
            number = counted(len(names), "name")
            said.append(f"only {path} has marks of {number}, which were left out: {names[0]!r}, ...")
    return [f"note: {each}" for each in said]


def _all_events(number: int) -> str:
    return "the one event of both" if number == 1 else f"all {number} events"


def _places(run: Run) -> str:
    """Counts the ranks and replicas that the calls of a run have."""
    replicas = {count for counts in _num_replicas(run).values() for count in counts}
    ranks = counted(len(run.ranks), "rank")
    most = max(replicas, default=1)
    return ranks if most == 1 else f"{ranks} of {most} replicas"


def _leaf(path: str) -> str:
    """Formats a path such as `['layer.weight']` without its brackets."""
    named = re.fullmatch(r"value\['([^']*)'\]", path)
    return named[1] if named else path


def _nth(number: int) -> str:
    """Returns the ordinal of a number."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def as_json(comparison: Comparison, runs: Sequence[Run]) -> dict[str, object]:
    """Returns the comparison for programs."""
    parting = comparison.parting
    return {
        "same": parting is None,
        "num_same": comparison.num_same,
        "by_name": comparison.by_name,
        "first_difference": None if parting is None else parting._asdict(),
        "left_out": list(comparison.left_out),
        "files": [[str(file.path) for file in run.files] for run in runs],
    }
