"""What benchmarks that hold crossdevice to a table of promises ask of whoever runs them."""

from __future__ import annotations

import argparse
import fnmatch

from crossdevice.cli.bench.measure import Schedule


def parser_of(document: str | None) -> argparse.ArgumentParser:
    """Which rows, and how often; described by the first line of the benchmark's own document."""
    parser = argparse.ArgumentParser(description=document.splitlines()[0] if document else None)
    parser.add_argument("--rows", default="*", metavar="PATTERN", help="only rows with this in their text")
    parser.add_argument("--rounds", type=int, default=15, help="of which the median counts (15)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small arrays and three rounds, to see that all runs; nothing is judged",
    )
    return parser


def is_asked_for(text: str, pattern: str) -> bool:
    """Whether a row's text has the pattern in it, whatever the case."""
    return fnmatch.fnmatch(text.lower(), f"*{pattern.lower()}*")


def schedule_of(arguments: argparse.Namespace) -> Schedule:
    """How often is measured, and how often before."""
    return Schedule(3, 1) if arguments.quick else Schedule(arguments.rounds, 3)
