"""`make fuzz`: random reductions against an independent model, for FUZZ_SECONDS, from FUZZ_SEED."""

# ruff: noqa: T201 - a command, which prints

from __future__ import annotations

import collections
import dataclasses
import logging
import os
import secrets
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.cases import FIELDS
from fuzz.fuzzing import fuzzed, keep


def main() -> int:
    """Prints the seed, failures and how much of what was tried; 1 if anything failed."""
    seed = int(os.environ.get("FUZZ_SEED") or secrets.randbelow(1 << 32))
    seconds = float(os.environ.get("FUZZ_SECONDS") or 600)
    print(f"FUZZ_SEED={seed} FUZZ_SECONDS={seconds:g}", flush=True)
    logging.getLogger("crossdevice").setLevel(logging.ERROR)  # algorithms say what they do without GPUs
    counts: collections.Counter[str] = collections.Counter()
    failures = set()
    for case, wrong in fuzzed(seed, seconds, counts):
        if (kind := dataclasses.replace(case, seed=0)) not in failures:
            failures.add(kind)
            keep(case)
            print(f"{case}\n  {wrong}", flush=True)
    for name in FIELDS:
        tried = {
            key.removeprefix(f"{name} "): count for key, count in counts.items() if key.startswith(f"{name} ")
        }
        print(f"{name}: " + ", ".join(f"{count} {option}" for option, count in sorted(tried.items())))
    print(f"{counts['cases']} cases, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
