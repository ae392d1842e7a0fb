"""A rank's place in the order of calls, taken even if its call is refused before ranks meet."""

from __future__ import annotations

import threading
from collections.abc import Callable


class HasBegun(threading.local):
    """Whether the thread's call has begun; outside of a turn there is nothing to refuse."""

    has_begun = True


class Turn:
    """Around all that leads to a call: an error before it begins takes its place.

    Other ranks may make that call, and would take this rank's next one for it. They are told. Not a
    generator, which would take a small call longer than its data does.
    """

    __slots__ = ("_outer", "_refuse", "_state")

    def __init__(self, state: HasBegun, refuse: Callable[[str], None]) -> None:
        self._state, self._refuse = state, refuse
        self._outer = True

    def __enter__(self) -> None:
        self._outer, self._state.has_begun = self._state.has_begun, False

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is not None and not self._state.has_begun:
                self._refuse(f"{type(error).__name__}: {error}")
        finally:
            self._state.has_begun |= self._outer
