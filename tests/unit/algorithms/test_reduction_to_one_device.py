import numpy as np
import pytest

from crossdevice import Device, PerReplica, ReductionToOneDevice
from crossdevice.errors import CrossDeviceError, DeviceError
from crossdevice.values.device import host_device
from unit.algorithms.planning import COUNTS, planned


def test_all_but_one_array_go_in_and_come_out_in_two_rounds():
    for count in COUNTS[1:]:
        devices = [host_device(i) for i in range(count)]
        plan = planned(ReductionToOneDevice(), devices, devices)
        assert plan.num_rounds == 2
        assert plan.total_traffic() == 2 * (count - 1) * 640
        assert plan.busiest_device_traffic() == (count - 1) * 640


def test_the_work_is_done_on_the_first_destination_unless_a_device_is_given():
    devices = [host_device(i) for i in range(3)]
    links = planned(ReductionToOneDevice(), devices, [devices[2]]).traffic()
    assert {target for _, target in links} == {devices[2]}
    links = planned(ReductionToOneDevice("cpu:7"), devices, [devices[2]]).traffic()
    assert {source for source, target in links if target == devices[2]} == {Device("cpu", 7)}


def test_accumulation_fn_gets_a_tuple_of_copies_and_mean_divides_its_result():
    seen = []

    def largest(arrays):
        seen.append(arrays)
        arrays[0][:] = 99.0
        return np.maximum.reduce([arrays[1], arrays[2]])

    value = PerReplica([np.float32([1.0]), np.float32([5.0]), np.float32([3.0])])
    ops = ReductionToOneDevice(accumulation_fn=largest)
    assert ops.reduce("sum", value, "cpu:0") == [5.0]
    assert ops.reduce("mean", value, value).values[2] == np.float32(5.0) / np.float32(3.0)
    assert isinstance(seen[0], tuple)
    assert value.values[0] == [1.0], "the function was given copies"


def test_accumulation_fn_may_return_a_number_or_one_of_its_arguments():
    value = PerReplica([np.float32([1.0]), np.float32([2.0])])
    assert ReductionToOneDevice(accumulation_fn=lambda arrays: 7.5).reduce("sum", value, "cpu:0") == 7.5
    first = ReductionToOneDevice(accumulation_fn=lambda arrays: arrays[0]).reduce("sum", value, value)
    assert [part.tolist() for part in first.values] == [[1.0], [1.0]]
    assert not np.shares_memory(first.values[0], first.values[1])


def test_nothing_is_written_if_the_result_of_a_later_leaf_does_not_fit():
    value = {name: PerReplica([np.ones(size, np.float32)] * 2) for name, size in (("a", 2), ("b", 3))}
    out = {name: np.zeros(size, np.float32) for name, size in (("a", 2), ("b", 3))}
    ops = ReductionToOneDevice(accumulation_fn=lambda arrays: arrays[0][:2])
    with pytest.raises(CrossDeviceError, match="accumulation_fn's result"):
        ops.reduce("sum", value, "cpu:0", out=out)
    assert [array.tolist() for array in out.values()] == [[0, 0], [0, 0, 0]]


def test_accumulation_fn_must_be_callable():
    with pytest.raises(TypeError, match="accumulation_fn must be callable"):
        ReductionToOneDevice(accumulation_fn=3)


def test_the_arguments_are_attributes():
    assert ReductionToOneDevice("cpu:1").reduce_to_device == Device("cpu", 1)
    assert ReductionToOneDevice("").reduce_to_device is None
    assert ReductionToOneDevice().accumulation_fn is None


def test_a_device_that_is_an_array_is_refused_and_an_empty_name_is_none():
    assert ReductionToOneDevice("").reduce_to_device is None
    with pytest.raises(DeviceError, match="is not a device"):
        ReductionToOneDevice(np.ones(2))
