from crossdevice import HierarchicalCopyAllReduce
from crossdevice.execution.local.passes import lower
from crossdevice.values.device import host_device
from unit.algorithms.planning import COUNTS, planned


def test_at_most_four_rounds_and_one_pair_of_arrays_between_the_halves():
    for count in COUNTS[1:]:
        devices = [host_device(i) for i in range(count)]
        near = set(devices[: count // 2])
        for pack_number in range(min(count, 4)):
            plan = planned(HierarchicalCopyAllReduce(), devices, devices, pack_number=pack_number)
            assert plan.num_rounds <= 4
            crossing = [n for (a, b), n in plan.traffic().items() if (a in near) != (b in near)]
            assert sum(crossing) == 2 * 640


def test_packs_take_their_roots_in_turn():
    devices = [host_device(i) for i in range(8)]
    for pack_number in range(8):
        plan = planned(HierarchicalCopyAllReduce(), devices, devices, pack_number=pack_number)
        sent = {(a.index, b.index) for a, b in plan.traffic()}
        assert (pack_number, (pack_number + 4) % 8) in sent


def test_the_two_halves_are_summed_first_as_in_tensorflow():
    devices = [host_device(i) for i in range(4)]
    (piece,) = lower(planned(HierarchicalCopyAllReduce(), devices, devices))
    assert piece.order == (0, 1, (2, 3))
    (piece,) = lower(planned(HierarchicalCopyAllReduce(), devices, devices, pack_number=2))
    assert piece.order == (2, 3, (0, 1))


def test_an_odd_replica_belongs_to_the_second_half():
    devices = [host_device(i) for i in range(5)]
    (piece,) = lower(planned(HierarchicalCopyAllReduce(), devices, devices))
    assert piece.order == (0, 1, (2, 3, 4))
