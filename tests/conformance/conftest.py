"""What all laws share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _only_errors_are_logged() -> Iterator[None]:
    """Without GPUs NCCL says once per object why it falls back; a unit test reads that."""
    logger = logging.getLogger("crossdevice")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)
