"""`make soak`: calls of all kinds for SOAK_SECONDS, half of it in one process, half of it between three.

Prints what each process uses as time goes by, and what has grown or slowed down; 1 if anything has.
"""

# ruff: noqa: T201 - a command, which prints

from __future__ import annotations

import functools
import logging
import os
import secrets
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from crossdevice.testing import run_ranks
from soak.loops import soak_rank, work_here
from soak.samples import Sample, drifts, sampled

NUM_RANKS = 3


def main() -> int:
    """Runs both halves."""
    seconds = float(os.environ.get("SOAK_SECONDS") or 3600)
    seed = int(os.environ.get("SOAK_SEED") or secrets.randbelow(1 << 32))
    print(f"SOAK_SECONDS={seconds:g} SOAK_SEED={seed}", flush=True)
    logging.getLogger("crossdevice").setLevel(logging.ERROR)
    print("\none process", flush=True)
    samples = []
    for sample in sampled(work_here(seed), seconds / 2):
        samples.append(sample)
        print(f"  {sample}", flush=True)
    wrong = _told("one process", samples)
    print(f"\n{NUM_RANKS} processes on gloo, of which rank 0 is shown", flush=True)
    program = functools.partial(soak_rank, seed=seed, seconds=seconds / 2)
    ranks = run_ranks(NUM_RANKS, program, processes=True, timeout_seconds=120.0)
    for sample in ranks[0]:
        print(f"  {sample}")
    for rank, of_rank in enumerate(ranks):
        wrong += _told(f"rank {rank}", of_rank)
    return 1 if wrong else 0


def _told(where: str, samples: list[Sample]) -> int:
    found = drifts(samples)
    print(f"{where}: " + ("; ".join(found) if found else "nothing has grown or slowed down"), flush=True)
    return len(found)


if __name__ == "__main__":
    raise SystemExit(main())
