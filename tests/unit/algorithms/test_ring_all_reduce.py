from fractions import Fraction

from crossdevice import RingAllReduce
from crossdevice.values.device import host_device
from unit.algorithms.planning import COUNTS, planned


def test_each_device_moves_the_least_possible_in_two_trips_around_the_ring():
    for count in COUNTS[1:]:
        devices = [host_device(i) for i in range(count)]
        plan = planned(RingAllReduce(), devices, devices, length=count)
        assert plan.num_rounds == 2 * (count - 1)
        assert Fraction(plan.busiest_device_traffic(), count) == Fraction(2 * (count - 1), count)
        assert all((b.index - a.index) % count == 1 for a, b in plan.traffic()), "one link in, one link out"


def test_a_single_destination_collects_the_shards_where_they_are():
    devices = [host_device(i) for i in range(4)]
    plan = planned(RingAllReduce(), devices, devices[:1], length=4)
    assert plan.num_rounds == 4
    assert plan.total_traffic() == 4 * 3 + 3
