import math

from crossdevice import TreeAllReduce
from crossdevice.algorithms.tree_all_reduce import _parents
from crossdevice.values.device import host_device
from unit.algorithms.planning import COUNTS, planned


def test_about_two_log_rounds_and_at_most_two_arrays_per_device():
    for count in COUNTS[1:]:
        devices = [host_device(i) for i in range(count)]
        plan = planned(TreeAllReduce(), devices, devices)
        assert plan.num_rounds <= 2 * math.ceil(math.log2(count))
        assert plan.busiest_device_traffic() <= 2 * 640


def test_a_replica_inside_one_tree_is_a_leaf_of_the_other():
    for count in COUNTS[1:]:
        inside = [set(_parents(count, second=second).values()) for second in (False, True)]
        roots = [set(range(count)) - set(_parents(count, second=second)) for second in (False, True)]
        assert not (inside[0] - roots[0]) & (inside[1] - roots[1])


def test_each_tree_reaches_everyone_from_one_root_with_at_most_two_children():
    for count in COUNTS:
        for second in (False, True):
            parents = _parents(count, second=second)
            assert len(parents) == count - 1
            for replica in range(count):
                for _ in range(count):
                    replica = parents.get(replica, replica)
                assert replica not in parents
            assert all(list(parents.values()).count(parent) <= 2 for parent in set(parents.values()))
