"""What a reduce-scatter costs, counted from the plans of its parts."""

from __future__ import annotations

import collections

import pytest

import crossdevice as cd
from crossdevice.values.device import host_device
from unit.algorithms.planning import planned

COUNTS = (2, 3, 5, 8)
LENGTH = 840


def traffic(algorithm, count):
    """Elements sent over each link for the parts of all replicas."""
    devices = [host_device(number) for number in range(count)]
    elements = collections.Counter()
    for device in devices:
        elements.update(planned(algorithm, devices, [device], LENGTH // count).traffic())
    return elements


@pytest.mark.parametrize("count", COUNTS)
def test_a_reduction_to_one_device_sends_the_least_possible(count):
    assert set(traffic(cd.ReductionToOneDevice(), count).values()) == {LENGTH // count}


@pytest.mark.parametrize("count", COUNTS)
def test_direct_exchange_sends_one_nth_more(count):
    least = (count - 1) * LENGTH
    assert sum(traffic(cd.DirectAllReduce(), count).values()) == pytest.approx(
        least * (1 + 1 / count), rel=0.01
    )
