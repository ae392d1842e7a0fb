"""TensorFlow's own operations, options, distributed values and variables are understood where ours are."""

from __future__ import annotations

import pytest

import crossdevice as cd
from crossdevice.errors import ConversionError, OptionError, ReduceOpError
from crossdevice.integrations import legacy
from crossdevice.values.options import as_options
from parity import libraries

tf = pytest.importorskip("tensorflow")

pytestmark = pytest.mark.more("TensorFlow")


@pytest.fixture(scope="module")
def theirs():
    return libraries.tensorflow()


@pytest.fixture
def value(theirs):
    return theirs.per_replica([theirs.array([1.0]), theirs.array([3.0])])


@pytest.fixture
def variable(theirs):
    with theirs.MirroredStrategy(["/cpu:0", "/cpu:1"]).scope():
        return tf.Variable([5.0])


@pytest.mark.parametrize("op", [tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN], ids=str)
def test_operations(op, value):
    assert cd.ReduceOp(op).name == op.name
    right = [4.0] if op.name == "SUM" else [2.0]
    assert cd.RingAllReduce().reduce(op, value, "cpu:0").numpy().tolist() == right


def test_settings_of_variables():
    variable = cd.MirroredStrategy(["cpu:0", "cpu:1"]).create_variable(
        1.0,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
        dtype=tf.float64,
    )
    assert isinstance(variable, cd.SyncOnReadVariable)
    assert (variable.aggregation, str(variable.dtype)) == (cd.VariableAggregation.SUM, "float64")
    with pytest.raises(ReduceOpError):
        cd.ReduceOp(tf.VariableAggregation.SUM)


@pytest.mark.parametrize("kind", [tf.VariableAggregation, tf.compat.v1.VariableAggregation])
def test_towers_take_aggregations_and_distributed_values(kind, value):
    towers = legacy.ReductionToOneDeviceCrossTowerOps()
    for aggregation, right in ((kind.SUM, [4.0]), (kind.MEAN, [2.0])):
        reduced = towers.reduce(aggregation, value, value)
        assert [array.numpy().tolist() for array in reduced.values] == [right] * 2
        (reduced,) = towers.batch_reduce(aggregation, [(value, "/cpu:1")])
        assert [array.numpy().tolist() for array in reduced.values] == [right]
    for wrong in (kind.NONE, kind.ONLY_FIRST_REPLICA):
        with pytest.raises(ReduceOpError, match="stands for no reduce operation"):
            towers.reduce(wrong, value, "/cpu:0")


def test_algorithms_are_not_those_of_tensorflow():
    with pytest.raises(OptionError, match=r"got TensorFlow's HierarchicalCopyAllReduce; take that of cross"):
        cd.MirroredStrategy(["cpu:0"], cross_device_ops=tf.distribute.HierarchicalCopyAllReduce())


def test_options_of_inputs_that_would_change_batches_are_refused():
    strategy = cd.MirroredStrategy(["cpu:0", "cpu:1"])
    fetched = tf.distribute.InputOptions(experimental_fetch_to_device=False)
    assert len(list(strategy.distribute_datasets_from_function(lambda _: [[1.0], [2.0]], fetched))) == 1
    modes = tf.distribute.InputReplicationMode
    each = tf.distribute.InputOptions(experimental_replication_mode=modes.PER_REPLICA)
    for distribute in (
        strategy.experimental_distribute_dataset,
        strategy.distribute_datasets_from_function,
        strategy.experimental_distribute_datasets_from_function,
    ):
        with pytest.raises(OptionError, match="PER_REPLICA; expected PER_WORKER"):
            distribute(lambda _: [], each)


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_reductions_along_an_axis_are_on_the_first_host_device(op):
    strategy = cd.MirroredStrategy(["cpu:0", "cpu:1"])
    with tf.device("/cpu:1"):
        for dtype in (tf.float32, tf.float16, tf.int32):
            value = cd.PerReplica([tf.ones(2, dtype)] * 2)
            assert strategy.reduce(op, value, axis=0).device.endswith("CPU:0")


def test_options(value):
    kinds = tf.distribute.experimental.CommunicationImplementation
    given = tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=8, timeout_seconds=2.0, implementation=kinds.RING
    )
    assert cd.RingAllReduce().reduce("sum", value, value, given).values[1].numpy().tolist() == [4]
    assert cd.CommunicationOptions(8, 2.0, "RING") == as_options(given)


def test_distributed_values_are_values_and_destinations(value, variable):
    ops = cd.ReductionToOneDevice()
    for where in (value, variable):
        result = ops.reduce("sum", value, where)
        assert isinstance(result, cd.Mirrored)
        assert [str(device) for device in result.devices] == ["cpu:0", "cpu:1"]
        assert [part.numpy().tolist() for part in result.values] == [[4], [4]]
    (batched,) = ops.batch_reduce("sum", [(value, variable)])
    assert len(batched.values) == 2
    assert ops.reduce("sum", variable, "cpu:0").numpy().tolist() == [10]
    assert ops.gather(value, "cpu:0").numpy().tolist() == [1, 3]
    assert len(ops.broadcast(value.values[0], variable).values) == 2
    with pytest.raises(ConversionError, match="PerReplica"):
        ops.broadcast(value, "cpu:0")
    with pytest.raises(ConversionError, match="do not nest"):
        ops.reduce("sum", {"a": variable}, "cpu:0")


def test_tensors_in_our_variables_stay_on_their_devices(theirs):
    strategy = cd.MirroredStrategy(["cpu:0", "cpu:1"])
    ours = strategy.create_variable(theirs.array([1.0]))
    ours.assign_add(theirs.array([1.0]))
    strategy.run(lambda: ours.assign_sub(theirs.array([1.0])))
    assert [copy.operand().device[-5:] for copy in ours.values] == ["CPU:0", "CPU:1"]
    assert [copy.numpy().tolist() for copy in ours.values] == [[1], [1]]
    assert cd.RingAllReduce().reduce("sum", ours, "cpu:0").numpy().tolist() == [2]


def test_strategies_take_them_apart(value, variable):
    strategy = cd.MirroredStrategy(["cpu:0", "cpu:1"])
    doubled = strategy.run(lambda x: x * 2.0, args=(value,))
    assert [part.numpy().tolist() for part in doubled.values] == [[2], [6]]
    assert strategy.reduce("sum", {"a": value}, axis=None)["a"].numpy().tolist() == [4]
    assert float(strategy.reduce("mean", value, axis=0)) == 2
    assert strategy.gather(value, axis=0).numpy().tolist() == [1, 3]
    assert len(strategy.experimental_local_results(value)) == 2
    assert strategy.extended.reduce_to("mean", value, "cpu:0").numpy().tolist() == [2]
    with pytest.raises(ReduceOpError, match="same value on every replica"):
        strategy.extended.reduce_to("sum", variable, "cpu:0")


def test_calls_inside_a_tf_function_are_refused_and_do_not_wait_for_ever():
    strategy = cd.MirroredStrategy(["cpu:0", "cpu:1"])

    def step():
        return cd.get_replica_context().all_reduce("sum", tf.constant([1.0]))

    for call, name in (
        (lambda: strategy.run(tf.function(step)), "all_reduce"),
        (tf.function(lambda: strategy.run(step)), "run"),
    ):
        with pytest.raises(Exception, match=f"{name} was called inside a tf.function"):
            call()
    assert [value.numpy().tolist() for value in strategy.run(step).values] == [[2.0], [2.0]]
