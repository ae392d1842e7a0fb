"""One test for each defect of TensorFlow that crossdevice does not have (those of strategies aside)."""

from __future__ import annotations

import itertools
import logging
from typing import ClassVar

import numpy as np
import pytest
import torch

import crossdevice as cd
from conformance.oracle import NUMPY_DTYPES, elementwise, in_two_halves, left_to_right
from conformance.rows import ALGORITHM_ROWS, LOWERINGS, NUMPY, TORCH, components_of, placed, wild_arrays
from crossdevice.algorithms.registry import ALGORITHMS
from crossdevice.errors import DeviceError, MismatchError, ReduceOpError, ShapeMismatchError
from crossdevice.plans.builder import PlanBuilder
from crossdevice.plans.ledger import check_plan
from crossdevice.values.device import host_device
from crossdevice.values.options import PRECISIONS

each_algorithm = pytest.mark.parametrize("row", ALGORITHM_ROWS, ids=lambda row: row.name)
each_backend = pytest.mark.parametrize("backend", [NUMPY, TORCH], ids=lambda backend: backend.name)
FAST = {lowering: cd.CommunicationOptions(precision="fast", lowering=lowering) for lowering in LOWERINGS}


@pytest.mark.parametrize("count", range(1, 18))
def test_no_replica_is_lost_at_any_count(count):
    value = cd.PerReplica([np.float64([2.0**replica]) for replica in range(count)])
    for row, options in itertools.product(ALGORITHM_ROWS, FAST.values()):
        for component in components_of(row.make().reduce("sum", value, value, options)):
            assert component.tolist() == [2.0**count - 1], row.name


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_ledger_proves_that_every_replica_counts_once_at_odd_counts(name):
    for count in range(3, 16, 2):
        devices = [host_device(replica) for replica in range(count)]
        build = PlanBuilder(devices, num_elements=count + 1)
        check_plan(build.plan(ALGORITHMS.load(name)().plan_sum(build, devices)))


@each_algorithm
@pytest.mark.parametrize("op", ["mode", "", "SUMS", None, 0, cd.VariableAggregation.SUM])
def test_unknown_operations_are_refused_before_any_work_even_for_one_value(row, op):
    ops = row.make()
    uneven = cd.PerReplica([np.ones(2), np.ones(3)])
    for call in (ops.reduce, lambda op, value, target: ops.batch_reduce(op, [(value, target)])):
        with pytest.raises(ShapeMismatchError):
            call("sum", uneven, "cpu:0")  # so whoever looks at this value before the operation is found out
        for value in (uneven, cd.PerReplica([1.0, 2.0]), cd.PerReplica([1.0]), 1.0):
            with pytest.raises(ReduceOpError, match="expected one of SUM, MEAN"):
                call(op, value, "cpu:0")


@each_algorithm
def test_operations_are_accepted_as_strings_of_any_case_everywhere(row):
    ops, value = row.make(), cd.PerReplica([1.0, 4.0])
    for op, right in [("sum", 5), ("SUM", 5), ("Mean", 2.5), ("MIN", 1), ("max", 4), ("prod", 4)]:
        assert ops.reduce(op, value, "cpu:0") == right
        assert ops.batch_reduce(op, [(value, "cpu:0")]) == [right]
        assert cd.all_reduce([1.0, 4.0], op, algorithm=ops) == [right, right]
        assert cd.reduce([1.0, 4.0], op, algorithm=ops) == right


@each_algorithm
@each_backend
def test_the_dtype_of_a_mean_does_not_depend_on_the_number_of_replicas(row, backend):
    for dtype, mean_dtype in [("int32", "float64"), ("int64", "float64"), ("int8", "float32")]:
        for count in (1, 2, 3):
            value = backend.per_replica([np.array([3], dtype)] * count)
            for target in (value, "cpu:0", "cpu:5"):
                result = row.make().reduce("mean", value, target)
                batched = row.make().batch_reduce("mean", [(value, target)])[0]
                for component in (*components_of(result), *components_of(batched)):
                    assert backend.memory(component).dtype == mean_dtype
                    assert component.tolist() == [3.0]


@each_algorithm
def test_an_empty_batch_gives_an_empty_list(row):
    for nothing in ([], (), iter([]), {}, zip((), (), strict=True), (pair for pair in ())):
        assert row.make().batch_reduce("sum", nothing) == []


@each_algorithm
@each_backend
def test_a_batch_mixes_dtypes_and_checks_every_shape(row, backend):
    ops = row.make()
    dtypes = ("float32", "float64", "int32", "float16", "float32")
    values = [backend.per_replica([np.full(3, k, d), np.full(3, 2, d)]) for k, d in enumerate(dtypes)]
    for options in FAST.values():
        results = ops.batch_reduce("sum", [(value, value) for value in values], options)
        for number, (result, dtype) in enumerate(zip(results, dtypes, strict=True)):
            assert [component.tolist() for component in result.values] == [[number + 2] * 3] * 2
            assert backend.memory(result.values[0]).dtype == NUMPY_DTYPES[dtype]
    uneven = backend.per_replica([np.ones((2, 3)), np.ones((3, 2)), np.ones((2, 3))])
    with pytest.raises(ShapeMismatchError, match=r"replica 1 \(cpu:1\) has shape \(3, 2\); the other 2 have"):
        ops.batch_reduce("sum", [(values[0], values[0]), (uneven, uneven)])


@each_algorithm
@each_backend
def test_results_never_share_memory_with_inputs(row, backend):
    array = backend.make(np.float32([1, 2]))
    variable = cd.Variable(array)
    for value in (array, cd.PerReplica([array]), variable, cd.PerReplica([variable])):
        for op in ("sum", "mean", "max"):
            for result in (
                row.make().reduce(op, value, "cpu:0"),
                *row.make().batch_reduce(op, [(value, "cpu:0"), (value, value)]),
            ):
                assert result is not array
                assert not np.shares_memory(backend.memory(result), backend.memory(array))


@each_algorithm
@each_backend
@pytest.mark.parametrize("name", ["cuda:99", "/gpu:99", "/job:worker/device:CPU:0", "cpu:-1", "/task:3"])
def test_devices_that_do_not_exist_are_named_with_those_that_do(row, backend, name):
    ops, value = row.make(), backend.per_replica([np.float32([1]), np.float32([2])])
    for call in (
        lambda: ops.reduce("sum", value, name),
        lambda: ops.batch_reduce("sum", [(value, value), (value, name)]),
        lambda: ops.broadcast(value.values[0], name),
        lambda: ops.gather(value, name),
    ):
        with pytest.raises(DeviceError) as caught:
            call()
        assert str(cd.Device.parse(name)) in str(caught.value)
        assert "cpu:0, cpu:1, ..." in str(caught.value)


@each_backend
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_device_to_reduce_on_that_does_not_exist_is_named(backend, lowering):
    ops = cd.ReductionToOneDevice(reduce_to_device="cuda:99")
    value = backend.per_replica([np.float32([1]), np.float32([2])])
    with pytest.raises(DeviceError, match="cuda:99"):
        ops.reduce("sum", value, "cpu:0", cd.CommunicationOptions(lowering=lowering))


@each_algorithm
def test_host_devices_exist_for_any_number(row):
    result = row.make().reduce("sum", cd.PerReplica([1.0, 2.0]), placed("cpu:123456", "cpu:0"))
    assert result.devices == (cd.Device("cpu", 123456), cd.Device("cpu", 0))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_single_and_batch_reductions_run_the_chosen_algorithm(name):
    chosen = ALGORITHMS.load(name)

    class Watched(chosen):
        planned: ClassVar[list] = []

        def plan_sum(self, build, destinations):
            self.planned.append(build)
            return super().plan_sum(build, destinations)

    for lowering, precision in itertools.product(LOWERINGS, PRECISIONS):
        options = cd.CommunicationOptions(lowering=lowering, precision=precision)
        value = cd.PerReplica([np.float32([1, 2]), np.float32([3, 4])])
        single = Watched().reduce("sum", value, value, options)
        assert Watched.planned
        Watched.planned.clear()
        (batched,) = Watched().batch_reduce("sum", [(value, value)], options)
        assert Watched.planned
        Watched.planned.clear()
        assert [c.tolist() for c in single.values] == [c.tolist() for c in batched.values] == [[4, 6]] * 2


@pytest.mark.parametrize("make", [cd.NcclAllReduce, cd.AllReduceCrossDeviceOps], ids=lambda m: m.__name__)
def test_nccl_without_gpus_falls_back_and_says_why_in_the_log_and_in_explain(make, caplog):
    ops, value = make(), cd.PerReplica([np.float32([1]), np.float32([2])])
    with caplog.at_level(logging.WARNING, logger="crossdevice"):
        for _ in range(3):
            assert ops.reduce("sum", value, "cpu:0").tolist() == [3]
            assert ops.batch_reduce("sum", [(value, "cpu:0")])[0].tolist() == [3]
    reason = "NCCL works on GPUs only, and values are on cpu:0, cpu:1"
    assert len(caplog.records) == 1
    assert reason in caplog.text
    assert reason in ops.explain(value, value)


@each_algorithm
def test_an_error_leaves_the_next_call_and_other_objects_usable(row):
    ops, value = row.make(), cd.PerReplica([np.float32([1, 2]), np.float32([3, 4])])
    for _ in range(2):
        with pytest.raises(MismatchError):
            ops.reduce("sum", cd.PerReplica([np.float32([1, 2]), np.float32([3])]), "cpu:0")
        with pytest.raises(DeviceError):
            ops.reduce("sum", value, "cuda:99")
        for each in (ops, row.make(), row.make()):
            assert each.reduce("sum", value, "cpu:0").tolist() == [4, 6]
            other = cd.PerReplica([np.zeros((3, 3)), np.ones((3, 3))])
            assert each.reduce("sum", other, other).values[1].tolist() == np.ones((3, 3)).tolist()


@each_algorithm
@each_backend
def test_values_without_elements_are_reduced(row, backend):
    for count, lowering in itertools.product((1, 2, 5), LOWERINGS):
        value = backend.per_replica([np.zeros((0, 3), np.float32)] * count)
        options = cd.CommunicationOptions(lowering=lowering)
        for result in (
            row.make().reduce("mean", value, value, options),
            row.make().batch_reduce("mean", [(value, value), (value, "cpu:0")], options)[0],
        ):
            assert all(tuple(component.shape) == (0, 3) for component in components_of(result))


@each_algorithm
def test_dense_shapes_that_disagree_are_named(row):
    def slices(dense_shape):
        return cd.IndexedSlices(np.ones((1, 2)), np.array([0]), dense_shape)

    value = cd.PerReplica([slices((4, 2)), slices((5, 2)), slices(None), slices((4, 2))])
    with pytest.raises(ShapeMismatchError, match=r"replica 1 \(cpu:1\) has dense_shape \(5, 2\)"):
        row.make().reduce("sum", value, "cpu:0")


@each_backend
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_narrow_floats_round_once_by_default_and_like_tensorflow_when_fast(backend, lowering):
    for dtype, count in itertools.product(("float16", "bfloat16"), (3, 4, 8)):
        arrays = wild_arrays(dtype, count, 32, seed=6)
        value = backend.per_replica(arrays)
        for op, divisor in (("sum", None), ("mean", count)):
            default = cd.ReductionToOneDevice().reduce(op, value, "cpu:0")
            fast = cd.ReductionToOneDevice().reduce(op, value, "cpu:0", FAST[lowering])
            halves = cd.HierarchicalCopyAllReduce().reduce(op, value, value, FAST[lowering]).values[-1]
            sequential = elementwise(left_to_right, arrays, dtype, divisor)
            assert backend.bits(fast) == backend.bits(backend.make(sequential))
            in_halves = elementwise(in_two_halves, arrays, dtype, divisor)
            assert backend.bits(halves) == backend.bits(backend.make(in_halves))
            true = sum(array.astype(np.float64) for array in arrays) / (divisor or 1)
            errors = [
                np.abs(backend.memory(result).astype(np.float64) - true).sum() for result in (default, fast)
            ]
            assert errors[0] < errors[1]


@each_algorithm
@each_backend
def test_minimum_maximum_and_product_are_operations_too(row, backend):
    value = backend.per_replica([np.float32([1, -2, 3]), np.float32([4, 5, -6]), np.float32([2, 2, 2])])
    for op, right in [("min", [1, -2, -6]), ("max", [4, 5, 3]), ("prod", [8, -20, -36])]:
        for component in row.make().reduce(op, value, value).values:
            assert component.tolist() == right


@each_backend
def test_an_accumulation_function_serves_for_all_other_operations(backend):
    seen = []

    def second_largest(components):
        seen.append(components)
        rows = np.stack([backend.memory(component) for component in components])
        return backend.make(np.sort(rows, axis=0)[-2])

    ops = cd.ReductionToOneDevice(accumulation_fn=second_largest)
    arrays = [np.float32([1, 20]), np.float32([4, 5]), np.float32([2, 8])]
    value = backend.per_replica(arrays)
    assert ops.reduce("sum", value, "cpu:0").tolist() == [2, 8]
    assert [c.tolist() for c in ops.reduce("mean", value, value).values] == [
        (np.float32([2, 8]) / np.float32(3)).tolist()
    ] * 3
    assert all(type(components) is tuple and len(components) == 3 for components in seen)
    assert [array.tolist() for array in value.values] == [array.tolist() for array in arrays]


@each_algorithm
@each_backend
def test_gather_is_public_and_takes_uneven_first_dimensions(row, backend):
    value = backend.per_replica([np.float32([[1, 2]]), np.float32([[3, 4], [5, 6]]), np.zeros((0, 2), "f")])
    for component in row.make().gather(value, value).values:
        assert component.tolist() == [[1, 2], [3, 4], [5, 6]]


def test_a_tensor_and_an_array_may_share_a_batch():
    values = [cd.PerReplica([np.float32([1]), np.float32([2])]), cd.PerReplica([torch.ones(1)] * 2)]
    results = cd.RingAllReduce().batch_reduce("sum", [(value, "cpu:0") for value in values])
    assert [type(result) for result in results] == [np.ndarray, torch.Tensor]
