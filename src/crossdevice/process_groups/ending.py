"""Groups that are open when Python ends: others are told, and do not wait for a process that is gone."""

from __future__ import annotations

import atexit
import functools
import sys
import weakref
from typing import Protocol


class Open(Protocol):
    """Something that others wait for until it says that it ends."""

    def end(self, why: str) -> None:
        """Ends it, and tells the others why."""


_open_ones: weakref.WeakSet[Open] = weakref.WeakSet()
_is_python_ending = False


def end_with_python(one: Open) -> None:
    """Has it ended at the latest when Python ends."""
    _open_ones.add(one)
    _registered()


def is_python_ending() -> bool:
    """Whether only daemon threads are left."""
    return _is_python_ending


def end_all() -> None:
    """Ends all that are open, because Python is about to end."""
    global _is_python_ending
    _is_python_ending = True
    error = getattr(sys, "last_value", None)  # what ends it, if nobody has caught it
    for one in list(_open_ones):
        one.end("its process has ended" + ("" if error is None else f": {error!r}"))


@functools.cache
def _registered() -> None:
    # Not when this is imported: what is registered last runs first, and threads are waited for after it.
    atexit.register(end_all)
