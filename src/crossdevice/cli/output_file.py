"""Files that commands write: refused before the work is done, not after it."""

from __future__ import annotations

import argparse
from pathlib import Path


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
