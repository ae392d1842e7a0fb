"""Files that appear only when they are complete."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from crossdevice.errors import FileError


@contextlib.contextmanager
def replaced(file: str | PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a new file beside the one that is named, which takes its place at the end; an error removes it.

    It has no name until then where the system has such files: a process that is killed leaves nothing behind.
    A user who may not read the old file may not read the new one either.
    """
    try:
        # A link stays one: what it leads to is replaced.
        path = Path(os.path.realpath(file))
    except ValueError as error:  # no name has a zero in it
        raise FileError(f"{os.fspath(file)!r} cannot be written: {error}") from error
    beside = path.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        with _without_name(path.parent) or open(beside, "x+b") as opened:
            with contextlib.suppress(FileNotFoundError):
                os.chmod(opened.fileno(), stat.S_IMODE(os.stat(path).st_mode))
            yield opened
            opened.flush()
            if not beside.exists():
                # Given a folder, Python follows the link, which names the file.
                os.link(_link_to(opened), beside, src_dir_fd=opened.fileno())
        os.replace(beside, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        if isinstance(error, OSError) and not isinstance(error, FileError):
            raise FileError(f"{path} cannot be written: {error.strerror or error}") from error
        raise


def _without_name(folder: Path) -> BinaryIO | None:
    """Opens a file without a name, which vanishes on close unless linked; None where there are none."""
    if not hasattr(os, "O_TMPFILE"):
        return None
    try:
        opened = os.fdopen(os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o666), "w+b")
    except OSError:  # the file system has none, or the folder cannot be written to: a name says which
        return None
    if os.path.exists(_link_to(opened)):
        return opened
    opened.close()
    return None


def _link_to(opened: BinaryIO) -> str:
    return f"/proc/self/fd/{opened.fileno()}"


def write_at(file: BinaryIO, place: int, elements: NDArray[Any]) -> None:
    """Writes to any byte of a file; several threads may, at once."""
    left = elements.view(np.uint8).data
    while left:
        number = os.pwrite(file.fileno(), left, place)
        left, place = left[number:], place + number
