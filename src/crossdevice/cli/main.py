"""The `crossdevice` command: finds the subcommand and hands over."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

import crossdevice
from crossdevice.errors import CrossDeviceError


class Command(NamedTuple):
    """A command: its module (which has `add_arguments` and `run`), a sentence on it, and an example."""

    module: str
    summary: str
    example: str


COMMANDS = {
    "average": Command(
        "crossdevice.cli.average",
        "Averages the tensors of several model files into one file, whatever their size.",
        "crossdevice average run1.safetensors run2.safetensors -o mean.safetensors --weights 3,1",
    ),
    "bench": Command(
        "crossdevice.cli.bench.command",
        "Measures how fast this machine reduces, gathers and copies, beside other libraries.",
        "crossdevice bench -b 4K -e 64M --against numpy,torch",
    ),
    "bits": Command(
        "crossdevice.cli.bits",
        "Compares two recorded runs, and names the first call in which their bits differ.",
        "crossdevice bits run_a.bits run_b.bits",
    ),
    "completion": Command(
        "crossdevice.cli.completion",
        "Prints a script with which a shell completes commands, options and their choices.",
        "crossdevice completion bash",
    ),
    "demo": Command(
        "crossdevice.cli.demo.command",
        "Trains a small classifier on several logical devices, and checks that all of them agree.",
        "crossdevice demo --devices 4",
    ),
    "determinism": Command(
        "crossdevice.cli.determinism.command",
        "Shows which settings change the bits of sums in gloo, MPI and crossdevice.",
        "crossdevice determinism --backends gloo,crossdevice -n 4",
    ),
    "doctor": Command(
        "crossdevice.cli.doctor.command",
        "Checks this machine: devices, libraries, what is chosen and why, what is missing.",
        "crossdevice doctor --verify",
    ),
    "explain": Command(
        "crossdevice.cli.explain.command",
        "Predicts the time and the traffic of an all-reduce on a machine, and animates it.",
        "crossdevice explain --algorithm ring --topology dgx1v --bytes 100MiB --html plan.html",
    ),
    "run": Command(
        "crossdevice.cli.run",
        "Starts a program as several processes of this host, which form a group.",
        "crossdevice run -n 4 train.py --epochs 3",
    ),
}

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a write whose cause is where the output goes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; prints errors of crossdevice as one line, without a traceback."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this process
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (for good)
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="crossdevice", description=crossdevice.__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"crossdevice {crossdevice.__version__}")
    parser.epilog = "`crossdevice COMMAND --help` describes a command, with an example."
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, (module, summary, example) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if given[:1] == [name]:  # only the chosen one is imported
            importlib.import_module(module).add_arguments(command)
    chosen, unknown = parser.parse_known_args(given)
    if chosen.command is None:
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        parser.print_help()
        return 0
    if unknown:  # by itself, argparse would show how to use `crossdevice`, not the command
        commands.choices[chosen.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        code: int = importlib.import_module(COMMANDS[chosen.command].module).run(chosen)
        sys.stdout.flush()
    except CrossDeviceError as error:
        print(f"crossdevice {chosen.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        _discard_output()
        return 141
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        _discard_output()
        print(f"crossdevice {chosen.command}: the output cannot be written: {error}", file=sys.stderr)
        return 2
    return code


def _discard_output() -> None:
    """Drops what could not be written, since Python would complain again when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
