"""Gather concatenates in replica order, broadcast copies; both into new memory on every destination."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import crossdevice as cd
from conformance.oracle import NUMPY_DTYPES
from conformance.rows import (
    ALGORITHM_ROWS,
    COUNTS,
    INSTALLED_ROWS,
    components_of,
    each_algorithm,
    each_backend,
    placed,
    plain_arrays,
)
from conformance.test_law_destinations import destinations


def check_copies(result, right, backend, inputs, devices):
    components = components_of(result)
    assert len(components) == len(devices)
    assert type(result) is (cd.Mirrored if len(devices) > 1 else backend.array_type)
    if len(devices) > 1:
        assert result.devices == devices
    assert {backend.bits(component) for component in components} == {backend.bits(backend.make(right))}
    assert backend.keeps_apart(components, inputs)


@each_backend("gather")
@each_algorithm("gather")
def test_gather_concatenates_all_dtypes_in_replica_order(row, backend):
    ops = row.make()
    for dtype, count in backend.product(backend.dtypes, COUNTS):
        arrays = [array[: 3 + replica % 4] for replica, array in enumerate(plain_arrays(dtype, count))]
        value = backend.per_replica(arrays)
        before = [backend.bits(array) for array in value.values]
        result = ops.gather(value, value)
        check_copies(result, np.concatenate(arrays), backend, value.values, value.devices)
        assert [backend.bits(array) for array in value.values] == before


@each_backend("gather")
@each_algorithm("gather")
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_gather_takes_any_axis_in_which_replicas_may_differ(row, backend, axis):
    ops = row.make()
    arrays = []
    for length in (2, 0, 1, 4):
        shape = [3, 2, 5]
        shape[axis] = length
        arrays.append(np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + length)
    value = backend.per_replica(arrays)
    result = ops.gather(value, placed("cpu:0", "cpu:9"), axis)
    devices = placed("cpu:0", "cpu:9").devices
    check_copies(result, np.concatenate(arrays, axis), backend, value.values, devices)
    named = ops.gather(value, destinations="cpu:1", axis=axis)
    check_copies(named, np.concatenate(arrays, axis), backend, value.values, devices[:1])


@each_backend("gather")
@each_algorithm("gather")
def test_gather_goes_to_any_destinations(row, backend):
    ops = row.make()
    arrays = [np.float32([[1, 2]]), np.float32([[3, 4], [5, 6]])]
    for layout in (None, ["cpu:3", "cpu:3"]):
        value = backend.per_replica(arrays, layout)
        for target, devices in destinations():
            result = ops.gather(value, target)
            check_copies(result, np.concatenate(arrays), backend, value.values, devices)


@each_backend("gather")
def test_the_function_gather_takes_lists_of_values_and_of_devices(backend):
    arrays = backend.arrays([np.float32([1]), np.float32([2, 3])])
    assert backend.lists(cd.gather(arrays)) == [1, 2, 3]
    assert [backend.lists(each) for each in cd.gather(arrays, ["cpu:2", "cpu:0"])] == [[1, 2, 3]] * 2


@each_backend("broadcast")
@each_algorithm("broadcast")
def test_broadcast_copies_all_dtypes_to_any_destinations(row, backend):
    ops = row.make()
    for dtype, (target, devices) in backend.product(backend.dtypes, destinations()):
        source = backend.make(plain_arrays(dtype, 1)[0])
        before = backend.bits(source)
        result = ops.broadcast(source, target)
        check_copies(result, backend.memory(source), backend, [source], devices)
        assert backend.bits(source) == before


@each_backend("broadcast")
@each_algorithm("broadcast")
def test_broadcast_keeps_every_shape(row, backend):
    ops = row.make()
    for shape in [(), (0,), (0, 3), (2, 3)]:
        source = backend.make(np.ones(shape, np.float32))
        result = ops.broadcast(source, placed("cpu:0", "cpu:1"))
        check_copies(result, np.ones(shape, np.float32), backend, [source], result.devices)


@each_algorithm("broadcast")
def test_broadcast_reads_numbers_lists_variables_and_mirrored_values(row):
    ops = row.make()
    held = np.float32([1, 2])
    for source, right in [
        (2.5, np.float32(2.5)),
        (3, np.int32(3)),
        ([1, 2], np.int32([1, 2])),
        (cd.Variable(held), held),
        (cd.Mirrored([held, held]), held),
    ]:
        for component in ops.broadcast(source, placed("cpu:0", "cpu:1")).values:
            assert (component.dtype, component.tolist()) == (right.dtype, right.tolist())
            assert not np.shares_memory(component, held)


@each_backend("broadcast")
@each_algorithm("broadcast")
def test_broadcast_copies_the_parts_of_indexed_slices(row, backend):
    ops = row.make()
    for dense_shape in (None, (5, 2)):
        rows, indices = backend.make(np.float32([[1, 2]])), backend.make(np.int64([3]))
        result = ops.broadcast(cd.IndexedSlices(rows, indices, dense_shape), placed("cpu:0", "cpu:1"))
        for slices in result.values:
            assert (backend.lists(slices.values), backend.lists(slices.indices)) == ([[1, 2]], [3])
            assert slices.dense_shape == dense_shape
            assert backend.keeps_apart([slices.values, slices.indices], [rows, indices])


def test_what_is_made_of_parameters_has_gradients():
    for row in ALGORITHM_ROWS:
        ops = row.make()
        if ops.accumulation_fn is not None or ops._hooks.reduces:
            continue  # nobody knows the derivative of a function of the user's
        parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        value = cd.PerReplica(parameters)
        for result in (
            row.make().broadcast(parameters[0], placed("cpu:0", "cpu:1")),
            row.make().gather(value, value),
            row.make().reduce("sum", value, value),
        ):
            sum(component.sum() for component in result.values).backward()
        assert [parameter.grad.tolist() for parameter in parameters] == [[6, 6], [4, 4]], row.name


def test_values_that_cannot_be_added_can_still_be_copied():
    for row, backend in itertools.product(ALGORITHM_ROWS, INSTALLED_ROWS):
        flags = [np.array([True, False]), np.array([True])]
        value = backend.per_replica(flags)
        assert backend.lists(row.make().gather(value, "cpu:0")) == [True, False, True]
        assert backend.lists(row.make().broadcast(value.values[0], "cpu:0")) == [True, False]


def test_gathered_and_broadcast_numbers_of_other_byte_order_mean_the_same():
    for row in ALGORITHM_ROWS:
        value = cd.PerReplica([np.array([1, 2], ">f4"), np.array([3], ">f4")])
        for result in (row.make().gather(value, "cpu:0"), row.make().broadcast(value.values[0], "cpu:0")):
            assert result.tolist() in ([1, 2, 3], [1, 2])
            assert NUMPY_DTYPES["float32"].name == result.dtype.name
