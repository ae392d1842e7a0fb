"""`make fuzz`: random calls against an independent model, from FUZZ_SEED, for FUZZ_SECONDS or FUZZ_CASES.

Most goes to calls in one process, of which every core runs its own; the rest goes to groups of processes.
"""

# ruff: noqa: T201 - a command, which prints

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import math
import multiprocessing
import os
import secrets
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.fuzzing import Counts, Found, fuzz_between, fuzz_here, keep
from fuzz.process_cases import SHARES

SHARE_HERE = 0.9
"""Of the time; of cases, which take longer between processes, 0.95."""

CASES_PER_ROUND, TASKS_PER_WORKER = 100_000, 5
"""So many cases are run by processes that then end, and told in so many parts."""


def main() -> int:
    """Prints the seed, failures and how much of what was tried; 1 if anything failed. Ctrl-C ends it."""
    seed = int(os.environ.get("FUZZ_SEED") or secrets.randbelow(1 << 32))
    most = float(os.environ.get("FUZZ_CASES") or math.inf)
    seconds = float(os.environ.get("FUZZ_SECONDS") or (600 if math.isinf(most) else math.inf))
    workers = int(os.environ.get("FUZZ_WORKERS") or os.cpu_count() or 1)
    print(f"FUZZ_SEED={seed} FUZZ_SECONDS={seconds:g} FUZZ_CASES={most:g} FUZZ_WORKERS={workers}", flush=True)
    told, rounds = _Told(), 1 if math.isinf(most) else math.ceil(most / CASES_PER_ROUND)
    try:
        for number in range(rounds):
            _run_round(told, seed + 1000 * number, seconds / rounds, most / rounds, workers)
    except KeyboardInterrupt:
        print("interrupted")
    return told.end()


def _run_round(told: _Told, seed: int, seconds: float, most: float, workers: int) -> None:
    tasks = workers if math.isinf(most) else workers * TASKS_PER_WORKER
    limits = (SHARE_HERE * seconds * workers / tasks, 0.95 * most / tasks)
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(fuzz_here, seed + number, *limits) for number in range(tasks)]
        for task in concurrent.futures.as_completed(running):
            told.add(task.result())
    limits = ((1 - SHARE_HERE) * seconds / len(SHARES), 0.05 * most / len(SHARES))
    for size in SHARES:
        num_groups = max(1, workers // size)  # at once, which threads wait for
        of_each = limits[0], limits[1] / num_groups
        with concurrent.futures.ThreadPoolExecutor(num_groups) as pool:
            between = [
                pool.submit(fuzz_between, seed + number, *of_each, size) for number in range(num_groups)
            ]
            for group in concurrent.futures.as_completed(between):
                told.add(group.result())


class _Told:
    """What was tried and what failed, printed as it comes and in the end."""

    def __init__(self) -> None:
        self._counts: Counts = collections.Counter()
        self._failures: set[object] = set()

    def add(self, found: Found) -> None:
        """Prints failures and keeps them, one of each kind."""
        counts, failures = found
        self._counts.update(counts)
        for case, wrong in failures:
            if (kind := dataclasses.replace(case, seed=0)) not in self._failures:
                self._failures.add(kind)
                keep(case)
                print(f"{case}\n  {wrong}", flush=True)
        print(self._summary, flush=True)

    @property
    def _summary(self) -> str:
        areas = [f"{count} {key}" for key, count in sorted(self._counts.items()) if ", " not in key]
        return f"{', '.join(areas)}: {len(self._failures)} failures"

    def end(self) -> int:
        """Prints how often what was tried; 1 if anything failed."""
        fields: dict[tuple[str, str], list[str]] = {}
        for (area, _, tried), count in sorted(
            (key.partition(", "), count) for key, count in self._counts.items()
        ):
            name, _, option = tried.partition(" ")
            fields.setdefault((area, name), []).append(f"{count} {option}".rstrip())
        del fields["cases", ""]
        for (area, name), counted in fields.items():
            print(f"  {name}: {', '.join(counted)}" if name else f"\n{area}: {counted[0]} cases")
        print(self._summary)
        return 1 if self._failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
