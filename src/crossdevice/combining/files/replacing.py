"""Files that appear only when they are complete."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from crossdevice.errors import FileError


@contextlib.contextmanager
def replaced(file: str | PathLike[str]) -> Iterator[BinaryIO]:
    """A new file beside the one that is named, which takes its place at the end; an error removes it."""
    path = Path(file)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with open(beside, "x+b") as opened:
            yield opened
        os.replace(beside, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        if isinstance(error, OSError) and not isinstance(error, FileError):
            raise FileError(f"{path} cannot be written: {error.strerror or error}") from error
        raise


def write_at(file: BinaryIO, place: int, elements: NDArray[Any]) -> None:
    """Writes to any byte of a file; several threads may, at once."""
    left = elements.view(np.uint8).data
    while left:
        number = os.pwrite(file.fileno(), left, place)
        left, place = left[number:], place + number
