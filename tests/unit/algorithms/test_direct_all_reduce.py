from fractions import Fraction

from crossdevice import DirectAllReduce
from crossdevice.execution.local.lowering import lower
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
