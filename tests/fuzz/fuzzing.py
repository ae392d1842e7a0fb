"""Looking for cases that fail, making them as simple as they can be, and keeping them as rows."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import crossdevice as cd
from crossdevice.testing import run_ranks
from fuzz.cases import FIELDS, Case, failure_of, random_cases
from fuzz.combining_cases import (
    COMBINING_FIELDS,
    CombiningCase,
    combining_failure_of,
    random_combining_cases,
)
from fuzz.file_cases import FILE_FIELDS, FileCase, file_failure_of, random_file_cases
from fuzz.part_cases import PART_FIELDS, PartCase, checked_parts, part_failure_here, random_part_cases
from fuzz.process_cases import PROCESS_FIELDS, SHARES, ProcessCase, checked, random_process_cases

KEPT_ROWS = Path(__file__).with_name("kept_rows.jsonl")
"""Cases that failed once, each on a line of its own; the tests run all of them."""

Counts = collections.Counter[str]
Found = tuple[Counts, list[tuple[Any, str]]]
"""How often what was tried, and what failed."""

DEADLINE_SECONDS = 600.0
"""Of a call between processes, which may be stopped for a while."""

MAX_FAILURES = 5
"""After so many one has enough to look at."""

IN_A_ROW = 60
"""Cases of one area before those of the next."""

CASES_PER_MEETING = 50
"""After so many, ranks compare their bits, and decide whether to go on."""


class Area(NamedTuple):
    """One kind of cases."""

    name: str
    kind: type
    fields: dict[str, tuple[Any, ...]]
    failure_of: Callable[[Any], str | None]

    def counted(self, case: Any) -> list[str]:
        """What a case counts for."""
        area = f"{self.name} between processes" if is_between_processes(case) else self.name
        return [area, *(f"{area}, {name} {getattr(case, name)}" for name in self.fields)]


def process_failure_of(case: Any) -> str | None:
    """What is wrong on the first rank on which something is, with ranks as threads; None if nothing is."""

    def answer(group: cd.ProcessGroup) -> tuple[str | None, int]:
        return _checked(case, cd.CollectiveAllReduce(group=group), group.rank)

    answers = run_ranks(len(case.shares), answer)
    digests = {digest for _, digest in answers}
    return next((wrong for wrong, _ in answers if wrong), "bits differ" if len(digests) > 1 else None)


def part_failure_of(case: PartCase) -> str | None:
    """The same in one process or in several, as the case has it."""
    return process_failure_of(case) if is_between_processes(case) else part_failure_here(case)


def is_between_processes(case: Any) -> bool:
    """Whether replicas are in several processes."""
    return len(getattr(case, "shares", ())) > 1


def _checked(case: Any, ops: cd.CollectiveAllReduce, rank: int) -> tuple[str | None, int]:
    return (checked_parts if isinstance(case, PartCase) else checked)(case, ops, rank)


AREAS = {
    area.kind: area
    for area in (
        Area("reductions", Case, FIELDS, failure_of),
        Area("reductions", ProcessCase, PROCESS_FIELDS, process_failure_of),
        Area("parts", PartCase, PART_FIELDS, part_failure_of),
        Area("combining", CombiningCase, COMBINING_FIELDS, combining_failure_of),
        Area("damaged files", FileCase, FILE_FIELDS, file_failure_of),
    )
}


def failure_of_any(case: Any) -> str | None:
    """What is wrong; None if nothing is."""
    return AREAS[type(case)].failure_of(case)


def cases_here(seed: int) -> Iterator[Any]:
    """Cases in one process, every other one a reduction."""
    choose = random.Random(seed)
    reductions = random_cases(choose)
    shares = [each for each in PART_FIELDS["shares"] if len(each) == 1]
    return _in_turns(
        [
            *(reductions, random_part_cases(choose, shares)),
            *(reductions, random_combining_cases(choose)),
            *(reductions, random_file_cases(choose)),
        ]
    )


def cases_between(seed: int, size: int) -> Iterator[Any]:
    """Cases between so many processes."""
    choose = random.Random(seed)
    return _in_turns([random_process_cases(choose, size), random_part_cases(choose, SHARES[size])])


def _in_turns(streams: Sequence[Iterator[Any]]) -> Iterator[Any]:
    for stream in itertools.cycle(streams):
        yield from itertools.islice(stream, IN_A_ROW)


def fuzzed(seed: int, seconds: float, counts: Counts, most: float = math.inf) -> Iterator[tuple[Any, str]]:
    """Minimal cases in one process that fail, with what is wrong; counts what was tried, by field."""
    end = time.monotonic() + seconds
    for case in cases_here(seed):
        if time.monotonic() >= end or counts["cases"] >= most:
            return
        counts.update(["cases", *AREAS[type(case)].counted(case)])
        wrong = failure_of_any(case)
        if wrong is not None:
            simplest = minimised(case)
            yield simplest, failure_of_any(simplest) or f"{wrong} (only after other cases)"


def fuzzed_between_processes(
    seed: int, seconds: float, size: int, counts: Counts, most: float = math.inf, *, processes: bool = True
) -> list[tuple[Any, str]]:
    """The same for cases between so many processes, or threads; made simple with threads if that can be."""
    answers = run_ranks(
        size,
        partial(fuzz_rank, seed=seed, seconds=seconds, most=most),
        processes=processes,
        timeout_seconds=DEADLINE_SECONDS,
    )
    counts.update(answers[0][0])
    failures = [failure for _, found in answers for failure in found][:MAX_FAILURES]
    return [
        (case, wrong) if process_failure_of(case) is None else (minimised(case), wrong)
        for case, wrong in failures
    ]


def fuzz_rank(group: cd.ProcessGroup, seed: int, seconds: float, most: float) -> Found:
    """What one of several ranks does: the cases of all others, until time is up or something is wrong."""
    ops, end = cd.CollectiveAllReduce(group=group), time.monotonic() + seconds
    cases = cases_between(seed, group.size)
    counts: Counts = collections.Counter()
    while True:
        some = list(itertools.islice(cases, CASES_PER_MEETING))
        failures, digests = [], []
        for case in some:
            counts.update(["cases", *AREAS[type(case)].counted(case)])
            wrong, digest = _checked(case, ops, group.rank)
            digests.append(digest)
            if wrong is not None:
                failures.append((case, f"rank {group.rank}: {wrong}"))
            if group.is_broken:
                return counts, failures
        is_over = time.monotonic() >= end or counts["cases"] >= most or bool(failures)
        rows = ops.gather(np.array([[is_over, *digests]], np.int64), "cpu:0")
        for case, column in zip(some, rows.T[1:], strict=True):
            if len(set(column.tolist())) > 1:
                failures.append((case, "ranks have different bits"))
        if failures or rows[:, 0].any():
            return counts, failures


def fuzz_here(seed: int, seconds: float, most: float) -> Found:
    """What one of several processes does that fuzz side by side."""
    logging.getLogger("crossdevice").setLevel(logging.ERROR)  # algorithms say what they do without GPUs
    cd.set_num_threads(1)
    counts: Counts = collections.Counter()
    return counts, list(itertools.islice(fuzzed(seed, seconds, counts, most), MAX_FAILURES))


def fuzz_between(seed: int, seconds: float, most: float, size: int) -> Found:
    """The same between so many processes."""
    counts: Counts = collections.Counter()
    failures = fuzzed_between_processes(seed, seconds, size, counts, most)
    return counts, failures


def minimised(case: Any) -> Any:
    """The simplest case that still fails: each field in turn as simple as it may be, until none changes."""
    changed = True
    while changed:
        changed = False
        for name, options in AREAS[type(case)].fields.items():
            for option in options[: options.index(getattr(case, name))]:
                simpler = dataclasses.replace(case, **{name: option})
                if simpler.is_possible and failure_of_any(simpler) is not None:
                    case, changed = simpler, True
                    break
    return case


def kept_rows() -> list[Any]:
    """The cases that failed before."""
    lines = KEPT_ROWS.read_text().splitlines() if KEPT_ROWS.exists() else []
    return [_case(json.loads(line)) for line in lines]


def keep(case: Any) -> None:
    """Adds a case to those that the tests run."""
    if case not in kept_rows():
        with KEPT_ROWS.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(case)) + "\n")


def _case(row: dict[str, Any]) -> Any:
    """Of the kind that has these fields, some of which older rows lack."""
    (kind,) = (
        kind
        for kind in AREAS
        if {field.name for field in dataclasses.fields(kind)} in (row.keys(), row.keys() | {"weights"})
    )
    return kind(**{name: _as_tuples(value) for name, value in row.items()})


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
