"""The strategy that makes the variables."""

from __future__ import annotations

import pytest

import crossdevice as cd


@pytest.fixture
def strategy():
    return cd.MirroredStrategy(["cpu:0", "cpu:1"])
