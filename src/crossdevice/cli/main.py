"""The `crossdevice` command: finds the subcommand and hands over."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import crossdevice
from crossdevice.errors import CrossDeviceError

COMMANDS = {
    "average": "write the mean of models in files, such as safetensors, through a few MiB of memory",
    "bench": "measure collectives in the format of nccl-tests, and compare other libraries",
    "bits": "say where two recorded runs part, and whether before a call or in it",
    "demo": "train a classifier of handwritten digits on logical CPU devices",
    "determinism": "show what changes the bits of sums: sizes, orders, algorithms, launches",
    "doctor": "report devices, libraries, links and threads, the chosen algorithm, and what is missing",
    "explain": "show the steps of an algorithm on a machine and their predicted cost",
    "run": "start a program as several processes of this host that form a group",
}
"""Each command is a folder of this package with a `command.py`: `add_arguments(parser)`, `run(arguments)`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; what crossdevice refuses is printed as one line, without a traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="crossdevice", description=crossdevice.__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"crossdevice {crossdevice.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if given[:1] == [name]:  # only the chosen one is imported
            importlib.import_module(f"crossdevice.cli.{name}.command").add_arguments(command)
    chosen, unknown = parser.parse_known_args(given)
    if unknown:  # by itself, argparse would show how to use `crossdevice`, not the command
        commands.choices[chosen.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        code: int = importlib.import_module(f"crossdevice.cli.{chosen.command}.command").run(chosen)
        sys.stdout.flush()
    except CrossDeviceError as error:
        print(f"crossdevice {chosen.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the output, such as head, has seen enough; Python would complain again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code
