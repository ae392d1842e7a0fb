"""A thread that makes blocking calls, so that nobody has to wait for them longer than they want to."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


class Errand:
    """A call on its way: what it returned or raised, once it has."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._is_done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Makes the call."""
        try:
            self._result = self._function()
        except BaseException as error:  # raised where it is waited for
            self._error = error
        self._is_done.set()

    def wait(self, seconds: float) -> bool:
        """Whether the call has ended, after at most so long."""
        return self._is_done.wait(max(seconds, 0.0))

    def result(self) -> Any:
        """What an ended call returned; raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._result


class Courier:
    """Runs errands one after the other in a daemon thread of its own, started with the first.

    An engine that ignores its deadline holds up this thread only. Whoever waits for the errand stops
    waiting, and gets a new courier for anything that comes after.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._errands: queue.SimpleQueue[Errand | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, function: Callable[[], Any]) -> Errand:
        """Has the function called as soon as everything sent before has been."""
        errand = Errand(function)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._errands.put(errand)
        return errand

    def dismiss(self) -> None:
        """Ends the thread after the last errand; nothing may be sent afterwards."""
        self._errands.put(None)

    def _run(self) -> None:
        while (errand := self._errands.get()) is not None:
            errand.run()
