"""Results go where destinations say, in that order, each in memory of its own; destinations are only read."""

from __future__ import annotations

import numpy as np
import torch

import crossdevice as cd
from conformance.rows import ALGORITHM_ROWS, components_of, each_algorithm, each_backend, each_option, placed
from crossdevice.values.device import device_of

ARRAYS = [np.float32([1, 2, 3]), np.float32([10, 20, 30]), np.float32([100, 200, 300])]
SUM = [111.0, 222.0, 333.0]


def cpus(*numbers):
    return tuple(cd.Device("cpu", number) for number in numbers)


def destinations():
    """Everything that says where, with the devices it stands for."""
    variable = cd.Variable(np.float32([7]), device="cpu:6")
    slices = cd.IndexedSlices(np.ones((1, 2)), np.array([0]), (4, 2))
    return [
        ("cpu:0", cpus(0)),
        ("cpu:2", cpus(2)),
        ("cpu:9", cpus(9)),
        ("/job:localhost/replica:0/task:0/device:CPU:5", cpus(5)),
        (cd.Device("cpu", 4), cpus(4)),
        (variable, cpus(6)),
        (np.zeros(5), cpus(0)),
        (torch.zeros(2), cpus(0)),
        (slices, cpus(0)),
        (cd.PerReplica([variable, 1.0]), cpus(6, 1)),
        (cd.Mirrored([0.0, 0.0]), cpus(0, 1)),
        (cd.PerReplica([0.0]), cpus(0)),
        (placed("cpu:0", "cpu:1", "cpu:2"), cpus(0, 1, 2)),
        (placed("cpu:2", "cpu:0", "cpu:1"), cpus(2, 0, 1)),
        (placed("cpu:2", "cpu:1"), cpus(2, 1)),
        (placed("cpu:7", "cpu:8"), cpus(7, 8)),
        (placed("cpu:1", "cpu:7", "cpu:0"), cpus(1, 7, 0)),
        (placed("cpu:1", "cpu:1", "cpu:0"), cpus(1, 1, 0)),
        (placed("cpu:2", "cpu:1", "cpu:0", "cpu:2"), cpus(2, 1, 0, 2)),
        (placed("cpu:3", "cpu:3"), cpus(3, 3)),
    ]


def check(result, devices, backend, inputs, right=None):
    components = components_of(result)
    if len(devices) == 1:
        assert type(result) is backend.array_type
    else:
        assert type(result) is cd.Mirrored
        assert result.devices == devices
    assert [backend.lists(component) for component in components] == [right or SUM] * len(devices)
    assert all(device_of(array) in (None, device) for array, device in zip(components, devices, strict=True))
    assert backend.keeps_apart(components, inputs)


@each_backend("destinations")
@each_algorithm("destinations")
def test_results_are_on_the_destinations_in_their_order(row, backend):
    ops = row.make()
    value = backend.per_replica(ARRAYS)
    for options, (target, devices) in backend.product(each_option(), destinations()):
        check(ops.reduce("sum", value, target, options), devices, backend, value.values)


@each_algorithm("destinations")
@each_backend("destinations")
def test_every_pair_of_a_batch_has_its_own_destinations(row, backend):
    ops = row.make()
    for options in each_option(("fast", "accurate")):
        value = backend.per_replica(ARRAYS)
        targets = destinations()
        results = ops.batch_reduce("sum", [(value, target) for target, _ in targets], options)
        for result, (_, devices) in zip(results, targets, strict=True):
            check(result, devices, backend, value.values)


@each_backend("destinations")
@each_algorithm("destinations")
def test_several_replicas_may_share_a_device(row, backend):
    ops = row.make()
    layouts = [["cpu:0"] * 3, ["cpu:1", "cpu:0", "cpu:1"], ["cpu:4", "cpu:4", "cpu:2"]]
    for options, layout in backend.product(each_option(), layouts):
        value = backend.per_replica(ARRAYS, layout)
        devices = tuple(map(cd.Device.parse, layout))
        check(ops.reduce("sum", value, value, options), devices, backend, value.values)
        for target in ("cpu:0", "cpu:3", placed("cpu:0", "cpu:1"), placed("cpu:4", "cpu:2")):
            devices = target.devices if isinstance(target, cd.PerReplica) else (cd.Device.parse(target),)
            check(ops.reduce("sum", value, target, options), devices, backend, value.values)


@each_algorithm("destinations")
def test_a_mean_divides_by_the_replicas_and_not_by_devices_or_destinations(row):
    ops = row.make()
    for options in each_option():
        value = cd.PerReplica(ARRAYS, ["cpu:0", "cpu:0", "cpu:1"])
        for target in ("cpu:5", placed("cpu:0", "cpu:1"), placed(*(f"cpu:{k}" for k in range(5)))):
            for component in components_of(ops.reduce("mean", value, target, options)):
                assert component.tolist() == [37.0, 74.0, 111.0]


def test_a_destination_variable_is_never_written():
    for row in ALGORITHM_ROWS:
        held = np.float32([7, 8, 9])
        variable = cd.Variable(held, device="cpu:1")
        memory = variable.operand()
        for call in (
            lambda ops, target: ops.reduce("sum", cd.PerReplica(ARRAYS), target),
            lambda ops, target: ops.batch_reduce("sum", [(cd.PerReplica(ARRAYS), target)]),
            lambda ops, target: ops.broadcast(ARRAYS[0], target),
            lambda ops, target: ops.gather(cd.PerReplica(ARRAYS), target),
        ):
            call(row.make(), variable)
            assert np.shares_memory(variable.operand(), memory)
            assert held.tolist() == [7, 8, 9]


def test_destination_arrays_are_only_asked_for_their_device():
    for row in ALGORITHM_ROWS:
        target = cd.PerReplica([np.zeros(1), np.zeros((2, 2))], ["cpu:2", "cpu:0"])
        result = row.make().reduce("sum", cd.PerReplica(ARRAYS), target)
        assert [component.tolist() for component in result.values] == [SUM, SUM]
        assert [array.tolist() for array in target.values] == [[0], [[0, 0], [0, 0]]]


def test_devices_are_read_from_the_device_objects_of_array_libraries():
    assert cd.Device.parse(torch.device("cpu")) == cd.Device("cpu", 0)
    assert cd.Device.parse(torch.device("cpu", 3)) == cd.Device("cpu", 3)
    assert cd.Device.parse(torch.device("cuda", 1)) == cd.Device("cuda", 1)
    value = cd.PerReplica([torch.zeros(1)], [torch.zeros(1).device])
    assert value.devices == cpus(0)
