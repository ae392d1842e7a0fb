"""Warnings that an object gives once, not in every call."""

from __future__ import annotations

import logging

logger = logging.getLogger("crossdevice")


class Remarks:
    """What was remarked already."""

    def __init__(self) -> None:
        self._made: set[str] = set()

    def make(self, text: str, about: str | None = None) -> None:
        """Puts a warning into the log, unless it, or one about the same, is there."""
        if (about or text) not in self._made:
            self._made.add(about or text)
            logger.warning("%s", text)
