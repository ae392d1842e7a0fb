"""`crossdevice bits`: where two recorded runs part."""

from __future__ import annotations

import argparse
import json

from crossdevice.recording.comparison import as_json, compare, described, notes, read_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments: two runs."""
    what = "the file of a run; `run.bits` also stands for `run.rank*.bits`, a folder for all `.bits` in it"
    parser.add_argument("first", help=what)
    parser.add_argument("second", help="the same of the other run, which may have another number of ranks")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints the first difference; returns 1 if there is one."""
    runs = read_run(arguments.first), read_run(arguments.second)
    found = compare(*runs)
    if arguments.json:
        print(json.dumps(as_json(found, runs), indent=2))
    else:
        print("\n".join(described(found, arguments.first, arguments.second)))
        for note in notes(found, [(arguments.first, runs[0]), (arguments.second, runs[1])]):
            print(note)
    return 0 if found.parting is None else 1
