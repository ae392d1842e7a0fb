import cProfile
import itertools
import pstats
from fractions import Fraction

import numpy as np
import pytest

import crossdevice as cd
from crossdevice import DirectAllReduce
from crossdevice.execution.local.passes import lower
from crossdevice.values.device import host_device
from unit.algorithms.planning import COUNTS, planned


def test_two_rounds_and_the_traffic_of_a_ring():
    for count in COUNTS[1:]:
        devices = [host_device(i) for i in range(count)]
        plan = planned(DirectAllReduce(), devices, devices, length=count)
        assert plan.num_rounds == 2
        assert Fraction(plan.busiest_device_traffic(), count) == Fraction(2 * (count - 1), count)


def test_partial_sums_never_travel():
    devices = [host_device(i) for i in range(6)]
    plan = planned(DirectAllReduce(), devices, devices)
    assert plan.total_traffic(unsummed=True) == plan.total_traffic()


def test_every_shard_is_summed_in_replica_order():
    devices = [host_device(i) for i in range(5)]
    assert {piece.order for piece in lower(planned(DirectAllReduce(), devices, devices))} == {(0, 1, 2, 3, 4)}


def test_many_replicas_are_planned_in_a_time_that_grows_with_their_number():
    """Counted in calls of functions: twice as many more replicas take twice as many more."""
    options = cd.CommunicationOptions(precision="fast")

    def num_calls(count):
        arrays = [np.ones(1, np.float32)] * count
        profile = cProfile.Profile()
        profile.runcall(cd.all_reduce, arrays, algorithm=DirectAllReduce(), options=options)
        return pstats.Stats(profile).total_calls

    num_calls(65)  # what happens once, such as imports, has happened
    fewer, more = (b - a for a, b in itertools.pairwise(map(num_calls, (96, 160, 224))))
    # Counts vary by about one part in a hundred with what a process has done before (memo tables,
    # collections of garbage); a plan that grew with the square would be half as much again.
    assert more == pytest.approx(fewer, rel=0.1)
    assert fewer < 64 * 4000
