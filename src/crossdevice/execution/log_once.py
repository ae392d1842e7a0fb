"""Warnings that an object logs once, not in every call."""

from __future__ import annotations

import logging

logger = logging.getLogger("crossdevice")


class LogOnce:
    """Remembers which warnings it has logged."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def warning(self, text: str, subject: str | None = None) -> None:
        """Logs a warning, unless it, or another one on the same subject, has been logged."""
        if (subject or text) not in self._logged:
            self._logged.add(subject or text)
            logger.warning("%s", text)
