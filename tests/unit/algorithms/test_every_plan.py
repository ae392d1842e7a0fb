"""Facts about the plans of all algorithms, for every replica count from 1 to 64."""

import pytest

from crossdevice.algorithms.registry import ALGORITHMS
from crossdevice.plans.ledger import check_plan
from crossdevice.values.device import Device, host_device
from unit.algorithms.planning import COUNTS, planned


@pytest.mark.parametrize(
    "counts", [(*COUNTS, 64), pytest.param(range(18, 65), marks=pytest.mark.more("a repetition"))], ids=len
)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_replica_counts_exactly_once_for_every_replica_count(name, counts):
    algorithm = ALGORITHMS.load(name)()
    for count in counts:
        devices = [host_device(i) for i in range(count)]
        plan = planned(algorithm, devices, devices)
        check_plan(plan)
        assert [buffer.device for buffer in plan.outputs] == devices


@pytest.mark.parametrize("name", ALGORITHMS)
def test_any_destinations_are_served_in_their_order(name):
    algorithm = ALGORITHMS.load(name)()
    for count in COUNTS:
        devices = [host_device(i) for i in range(count)]
        elsewhere = host_device(99)
        for destinations in (devices[::-1], devices[-1:], [elsewhere], [elsewhere, devices[0], elsewhere]):
            plan = planned(algorithm, devices, destinations)
            check_plan(plan)
            assert [buffer.device for buffer in plan.outputs] == destinations


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_pack_and_every_length_is_reduced_too(name):
    algorithm = ALGORITHMS.load(name)()
    for count in (1, 2, 3, 5, 8, 9):
        devices = [host_device(i) for i in range(count)]
        for pack_number in range(count + 1):
            for length in (0, 1, 2, count - 1, count + 1):
                check_plan(planned(algorithm, devices, devices, length, pack_number))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_several_replicas_may_share_a_device(name):
    algorithm = ALGORITHMS.load(name)()
    zero, one = host_device(0), host_device(1)
    for devices in ([zero] * 4, [zero, zero, one], [zero, one, zero, one, one], [Device("cuda", 0)] * 3):
        plan = planned(algorithm, devices, devices)
        check_plan(plan)
        assert [buffer.device for buffer in plan.outputs] == devices
        assert len({buffer.number for buffer in plan.outputs}) == len(devices)


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"nccl"}))
def test_an_all_reduce_sends_two_arrays_for_each_replica_but_the_first(name):
    algorithm = ALGORITHMS.load(name)()
    for count in COUNTS:
        devices = [host_device(i) for i in range(count)]
        assert planned(algorithm, devices, devices, length=count).total_traffic() == 2 * (count - 1) * count
