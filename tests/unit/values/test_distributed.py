import copy
import operator

import numpy as np
import pytest
import torch

import crossdevice as cd
from crossdevice import Device, IndexedSlices, Mirrored, PerReplica, Variable
from crossdevice.errors import (
    ConversionError,
    DeviceMismatchError,
    ShapeMismatchError,
    StructureMismatchError,
)
from crossdevice.values.replica_scope import replica_scope


def test_host_arrays_sit_on_logical_devices_by_position():
    assert [str(d) for d in PerReplica([np.zeros(1), {"w": np.zeros(1)}, 3.0]).devices] == [
        "cpu:0",
        "cpu:1",
        "cpu:2",
    ]


def test_devices_can_be_given_and_may_repeat():
    value = PerReplica([1.0, 2.0], devices=["cpu:3", Device("cpu", 3)])
    assert value.devices == (Device("cpu", 3), Device("cpu", 3))


def test_as_many_devices_as_components():
    with pytest.raises(StructureMismatchError, match="2 components and 1 device; expected"):
        PerReplica([1.0, 2.0], devices=["cpu:0"])


def test_a_host_array_is_not_on_a_gpu_because_someone_says_so():
    with pytest.raises(
        DeviceMismatchError, match="replica 1 was placed on cuda:0, but its array is on the host"
    ):
        PerReplica([np.zeros(1), np.zeros(1)], devices=["cpu:0", "gpu:0"])


def test_a_variable_component_is_where_the_variable_is():
    assert PerReplica([Variable(1.0, device="cpu:5"), Variable(1.0, device="cpu:6")]).devices == (
        Device("cpu", 5),
        Device("cpu", 6),
    )


@pytest.mark.parametrize("make", [np.float32, torch.tensor], ids=["numpy", "torch"])
def test_variables_of_keras_are_the_arrays_they_hold(make):
    kind = type("Variable", (), {"__module__": "keras.src.backend", "dtype": "float32"})  # slow to import
    models = [[kind(), {"b": kind()}] for _ in range(2)]
    for number, (w, rest) in enumerate(models):
        w.value, rest["b"].value = make([1.0 + number]), make([3.0])
    w, rest = cd.reduce(models, "mean")
    assert (type(w), w.tolist(), rest["b"].tolist()) == (type(make([1.0])), [1.5], [3.0])
    assert cd.broadcast(models[1][0], ["cpu:0"])[0].tolist() == [2.0]
    assert cd.ReductionToOneDevice().reduce("sum", PerReplica([1.0, 2.0]), models[0][0]).tolist() == 3.0


def test_distributed_values_are_true_and_compare_by_identity_and_do_not_iterate():
    one, other = PerReplica([]), PerReplica([])
    assert one
    assert one == one
    assert one != other
    with pytest.raises(TypeError):
        iter(one)
    with pytest.raises(TypeError):
        len(one)
    with pytest.raises(TypeError):
        one + one


def test_a_per_replica_is_an_array_inside_a_replica_only():
    value = PerReplica([np.float32([1]), np.float32([2])])
    with pytest.raises(ConversionError, match="reduce or gather it"):
        np.asarray(value)
    with replica_scope(1):
        assert np.asarray(value) == [2]


OPERATIONS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lt", "le", "gt", "ge")


@pytest.mark.parametrize("operation", [getattr(operator, name) for name in OPERATIONS])
def test_a_mirrored_computes_as_its_component(operation):
    value = Mirrored([np.float64([3.0]), np.float64([3.0])])
    assert operation(value, 2.0) == operation(3.0, 2.0)
    assert operation(2.0, value) == operation(2.0, 3.0)
    assert operation(value, value) == operation(3.0, 3.0)


def test_a_mirrored_has_the_attributes_of_its_component():
    value = Mirrored([np.arange(4.0).reshape(2, 2)] * 2)
    assert value.shape == (2, 2)
    assert value.T[0, 1] == 2.0
    assert (-value)[1, 1] == -3.0
    assert abs(-value)[1, 1] == 3.0
    assert np.asarray(value).sum() == 6.0
    with pytest.raises(AttributeError):
        value.nothing_like_it.at_all()


def test_a_mirrored_is_the_running_replicas_component():
    value = Mirrored([np.float32([1]), np.float32([2])])
    assert value[0] == 1
    with replica_scope(1):
        assert value[0] == 2
        assert value + 1 == 3


@pytest.mark.parametrize("number", [0, 1, 0.0, np.float32(2), np.zeros(1), np.array(True), [], [0]])
def test_a_mirrored_is_as_true_as_its_component(number):
    assert bool(Mirrored([number, number])) is bool(number)


def test_an_array_of_several_elements_is_neither_true_nor_false():
    with pytest.raises(ValueError, match="ambiguous"):
        bool(Mirrored([np.zeros(2), np.zeros(2)]))


@pytest.mark.parametrize("given", [{"a": 1.0, "b": 2.0}, {1.0, 2.0}, "ab", b"ab"])
def test_components_come_in_a_list(given):
    for kind in (PerReplica, Mirrored):
        with pytest.raises(ConversionError, match=f"a {kind.__name__} takes a list of components"):
            kind(given)
    assert PerReplica([given]).values == (given,)


@pytest.mark.parametrize("shape", [(), 5, (2, -1), "ab", [None, 2]])
def test_slices_belong_to_an_array_with_rows(shape):
    with pytest.raises(ConversionError, match="dense_shape must be the shape of an array with rows"):
        IndexedSlices(np.zeros((1, 2)), np.array([0]), dense_shape=shape)


def test_float_of_a_mirrored_is_refused_as_in_tensorflow():
    with pytest.raises(TypeError):
        float(Mirrored([1.0, 1.0]))


def test_distributed_values_can_be_copied():
    value = copy.deepcopy(Mirrored([np.zeros(2), np.zeros(2)]))
    assert value.devices == (Device("cpu", 0), Device("cpu", 1))


def test_repr_shows_each_component_with_its_device():
    assert repr(PerReplica([1.0, 2.0])) == "PerReplica(\n  cpu:0: 1.0,\n  cpu:1: 2.0,\n)"


def test_a_variable_keeps_its_shape():
    variable = Variable(np.zeros(2), name="w")
    variable.assign_sub(np.ones(2))
    assert variable.value().tolist() == [-1, -1]
    with pytest.raises(ShapeMismatchError, match=r"variable 'w' has shape \(2,\)"):
        variable.assign(np.zeros(3))


def test_a_variable_takes_no_distributed_value():
    with pytest.raises(ConversionError, match="variable 'Variable' holds one array; got a PerReplica"):
        Variable(1.0).assign(PerReplica([1.0, 2.0]))


def test_indexed_slices_say_where_their_values_are():
    slices = IndexedSlices(np.zeros((2, 3), np.float32), np.array([0, 4]), dense_shape=[5, 3])
    assert slices.device == "cpu"
    assert slices.dense_shape == (5, 3)
    assert slices.dtype == np.float32
