"""The answer of `choose_algorithm`."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import NamedTuple

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.algorithms.registry import ALGORITHMS


class Choice(NamedTuple):
    """An algorithm, why it was chosen and, if by cost, the seconds that each would take, fastest first."""

    name: str
    cross_device_ops: CrossDeviceOps
    reason: str
    seconds: Mapping[str, float] = types.MappingProxyType({})


def chosen(name: str, reason: str, seconds: Mapping[str, float] = types.MappingProxyType({})) -> Choice:
    """The choice of the algorithm of that name, with its default settings."""
    return Choice(name, ALGORITHMS.load(name)(), reason, seconds)
