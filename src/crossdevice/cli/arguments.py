"""Arguments that several commands take: sizes, and files to write, which are refused before any work."""

from __future__ import annotations

import argparse
import re
from fractions import Fraction
from pathlib import Path

from crossdevice.errors import OptionError


def size_in_bytes(text: str) -> int:
    """Parses a size such as 512, 4K, 1M or 1.5GiB, in powers of two.

    >>> size_in_bytes("4K"), size_in_bytes("1.5MiB")
    (4096, 1572864)
    """
    match = re.fullmatch(r"(\d+)B?|(\d+(?:\.\d+)?)([KMG])(?:iB)?", text.strip(), re.IGNORECASE)
    size = 0
    if match is not None:
        factor = 1 << {"": 0, "K": 10, "M": 20, "G": 30}[(match[3] or "").upper()]
        size = int(Fraction(match[1] or match[2]) * factor)
    if size == 0:
        raise OptionError(
            f"{text!r} is not a size; expected bytes such as 512, 4K, 100MiB or 1.5GiB "
            "(K, M and G, with or without iB, are powers of two)"
        )
    return size


def output_file(text: str) -> Path:
    """Returns the path, if its folder exists.

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
    """Refuses file extensions that do not match the contents."""
    if path.suffix not in endings:
        raise OptionError(
            f"{str(path)!r} is not a valid {what} file; expected a name that ends in {' or '.join(endings)}"
        )
