"""`make fuzz`: random reductions against an independent model, for FUZZ_SECONDS, from FUZZ_SEED.

Nine tenths of the time go to reductions in one process, of which every core runs its own; one tenth goes to
groups of processes.
"""

# ruff: noqa: T201 - a command, which prints

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import multiprocessing
import os
import secrets
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.cases import FIELDS
from fuzz.fuzzing import Found, fuzz_between, fuzz_here, keep
from fuzz.process_cases import PROCESS_FIELDS, SHARES


def main() -> int:
    """Prints the seed, failures and how much of what was tried; 1 if anything failed."""
    seed = int(os.environ.get("FUZZ_SEED") or secrets.randbelow(1 << 32))
    seconds = float(os.environ.get("FUZZ_SECONDS") or 600)
    workers = int(os.environ.get("FUZZ_WORKERS") or os.cpu_count() or 1)
    print(f"FUZZ_SEED={seed} FUZZ_SECONDS={seconds:g} FUZZ_WORKERS={workers}", flush=True)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        seeds = [seed + worker for worker in range(workers)]
        here = list(pool.map(fuzz_here, seeds, [0.9 * seconds] * workers))
    between = [fuzz_between(seed, 0.1 * seconds / len(SHARES), size) for size in SHARES]
    failures = _told("in one process", FIELDS, here) + _told("between processes", PROCESS_FIELDS, between)
    total = sum(counts["cases"] for counts, _ in (*here, *between))
    print(f"{total} cases, {failures} failures")
    return 1 if failures else 0


def _told(area: str, fields: dict[str, Any], found: list[Found]) -> int:
    """Prints the failures of an area, keeps their kinds, and prints how much was tried; returns how many."""
    total = sum((counts for counts, _ in found), collections.Counter())
    kinds = set()
    for case, wrong in (failure for _, failures in found for failure in failures):
        if (kind := dataclasses.replace(case, seed=0)) not in kinds:
            kinds.add(kind)
            keep(case)
            print(f"{case}\n  {wrong}", flush=True)
    print(f"\n{area}: {total['cases']} cases, {len(kinds)} failures")
    for name in ("ranks", *fields):
        tried = {
            key.removeprefix(f"{name} "): count for key, count in total.items() if key.startswith(f"{name} ")
        }
        if tried:
            print(f"  {name}: " + ", ".join(f"{count} {option}" for option, count in sorted(tried.items())))
    return len(kinds)


if __name__ == "__main__":
    raise SystemExit(main())
