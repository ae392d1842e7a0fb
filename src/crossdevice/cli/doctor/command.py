"""`crossdevice doctor`: installed libraries, how crossdevice uses them, and missing parts."""

from __future__ import annotations

import argparse
import functools
import json
import platform

import crossdevice
from crossdevice.cli.doctor.diagnosis import diagnosis
from crossdevice.cli.doctor.verification import SECONDS, verification
from crossdevice.cli.terminal import Section, show

SELF_TEST = "self-test"

INCOMPLETE = 3
"""The exit status if no result is wrong, but not all were reached."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options: text or JSON, with or without a self-test."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="also reduce every dtype in every precision, on the host, on GPUs and between the processes of "
        "a launch, compare all results with exact arithmetic, and exit with 1 if any is wrong, with 3 if not "
        "all were reached in time",
    )
    parser.add_argument(
        "--seconds",
        type=_positive,
        default=SECONDS,
        help="how long --verify may take in this process (%(default)g)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints all findings with hints; the exit status says whether all was verified."""
    test = functools.partial(verification, seconds=arguments.seconds)
    found = diagnosis({SELF_TEST: test} if arguments.verify else {})
    tested = found.get(SELF_TEST, [])
    if all(finding.is_well for finding in tested):
        code = 0 if all(finding.is_complete for finding in tested) else INCOMPLETE
    else:
        code = 1
    here = {
        "crossdevice": crossdevice.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    if arguments.json:
        sections = {title: [finding._asdict() for finding in findings] for title, findings in found.items()}
        print(json.dumps({**here, "sections": sections}, indent=2))
        return code
    tables = [
        Section(title, ("", "", ""), [("" if well else "!", what, said) for what, said, well, *_ in findings])
        for title, findings in found.items()
    ]
    advice = [finding for findings in found.values() for finding in findings if finding.advice]
    lines = dict.fromkeys(
        f"  {'' if finding.is_well else '! '}{finding.what}: {finding.advice}"
        for finding in sorted(advice, key=lambda finding: finding.is_well)
    )
    headline = " ".join(f"{name} {said}" for name, said in here.items())
    show([headline], tables, "what one could do", list(lines))
    return code


def _positive(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"expected more than 0 seconds, got {text}")
    return seconds
