"""A bar that shows how many bytes are done, and how fast; on a terminal only."""

from __future__ import annotations

import shutil
import time
from types import TracebackType
from typing import Self, TextIO

SECONDS_BETWEEN = 0.1
BAR_CHARACTERS = 24


class ByteProgress:
    """Draws one line again and again, and removes it in the end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_shown = stream.isatty()
        self._started = self._drawn = time.monotonic()

    def update(self, done: int, total: int) -> None:
        """Called as often as one likes."""
        now = time.monotonic()
        if self._is_shown and now - self._drawn >= SECONDS_BETWEEN:
            self._drawn = now
            width = shutil.get_terminal_size().columns - 1
            print(
                f"\r{bar_text(done, total, now - self._started)[:width]}",
                end="",
                file=self._stream,
                flush=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_shown:
            print("\r\x1b[K", end="", file=self._stream, flush=True)


def bar_text(done: int, total: int, seconds: float) -> str:
    """Formats the share, the bytes and the speed.

    >>> bar_text(1_500_000_000, 2_000_000_000, 1.0)
    '[##################      ]  75 %  1.50 of 2.00 GB  1.50 GB/s'
    """
    filled = BAR_CHARACTERS * done // max(total, 1)
    bar = "#" * filled + " " * (BAR_CHARACTERS - filled)
    percent = 100 * done // max(total, 1)
    return f"[{bar}] {percent:3} %  {done / 1e9:.2f} of {total / 1e9:.2f} GB  {done / seconds / 1e9:.2f} GB/s"
