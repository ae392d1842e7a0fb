from fractions import Fraction

from crossdevice import HalvingDoublingAllReduce
from crossdevice.values.device import host_device
from unit.algorithms.planning import COUNTS, planned


def test_powers_of_two_take_two_log_rounds_and_the_traffic_of_a_ring():
    for exponent in range(1, 7):
        count = 1 << exponent
        devices = [host_device(i) for i in range(count)]
        plan = planned(HalvingDoublingAllReduce(), devices, devices, length=count)
        assert plan.num_rounds == 2 * exponent
        assert Fraction(plan.busiest_device_traffic(), count) == Fraction(2 * (count - 1), count)


def test_other_counts_take_two_more_rounds():
    for count in COUNTS:
        if count & (count - 1):
            devices = [host_device(i) for i in range(count)]
            exponent = count.bit_length() - 1
            assert planned(HalvingDoublingAllReduce(), devices, devices).num_rounds == 2 * exponent + 2
