"""Looking for cases that fail, making them as simple as they can be, and keeping them as rows."""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import crossdevice as cd
from crossdevice.testing import run_ranks
from fuzz.cases import FIELDS, Case, failure_of, random_cases
from fuzz.process_cases import PROCESS_FIELDS, ProcessCase, fuzz_rank, process_failure_of

KEPT_ROWS = Path(__file__).with_name("kept_rows.jsonl")
"""Cases that failed once, each on a line of its own; the tests run all of them."""

Found = tuple[collections.Counter[str], list[tuple[Any, str]]]
"""How often what was tried, and what failed."""

DEADLINE_SECONDS = 60.0
"""Of a call between processes."""


def fuzzed(seed: int, seconds: float, counts: collections.Counter[str]) -> Iterator[tuple[Case, str]]:
    """Minimal cases in one process that fail, with what is wrong; counts what was tried, by field."""
    end = time.monotonic() + seconds
    for case in random_cases(random.Random(seed)):
        if time.monotonic() >= end:
            return
        counts.update(["cases", *(f"{name} {getattr(case, name)}" for name in FIELDS)])
        wrong = failure_of(case)
        if wrong is not None:
            simplest = minimised(case)
            yield simplest, failure_of(simplest) or f"{wrong} (only after other cases)"


def fuzzed_between_processes(
    seed: int, seconds: float, size: int, counts: collections.Counter[str], *, processes: bool = True
) -> list[tuple[ProcessCase, str]]:
    """The same for cases between so many processes, or threads; made simple with threads if that can be."""
    answers = run_ranks(
        size,
        partial(fuzz_rank, seed=seed, seconds=seconds),
        processes=processes,
        timeout_seconds=DEADLINE_SECONDS,
    )
    counts.update(answers[0][0])
    failures = [failure for _, found in answers for failure in found]
    return [
        (case, wrong) if process_failure_of(case) is None else (minimised(case), wrong)
        for case, wrong in failures
    ]


def fuzz_here(seed: int, seconds: float) -> Found:
    """What one of several processes does that fuzz side by side."""
    logging.getLogger("crossdevice").setLevel(logging.ERROR)  # algorithms say what they do without GPUs
    cd.set_num_threads(1)
    counts: collections.Counter[str] = collections.Counter()
    return counts, list(fuzzed(seed, seconds, counts))


def fuzz_between(seed: int, seconds: float, size: int) -> Found:
    """The same between so many processes."""
    counts: collections.Counter[str] = collections.Counter()
    failures = fuzzed_between_processes(seed, seconds, size, counts)
    counts[f"ranks {size}"] = counts["cases"]
    return counts, failures


def failure_of_any(case: Case | ProcessCase) -> str | None:
    """What is wrong; None if nothing is."""
    return failure_of(case) if isinstance(case, Case) else process_failure_of(case)


def minimised(case: Any) -> Any:
    """The simplest case that still fails: each field in turn as simple as it may be, until none changes."""
    fields = FIELDS if isinstance(case, Case) else PROCESS_FIELDS
    changed = True
    while changed:
        changed = False
        for name, options in fields.items():
            for option in options[: options.index(getattr(case, name))]:
                simpler = dataclasses.replace(case, **{name: option})
                if simpler.is_possible and failure_of_any(simpler) is not None:
                    case, changed = simpler, True
                    break
    return case


def kept_rows() -> list[Case | ProcessCase]:
    """The cases that failed before."""
    lines = KEPT_ROWS.read_text().splitlines() if KEPT_ROWS.exists() else []
    return [_case(json.loads(line)) for line in lines]


def keep(case: Case | ProcessCase) -> None:
    """Adds a case to those that the tests run."""
    if case not in kept_rows():
        with KEPT_ROWS.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(case)) + "\n")


def _case(row: dict[str, Any]) -> Case | ProcessCase:
    shapes = tuple(map(tuple, row.pop("shapes")))
    if "shares" in row:
        return ProcessCase(**{**row, "shares": tuple(row["shares"])}, shapes=shapes)
    return Case(**row, shapes=shapes)
