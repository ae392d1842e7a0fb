"""What a reduce-scatter costs, counted from the plans of its parts, and what counts as a replica."""

from __future__ import annotations

import collections

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.process_groups.engines.thread_engine import run_ranks
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


def test_a_bare_structure_is_gathered_as_one_replica():
    def program(group):
        ops = cd.CollectiveAllReduce(group=group)
        tree = ops.all_gather({"a": np.full(group.rank, 2.0), "b": [np.ones(1), None]})
        numbers = ops.all_gather([group.rank, 5])
        return tree["a"].tolist(), tree["b"][0].tolist(), tree["b"][1], numbers.tolist()

    assert run_ranks(2, program) == [([2.0], [1.0, 1.0], None, [0, 5, 1, 5])] * 2
    assert cd.DirectAllReduce().all_gather({"a": np.ones(2)})["a"].tolist() == [1.0, 1.0]
