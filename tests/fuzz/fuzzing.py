"""Looking for cases that fail, making them as simple as they can be, and keeping them as rows."""

from __future__ import annotations

import collections
import dataclasses
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

from fuzz.cases import FIELDS, Case, failure_of, random_case

KEPT_ROWS = Path(__file__).with_name("kept_rows.jsonl")
"""Cases that failed once, each on a line of its own; the tests run all of them."""


def fuzzed(seed: int, seconds: float, counts: collections.Counter[str]) -> Iterator[tuple[Case, str]]:
    """Minimal cases that fail, with what is wrong; counts what was tried, by field."""
    choose = random.Random(seed)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        case = random_case(choose)
        counts.update(["cases", *(f"{name} {getattr(case, name)}" for name in FIELDS)])
        if failure_of(case) is not None:
            simplest = minimised(case)
            yield simplest, str(failure_of(simplest))


def minimised(case: Case) -> Case:
    """The simplest case that still fails: each field in turn as simple as it may be, until none changes."""
    changed = True
    while changed:
        changed = False
        for name, options in FIELDS.items():
            for option in options[: options.index(getattr(case, name))]:
                simpler = dataclasses.replace(case, **{name: option})
                if simpler.is_possible and failure_of(simpler) is not None:
                    case, changed = simpler, True
                    break
    return case


def kept_rows() -> list[Case]:
    """The cases that failed before."""
    lines = KEPT_ROWS.read_text().splitlines() if KEPT_ROWS.exists() else []
    return [_case(json.loads(line)) for line in lines]


def keep(case: Case) -> None:
    """Adds a case to those that the tests run."""
    if case not in kept_rows():
        with KEPT_ROWS.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(case)) + "\n")


def _case(row: dict[str, object]) -> Case:
    shapes = tuple(map(tuple, row.pop("shapes")))  # type: ignore[arg-type]
    return Case(**row, shapes=shapes)  # type: ignore[arg-type]
