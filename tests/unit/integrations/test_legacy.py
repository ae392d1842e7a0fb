"""The names of TensorFlow 1.9 to 1.12 and 2.2 work as they did, on today's algorithms."""

from __future__ import annotations

import pickle
from datetime import timedelta

import numpy as np
import pytest
import torch

import crossdevice as cd
from crossdevice.errors import ConversionError, DestinationError, OptionError, ReduceOpError
from crossdevice.integrations import legacy
from crossdevice.integrations.legacy import (
    AllReduceCrossTowerOps,
    CollectiveHints,
    CrossTowerOps,
    PerDevice,
    ReductionToOneDeviceCrossTowerOps,
)

SUM, MEAN = cd.VariableAggregation.SUM, cd.VariableAggregation.MEAN
TOWER_OPS = {
    "one device": ReductionToOneDeviceCrossTowerOps,
    "one other device": lambda: ReductionToOneDeviceCrossTowerOps(reduce_to_device="/cpu:3"),
    "nccl": AllReduceCrossTowerOps,
    "hierarchical copy": lambda: AllReduceCrossTowerOps("hierarchical_copy", num_packs=2),
    "small values": lambda: AllReduceCrossTowerOps("hierarchical_copy", 0, 64, 4),
}
each_ops = pytest.mark.parametrize("make", TOWER_OPS.values(), ids=list(TOWER_OPS))


def per_device():
    return PerDevice({"/cpu:0": np.float32([1, 2]), "/cpu:1": np.float32([3, 4])})


def cpus(*numbers):
    return tuple(cd.Device("cpu", number) for number in numbers)


def check_mirrored(result, numbers, *devices):
    assert type(result) is cd.Mirrored
    assert result.devices == cpus(*devices)
    assert [component.tolist() for component in result.values] == [numbers] * len(devices)


def test_a_per_device_is_a_per_replica_from_device_names_to_values():
    value = PerDevice({"/cpu:1": 1.0, "cpu:0": 3.0})
    assert isinstance(value, cd.PerReplica)
    assert (value.values, value.devices) == ((1.0, 3.0), cpus(1, 0))


@pytest.mark.parametrize("index", [[1.0, 2.0], None, 3.0], ids=repr)
def test_a_per_device_of_what_is_no_mapping_is_refused(index):
    with pytest.raises(ConversionError, match="PerDevice"):
        PerDevice(index)


@each_ops
def test_results_are_mirrored_also_for_one_device(make):
    value = per_device()
    check_mirrored(make().reduce(SUM, value, value), [4, 6], 0, 1)
    check_mirrored(make().reduce(MEAN, value, "/cpu:0"), [2, 3], 0)
    check_mirrored(make().reduce(MEAN, value, "/device:CPU:5"), [2, 3], 5)
    (first, second) = make().batch_reduce(SUM, [(value, value), (value, "/cpu:1")])
    check_mirrored(first, [4, 6], 0, 1)
    check_mirrored(second, [4, 6], 1)
    check_mirrored(make().broadcast(np.float32([7]), "/cpu:2"), [7], 2)
    check_mirrored(make().broadcast(np.float32([7]), value), [7], 0, 1)


@each_ops
def test_destinations_are_lists_of_device_strings_in_their_order(make):
    value = per_device()
    check_mirrored(make().reduce(SUM, value, ["/cpu:1", "/cpu:0", "/cpu:4"]), [4, 6], 1, 0, 4)
    check_mirrored(make().reduce(SUM, value, ["/cpu:4"]), [4, 6], 4)
    check_mirrored(make().reduce(SUM, value, ("/cpu:4", "/cpu:0")), [4, 6], 4, 0)
    check_mirrored(make().batch_reduce(SUM, ((value, ["/cpu:1", "/cpu:0"]),))[0], [4, 6], 1, 0)
    check_mirrored(make().broadcast(np.float32([7]), ["/cpu:2", "/cpu:1"]), [7], 2, 1)


@each_ops
def test_destinations_none_means_where_the_value_is(make):
    check_mirrored(make().reduce(SUM, per_device(), None), [4, 6], 0, 1)
    check_mirrored(make().batch_reduce(SUM, [(per_device(), None)])[0], [4, 6], 0, 1)


@each_ops
def test_destinations_may_be_variables_arrays_and_devices(make):
    variable = cd.Variable(np.float32([9, 9]), device="cpu:6")
    check_mirrored(make().reduce(SUM, per_device(), variable), [4, 6], 6)
    assert variable.value().tolist() == [9, 9]
    check_mirrored(make().reduce(SUM, per_device(), np.zeros(1)), [4, 6], 0)
    check_mirrored(make().reduce(SUM, per_device(), cd.Device("cpu", 3)), [4, 6], 3)


@each_ops
def test_arguments_have_their_old_names(make):
    value = per_device()
    result = make().reduce(aggregation=SUM, per_device_value=value, destinations=value)
    check_mirrored(result, [4, 6], 0, 1)
    pairs = [(value, value)]
    (result,) = make().batch_reduce(aggregation=MEAN, value_destination_pairs=pairs)
    check_mirrored(result, [2, 3], 0, 1)
    check_mirrored(make().broadcast(tensor=np.float32([7]), destinations="/cpu:2"), [7], 2)


@each_ops
def test_the_operation_is_an_aggregation_or_the_string_of_the_first_release(make):
    for aggregation, right in [(SUM, [4, 6]), (MEAN, [2, 3]), ("sum", [4, 6]), ("mean", [2, 3])]:
        check_mirrored(make().reduce(aggregation, per_device(), "/cpu:0"), right, 0)
    others = [cd.VariableAggregation.NONE, cd.VariableAggregation.ONLY_FIRST_REPLICA, "max", "average", None]
    for aggregation in (*others, cd.ReduceOp.SUM, 1):
        with pytest.raises(ReduceOpError, match="VariableAggregation"):
            make().reduce(aggregation, per_device(), "/cpu:0")
        with pytest.raises(ValueError, match="VariableAggregation"):
            make().batch_reduce(aggregation, [(per_device(), "/cpu:0")])


@each_ops
def test_a_bare_array_is_a_value_on_its_own_device(make):
    for array in (np.float32([1, 2]), torch.tensor([1.0, 2.0])):
        check_mirrored(make().reduce(MEAN, array, "/cpu:0"), [1, 2], 0)
        check_mirrored(make().reduce(SUM, array, ["/cpu:1", "/cpu:2"]), [1, 2], 1, 2)
        check_mirrored(make().reduce(SUM, cd.PerReplica([array, array]), None), [2, 4], 0, 1)


@each_ops
def test_slices_are_reduced_too(make):
    slices = [cd.IndexedSlices(np.float32([[k, 1]]), np.array([k]), (4, 2)) for k in (0, 1)]
    result = make().reduce(SUM, PerDevice(dict(zip(("/cpu:0", "/cpu:1"), slices, strict=True))), "/cpu:0")
    assert type(result) is cd.Mirrored
    assert result.values[0].values.tolist() == [[0, 1], [1, 1]]
    assert result.values[0].indices.tolist() == [0, 1]


@each_ops
def test_what_is_no_per_device_is_a_value_error(make):
    for value in (None, object(), "text", PerDevice({})):
        with pytest.raises(ConversionError, match="expected"):
            make().reduce(SUM, value, "/cpu:0")
        with pytest.raises(ValueError, match="expected"):
            make().batch_reduce(SUM, [(value, "/cpu:0")])


@each_ops
def test_pairs_are_a_list_or_a_tuple_of_tuples(make):
    value = per_device()
    generator = ((value, "/cpu:0") for _ in range(1))
    for pairs in (None, 3, value, [value], [[value, "/cpu:0"]], [(value,)], [(value, 1, 2)], generator, {}):
        with pytest.raises(ConversionError, match="a list or a tuple"):
            make().batch_reduce(SUM, pairs)
    assert make().batch_reduce(SUM, []) == []


@each_ops
def test_destinations_that_name_no_device_are_refused(make):
    for target in ([], (), 3, {}, ""):
        with pytest.raises(DestinationError, match="destinations"):
            make().reduce(SUM, per_device(), target)
    for target in (["foo"], "foo"):
        with pytest.raises(ValueError, match="foo"):
            make().reduce(SUM, per_device(), target)


def test_the_base_class_broadcasts_and_has_no_sum():
    check_mirrored(CrossTowerOps().broadcast(np.float32([7]), ["/cpu:0", "/cpu:1"]), [7], 0, 1)
    with pytest.raises(NotImplementedError):
        CrossTowerOps().reduce(SUM, per_device(), "/cpu:0")


def test_old_constructors_take_todays_arguments():
    product = ReductionToOneDeviceCrossTowerOps(accumulation_fn=lambda parts: parts[0] * parts[1])
    check_mirrored(product.reduce(SUM, per_device(), "/cpu:0"), [3, 8], 0)
    with pytest.raises(ValueError, match="num_packs"):
        AllReduceCrossTowerOps(num_packs=-1)
    with pytest.raises(ValueError, match="all-reduce algorithm"):
        AllReduceCrossTowerOps("carrier pigeon")


def test_collective_hints_are_options_under_their_old_name():
    assert CollectiveHints() == cd.CommunicationOptions()
    hints = CollectiveHints(bytes_per_pack=50, timeout_seconds=2.5)
    assert hints == cd.CommunicationOptions(bytes_per_pack=50, timeout_seconds=2.5)
    assert CollectiveHints(timeout_seconds=timedelta(seconds=3)).timeout_seconds == 3
    with pytest.raises(ValueError, match="bytes_per_pack"):
        CollectiveHints(-1)


@each_ops
def test_strategies_take_tower_objects_and_the_arguments_of_that_time(make):
    for strategy in (
        cd.MirroredStrategy(["/cpu:0", "/cpu:1"], cross_device_ops=make()),
        legacy.MirroredStrategy(["/cpu:0", "/cpu:1"], cross_tower_ops=make()),
    ):
        assert type(strategy.extended.cross_device_ops) is type(make().cross_device_ops)
        assert strategy.reduce("mean", per_device(), axis=None).tolist() == [2, 3]
    with pytest.raises(OptionError, match="both given"):
        legacy.MirroredStrategy(["/cpu:0"], num_gpus=1)
    with pytest.raises(cd.errors.DeviceError, match="cuda:"):
        legacy.MirroredStrategy(num_gpus=99)
    with pytest.raises(OptionError, match=f"num_gpus is {2**70}; expected at most 4096"):
        legacy.MirroredStrategy(num_gpus=2**70)


def test_the_all_reduce_of_tensorflow_1_14_takes_lists_of_devices_and_always_gives_mirrored():
    ops = legacy.AllReduceCrossDeviceOps("hierarchical_copy", num_packs=0, agg_small_grads_max_bytes=64)
    assert isinstance(ops, legacy.CrossDeviceOps)
    check_mirrored(ops.reduce(cd.ReduceOp.SUM, per_device(), ["/cpu:1"]), [4, 6], 1)
    check_mirrored(ops.reduce(cd.ReduceOp.MEAN, per_device(), ["/cpu:0", "/cpu:1"]), [2, 3], 0, 1)
    first, second = ops.batch_reduce(
        reduce_op=cd.ReduceOp.SUM, value_destination_pairs=[(per_device(), "/cpu:3"), (per_device(), None)]
    )
    check_mirrored(first, [4, 6], 3)
    check_mirrored(second, [4, 6], 0, 1)
    check_mirrored(ops.broadcast(np.float32([5]), destinations=["/cpu:2"]), [5], 2)
    with pytest.raises(ReduceOpError):
        ops.reduce("mode", per_device(), "/cpu:0")
    strategy = cd.MirroredStrategy(["/cpu:0", "/cpu:1"], cross_device_ops=ops)
    assert isinstance(strategy.extended.cross_device_ops, cd.AllReduceCrossDeviceOps)


def test_a_base_class_without_an_algorithm_names_itself():
    for call in (
        lambda ops: ops.reduce(SUM, per_device(), "/cpu:0"),
        lambda ops: ops.batch_reduce(SUM, [(per_device(), "/cpu:0")]),
    ):
        with pytest.raises(NotImplementedError, match=r"^CrossTowerOps has no algorithm; use Reduction"):
            call(CrossTowerOps())
    check_mirrored(CrossTowerOps().broadcast(np.float32([5]), ["/cpu:2", "/cpu:1"]), [5], 2, 1)


def test_hints_are_a_class():
    hints = cd.CollectiveHints(bytes_per_pack=64, timeout_seconds=3)
    assert legacy.CollectiveHints is cd.CollectiveHints
    assert isinstance(hints, cd.CollectiveHints)
    assert isinstance(hints, cd.CommunicationOptions)
    assert not isinstance(cd.CommunicationOptions(), cd.CollectiveHints)
    again = pickle.loads(pickle.dumps(hints))
    assert type(again) is cd.CollectiveHints
    assert again == hints
    merged = hints.merge(cd.CommunicationOptions(precision="fast"))
    assert merged == cd.CommunicationOptions(64, 3, precision="fast")
    with pytest.raises(TypeError, match="precision"):
        cd.CollectiveHints(precision="fast")
