"""What our documents say about TensorFlow is what the installed TensorFlow does."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
import weakref

import numpy as np
import pytest

from parity import libraries

tf = pytest.importorskip("tensorflow")

pytestmark = pytest.mark.more("TensorFlow")

SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


@pytest.fixture(scope="module")
def d():
    return libraries.tensorflow()


@pytest.fixture(scope="module")
def two(d):
    return d.MirroredStrategy(["/cpu:0", "/cpu:1"])


def parts(value):
    return [part.numpy().tolist() for part in value.values]


def test_there_are_two_operations():
    assert [op.name for op in tf.distribute.ReduceOp] == ["SUM", "MEAN"]


def test_all_reduce_classes_sum_whatever_operation_they_do_not_know(d):
    value = d.per_replica([d.array([1.0]), d.array([3.0])])
    for op in ("MEAN", "mode"):
        assert parts(d.HierarchicalCopyAllReduce().batch_reduce(op, [(value, value)])[0]) == [[4], [4]]


def test_hierarchical_copy_leaves_out_the_last_of_three_in_batches_and_runs_something_else_in_reduce(d):
    value = d.per_replica([d.array(number) for number in (1.0, 2.0, 4.0)])
    ops = d.HierarchicalCopyAllReduce()
    assert parts(ops.batch_reduce(SUM, [(value, value)])[0]) == [3, 3, 3]
    assert parts(ops.reduce(SUM, value, value)) == [7, 7, 7]


def test_all_reduce_classes_keep_the_order_of_the_value(d):
    value = d.per_replica([d.array([1.0]), d.array([3.0])])
    (result,) = d.HierarchicalCopyAllReduce().batch_reduce(SUM, [(value, d.placed(1, 0))])
    assert d.devices_of(result) == ["cpu:0", "cpu:1"]


def test_one_device_takes_the_order_of_the_destinations(d):
    value = d.per_replica([d.array([1.0]), d.array([3.0])])
    assert d.devices_of(d.ReductionToOneDevice().reduce(SUM, value, d.placed(1, 0))) == ["cpu:1", "cpu:0"]


def test_all_reduce_classes_fall_back_to_one_device_where_devices_differ(d):
    value = d.per_replica([d.array(number) for number in (1.0, 2.0, 4.0)])
    ops = d.HierarchicalCopyAllReduce()  # whose own algorithm leaves out the last of three
    assert parts(ops.batch_reduce(SUM, [(value, d.placed(0, 1))])[0]) == [7, 7]


def test_one_object_of_all_replicas_is_returned_bare_and_so_are_small_numbers(d, two):
    constant = d.array([1.0])
    assert two.run(lambda: constant) is constant
    assert two.run(lambda: int("7")) == 7
    assert two.run(lambda: int("1000")).values == (1000, 1000)


def test_tensors_are_immutable_and_know_their_host_device(d):
    tensor = d.array([1.0, 2.0])
    with pytest.raises(TypeError):
        tensor[0] = 3.0
    with tf.device("/cpu:1"):
        assert tf.identity(tensor).device.endswith("CPU:1")


def test_memory_in_use_is_copied_before_it_is_written_to(d):
    tensor = tf.zeros(1 << 16)
    with tf.device("/cpu:1"):
        shared = tf.identity(tensor)
    assert np.shares_memory(np.from_dlpack(tensor), np.from_dlpack(shared))
    variable = tf.Variable(shared)
    variable.assign_add(tf.ones(1 << 16))
    assert not shared.numpy().any()
    assert variable.numpy().all()


def test_adopted_memory_is_held_until_the_last_tensor_is_gone(d):
    array = np.zeros(1 << 16, np.float32)
    alive = weakref.ref(array)
    tensor = tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    part = tf.identity(tensor)
    del array, tensor
    assert alive() is not None
    del part
    gc.collect()
    assert alive() is None


def test_nccl_fails_in_batches_on_cpus(d):
    value = d.per_replica([d.array([1.0]), d.array([3.0])])
    assert parts(d.NcclAllReduce().reduce(SUM, value, value)) == [[4], [4]]
    with pytest.raises(tf.errors.InvalidArgumentError):
        d.NcclAllReduce().batch_reduce(SUM, [(value, value)])


def test_the_dtype_of_a_mean_depends_on_the_number_of_replicas(d):
    found = []
    for count in (1, 2):
        value = d.per_replica([d.array([3], "int32")] * count)
        result = d.ReductionToOneDevice().batch_reduce(MEAN, [(value, value)])[0]
        found.append((result.values[0] if count > 1 else result).dtype.name)
    assert found == ["int32", "float64"]


def test_empty_batches_fail_and_for_strategies_generators_too(d, two):
    value = d.per_replica([d.array([1.0]), d.array([3.0])])
    with pytest.raises(IndexError):
        d.ReductionToOneDevice().batch_reduce(SUM, [])
    with pytest.raises(AttributeError):
        two.extended.batch_reduce_to("SUM", [])
    with pytest.raises(IndexError):
        two.extended.batch_reduce_to("SUM", ((value, value) for _ in range(2)))


def test_strategies_do_not_always_ask_the_object_they_were_given(d):
    asked = []

    class Recording(tf.distribute.ReductionToOneDevice):
        def reduce_implementation(self, *arguments, **named):
            asked.append("reduce")
            return super().reduce_implementation(*arguments, **named)

        def batch_reduce_implementation(self, *arguments, **named):
            asked.append("batch_reduce")
            return super().batch_reduce_implementation(*arguments, **named)

    def questions(call):
        asked.clear()
        call()
        return bool(asked)

    strategy = d.MirroredStrategy(["/cpu:0", "/cpu:1"], Recording())
    alone = d.MirroredStrategy(["/cpu:0"], Recording())
    value = d.per_replica([d.array([1.0]), d.array([3.0])])
    integers = d.per_replica([d.array([1], "int32"), d.array([3], "int32")])
    constant, context = d.array([1.0]), tf.distribute.get_replica_context
    own = lambda: d.array([float(context().replica_id_in_sync_group)])  # noqa: E731
    assert questions(lambda: strategy.run(lambda: context().all_reduce("SUM", own())))
    assert questions(lambda: strategy.extended.batch_reduce_to("SUM", [(value, value)]))
    assert not questions(lambda: strategy.extended.reduce_to("SUM", value, value))
    assert not questions(lambda: strategy.reduce("SUM", value, axis=None))
    assert not questions(lambda: strategy.extended.batch_reduce_to("SUM", [(integers, integers)]))
    assert not questions(lambda: strategy.run(lambda: context().all_reduce("SUM", constant)))
    assert not questions(lambda: alone.run(lambda: context().all_reduce("SUM", own())))


def test_replicas_run_one_after_another(two):
    running, most = set(), []

    def step():
        number = int(tf.distribute.get_replica_context().replica_id_in_sync_group)
        running.add(number)
        most.append(len(running))
        time.sleep(0.05)
        running.discard(number)

    two.run(step)
    assert most == [1, 1]


def test_packs_cannot_mix_dtypes_and_compare_the_number_of_elements_only(d):
    values = [d.per_replica([d.array([1], dtype), d.array([2], dtype)]) for dtype in ("float32", "float64")]
    with pytest.raises(tf.errors.InvalidArgumentError):
        d.HierarchicalCopyAllReduce().batch_reduce(SUM, [(value, value) for value in values])
    uneven = d.per_replica([d.array([[1.0, 2.0]]), d.array([[1.0], [2.0]])])
    assert d.HierarchicalCopyAllReduce().batch_reduce(SUM, [(uneven, uneven)])


def test_a_batch_of_one_value_of_one_replica_is_the_input_itself(d):
    array = d.array([1.0])
    assert d.ReductionToOneDevice().batch_reduce(SUM, [(array, "/cpu:0")])[0] is array


def test_all_reduce_has_a_gradient(d, two):
    def step():
        x = tf.constant(2.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.distribute.get_replica_context().all_reduce("SUM", x * 3.0)
        return tape.gradient(total, x)

    assert parts(two.run(step)) == [6, 6]


def test_work_on_devices_that_do_not_exist_is_done_on_the_first_cpu(d):
    value = d.per_replica([d.array([1.0]), d.array([3.0])])
    assert d.ReductionToOneDevice().reduce(SUM, value, "/gpu:0").device.endswith("CPU:0")


def test_slices_take_the_first_dense_shape(d):
    def rows(height):
        shape = d.array([height, 1], "int64")
        return d.IndexedSlices(d.array([[1.0]]), d.array([2], "int64"), shape)

    result = d.ReductionToOneDevice().reduce(SUM, d.per_replica([rows(4), rows(9)]), "/cpu:0")
    assert result.dense_shape.numpy().tolist() == [4, 1]


def test_sums_of_narrow_floats_are_rounded_after_every_addition(d):
    halves = d.per_replica([d.array([2048.0 if k == 0 else 1.0], "float16") for k in range(8)])
    assert d.ReductionToOneDevice().reduce(SUM, halves, "/cpu:0").numpy().tolist() == [2048]


def test_only_the_methods_of_strategies_take_structures(d, two):
    value = {"a": d.per_replica([d.array([1.0]), d.array([3.0])])}
    assert two.extended.reduce_to("SUM", value, "/cpu:0")["a"].numpy().tolist() == [4]
    with pytest.raises((ValueError, AttributeError, AssertionError, TypeError)):
        d.ReductionToOneDevice().reduce(SUM, value, "/cpu:0")


def test_python_numbers_are_int32_or_float32_and_int64_where_they_must():
    assert [tf.constant(x).dtype.name for x in (1, 0.5, 2**40)] == ["int32", "float32", "int64"]


def test_cpu_kernels_flush_subnormal_numbers_but_those_of_float16(d):
    def total(number, dtype):
        value = d.per_replica([d.array([number], dtype)] * 2)
        return d.ReductionToOneDevice().reduce(SUM, value, "/cpu:0").numpy()[0]

    assert total(1e-40, "float32") == 0
    assert total(1e-310, "float64") == 0
    assert total(6e-8, "float16") > 0


def test_a_complex_mean_with_an_infinite_part_makes_the_finite_one_not_a_number(d):
    value = d.per_replica([d.array([complex(np.inf, 1)], "complex64")] * 2)
    mean = d.ReductionToOneDevice().reduce(MEAN, value, "/cpu:0").numpy()[0]
    assert np.isnan(mean.imag)


def test_the_sign_of_a_zero_can_be_lost_in_a_complex_mean(d):
    lost = 0
    for number in (complex(-0.0, 1.0), complex(1.0, -0.0), complex(-0.0, -0.0), complex(-1.0, -0.0)):
        value = d.per_replica([d.array([number], "complex64")] * 2)
        mean = d.ReductionToOneDevice().reduce(MEAN, value, "/cpu:0").numpy()[0]
        lost += (np.signbit(mean.real), np.signbit(mean.imag)) != (
            np.signbit(number.real),
            np.signbit(number.imag),
        )
    assert lost


def test_ten_replicas_are_added_in_groups_of_eight(d):
    numbers = [2.0**24] + [1.0] * 9
    value = d.per_replica([d.array([number]) for number in numbers])
    total = d.ReductionToOneDevice().reduce(SUM, value, "/cpu:0").numpy()[0]
    one_by_one = np.float32(0)
    for number in numbers:
        one_by_one = np.float32(one_by_one + np.float32(number))
    assert total != one_by_one


def test_options_are_neither_equal_nor_instances_of_their_class():
    kind = tf.distribute.experimental.CommunicationOptions
    assert kind(bytes_per_pack=1) != kind(bytes_per_pack=1)
    assert not isinstance(kind(), kind)


IN_ITS_OWN_PROCESS = """
import tensorflow as tf

host = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(host, [tf.config.LogicalDeviceConfiguration()] * 4)
strategy = tf.distribute.MirroredStrategy()
ops = strategy.extended._cross_device_ops
num_hosts = len(tf.config.list_physical_devices("CPU"))
print(num_hosts, strategy.num_replicas_in_sync, type(ops).__name__, ops._options.implementation.name)


def step(shapes):
    context = tf.distribute.get_replica_context()
    return context.all_reduce("SUM", tf.ones(shapes[int(context.replica_id_in_sync_group)]))


for shapes in ((2, 2, 2, 2), (2, 3, 2, 2), (2, 2, 2, 2)):
    try:
        strategy.run(step, args=(shapes,))
        print("fine")
    except Exception as error:
        print("failed")
"""


def test_mirrored_strategies_take_all_cpus_and_sum_by_a_ring_of_which_one_failure_fails_all_that_follow():
    done = subprocess.run(
        [sys.executable, "-c", IN_ITS_OWN_PROCESS], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout.split() == ["1", "4", "CollectiveAllReduce", "RING", "fine", "failed", "failed"], (
        done.stderr
    )
