"""Warnings that an object gives once, not in every call."""

from __future__ import annotations

import logging

logger = logging.getLogger("crossdevice")


class Remarks:
    """What was remarked already."""

    def __init__(self) -> None:
        self._made: set[str] = set()

    def make(self, text: str) -> None:
        """Puts a warning into the log, unless it is there."""
        if text not in self._made:
            self._made.add(text)
            logger.warning("%s", text)
