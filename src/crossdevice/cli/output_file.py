"""Files that commands write: refused before the work is done, not after it."""

from __future__ import annotations

import argparse
from pathlib import Path

from crossdevice.errors import OptionError


def output_file(text: str) -> Path:
    """The path, if there is a folder for it.

    >>> output_file("chart.svg").name
    'chart.svg'
    """
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: there is no folder '{path.parent}'")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; expected a file")
    return path


def check_ending(path: Path, what: str, *endings: str) -> None:
    """Refuses a name by which others would not know what is in the file."""
    if path.suffix not in endings:
        raise OptionError(
            f"{str(path)!r} is not a valid {what} file; expected a name that ends in {' or '.join(endings)}"
        )
