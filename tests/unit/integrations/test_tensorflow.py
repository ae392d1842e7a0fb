"""Any algorithm inside the real tf.distribute: eager, in graphs, dense, sparse, in packs, at odd counts."""

import os
import subprocess
import sys

import numpy as np
import pytest

import crossdevice as cd
from conformance import array_libraries
from conformance.rows import ALGORITHM_ROWS, OnlyReduces
from crossdevice.errors import OptionError, ReduceOpError, ShapeMismatchError

tf = pytest.importorskip("tensorflow")
from tensorflow.python.distribute.values import PerReplica  # noqa: E402 - TensorFlow does not export it

from crossdevice.integrations.tensorflow import as_tensorflow  # noqa: E402 - imports TensorFlow

pytestmark = pytest.mark.more("TensorFlow")

ROWS = [row for row in ALGORITHM_ROWS if row.name != "users_own"]
each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
each_mode = pytest.mark.parametrize("mode", ["eager", "graph"])
each_count = pytest.mark.parametrize("count", [2, 3, 4])


@pytest.fixture(autouse=True)
def _devices():
    array_libraries.tensorflow_devices()


def strategy_of(count, ops):
    return tf.distribute.MirroredStrategy([f"/cpu:{k}" for k in range(count)], cross_device_ops=ops)


def run(mode, function):
    return function() if mode == "eager" else tf.function(function, autograph=False)()


def numbers(count, size=5):
    return [np.linspace(k, k + 1, size, dtype=np.float32) / 3 for k in range(count)]


@each_row
@each_mode
@each_count
def test_all_reduce_inside_a_strategy_gives_our_bits(row, mode, count):
    strategy = strategy_of(count, as_tensorflow(row.make()))
    arrays = numbers(count)

    def replica():
        context = tf.distribute.get_replica_context()
        number = context.replica_id_in_sync_group
        own = tf.gather(tf.constant(np.stack(arrays)), number)
        return context.all_reduce("sum", [own, own * 2]), context.all_reduce("mean", own)

    (total, twice), mean = run(mode, lambda: strategy.run(replica))
    right = cd.reduce(arrays, "sum"), cd.reduce([2 * a for a in arrays], "sum"), cd.reduce(arrays, "mean")
    for found, expected in zip((total, twice, mean), right, strict=True):
        for component in strategy.experimental_local_results(found):
            assert np.asarray(component).tobytes() == expected.tobytes()


def per_replica(arrays):
    return PerReplica([array_libraries.tensorflow_tensor(array, k) for k, array in enumerate(arrays)])


@each_row
def test_batches_are_reduced_where_destinations_say(row):
    ops = as_tensorflow(row.make())
    values = [per_replica(numbers(3, size)) for size in (4, 1, 0, 7)]
    pairs = [(value, value) for value in values[:3]] + [(values[3], "/cpu:2")]
    results = ops.batch_reduce(tf.distribute.ReduceOp.SUM, pairs)
    for size, result in zip((4, 1, 0), results, strict=False):
        assert [tensor.device[-5:] for tensor in result.values] == ["CPU:0", "CPU:1", "CPU:2"]
        for tensor in result.values:
            assert np.asarray(tensor).tobytes() == cd.reduce(numbers(3, size)).tobytes()
    assert results[3].device.endswith("CPU:2")
    assert np.asarray(results[3]).tobytes() == cd.reduce(numbers(3, 7)).tobytes()


@pytest.mark.parametrize("num_packs", [0, 1, 2])
def test_a_graph_is_made_of_operations_on_the_devices_in_as_many_packs_as_asked(num_packs):
    ops = as_tensorflow(cd.HierarchicalCopyAllReduce(num_packs))

    def reduce(*tensors):
        placed = []
        for number, tensor in enumerate(tensors):
            with tf.device(f"/cpu:{number % 4}"):
                placed.append(tf.identity(tensor))
        values = [PerReplica(placed[:4]), PerReplica(placed[4:])]
        return [r.values for r in ops.batch_reduce(tf.distribute.ReduceOp.MEAN, [(v, v) for v in values])]

    arrays = numbers(8)
    graph = tf.function(reduce, autograph=False).get_concrete_function(*arrays)
    kinds = [operation.type for operation in graph.graph.get_operations()]
    assert not {"PyFunc", "EagerPyFunc", "PyFuncStateless"} & set(kinds)
    assert {operation.device[-5:] for operation in graph.graph.get_operations() if operation.device} == {
        f"CPU:{k}" for k in range(4)
    }
    assert kinds.count("RealDiv") == {0: 2, 1: 1, 2: 2}[num_packs], "one division for each pack"
    for half, results in zip((arrays[:4], arrays[4:]), graph(*map(tf.constant, arrays)), strict=True):
        for tensor in results:
            assert np.asarray(tensor).tobytes() == cd.reduce(half, "mean").tobytes()


def test_fast_sums_in_a_graph_have_the_bits_of_tensorflow():
    arrays = [np.float16([2048 if k == 0 else 1]) for k in range(8)]
    for options, right in ((cd.CommunicationOptions(precision="fast"), 2048), (None, 2056)):
        ops = as_tensorflow(cd.ReductionToOneDevice(), options)
        value = [tf.constant(array) for array in arrays]
        reduce = tf.function(
            lambda v=value, ops=ops: ops.reduce("SUM", PerReplica(v), "/cpu:1"), autograph=False
        )
        assert float(reduce()[0]) == right


@each_mode
def test_slices_and_tensors_of_unknown_shape_are_reduced_too(mode):
    strategy = strategy_of(3, as_tensorflow(cd.RingAllReduce()))

    def replica():
        context = tf.distribute.get_replica_context()
        number = context.replica_id_in_sync_group
        rows = tf.fill([1, 2], tf.cast(number, tf.float32))
        slices = tf.IndexedSlices(rows, tf.reshape(number, [1]), tf.constant([4, 2]))
        dense, sparse = context.all_reduce("sum", [rows, slices])
        return dense, tf.convert_to_tensor(sparse)

    dense, sparse = run(mode, lambda: strategy.run(replica))
    for tensor in strategy.experimental_local_results(dense):
        assert np.asarray(tensor).tolist() == [[3, 3]]
    for tensor in strategy.experimental_local_results(sparse):
        assert np.asarray(tensor).tolist() == [[0, 0], [1, 1], [2, 2], [0, 0]]
    unknown = tf.function(
        lambda a, b: as_tensorflow(cd.RingAllReduce()).reduce("SUM", PerReplica([a, b]), "/cpu:0"),
        input_signature=[tf.TensorSpec([None])] * 2,
    )
    assert np.asarray(unknown(tf.constant([1.0]), tf.constant([2.0]))).tolist() == [3]


def test_gather_is_tensorflows():
    strategy = strategy_of(3, as_tensorflow(cd.TreeAllReduce()))
    value = strategy.run(
        lambda: tf.reshape(tf.distribute.get_replica_context().replica_id_in_sync_group, [1])
    )
    assert np.asarray(strategy.gather(value, axis=0)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("ops", [cd.DirectAllReduce, "ring", None])
def test_what_is_no_instance_of_an_algorithm_is_refused(ops):
    with pytest.raises(OptionError, match="expected an instance of CrossDeviceOps"):
        as_tensorflow(ops)


def test_an_adapter_says_what_it_adapts():
    assert repr(as_tensorflow(cd.RingAllReduce())) == "as_tensorflow(RingAllReduce())"


def placed(arrays):
    tensors = []
    for number, array in enumerate(arrays):
        with tf.device(f"/cpu:{number}"):
            tensors.append(tf.identity(tf.convert_to_tensor(array)))
    return tensors


@each_mode
@pytest.mark.parametrize(
    ("op", "dtype", "precision", "right"),
    [
        ("MEAN", np.int64, "accurate", [2**62 / 3, 2.0]),
        ("MEAN", np.uint64, "exact", [2**62 / 3, 2.0]),
        ("SUM", np.float32, "exact", [1, 6]),
        ("MEAN", np.float64, "exact", [1 / 3, 2]),
        ("SUM", np.complex64, "exact", [1, 6]),
        ("MEDIAN", np.float32, "accurate", [1, 2]),
    ],
)
def test_what_only_the_host_computes_is_computed_in_graphs_too(mode, op, dtype, precision, right):
    large = 2.0**60 if np.dtype(dtype).kind != "u" and np.dtype(dtype).kind != "i" else None
    first = [[large, 1], [1, 2], [-large, 3]] if large else [[2**61, 1], [2**61, 2], [0, 3]]
    if op == "MEDIAN":
        first = [[large, 1], [1, 2], [-large, 3]]
    ops = as_tensorflow(cd.RingAllReduce(), cd.CommunicationOptions(precision=precision))

    def reduce():
        value = PerReplica(placed([np.array(part, dtype) for part in first]))
        return ops.batch_reduce_implementation(
            op, [(value, value)], tf.distribute.experimental.CommunicationOptions()
        )[0].values

    results = run(mode, reduce)
    for number, tensor in enumerate(results):
        assert np.asarray(tensor).tolist() == right
        assert mode == "graph" or tensor.device.endswith(f"CPU:{number}")


@pytest.mark.parametrize(
    ("op", "dtype", "precision"),
    [
        ("SUM", "float32", "accurate"),
        ("MEAN", "float32", "exact"),
        ("MEAN", "float16", "accurate"),
        ("SUM", "bfloat16", "fast"),
        ("MEAN", "float64", "accurate"),
        ("MEAN", "complex64", "accurate"),
    ],
)
def test_tapes_differentiate_reductions_eagerly_and_in_graphs_as_tensorflows_own(op, dtype, precision):
    arrays = [[1, 2], [3, 4], [4, 6]]

    op = tf.distribute.ReduceOp(op)

    def gradients(ops):
        tensors = placed([tf.cast(tf.constant(array), dtype) for array in arrays])
        with tf.GradientTape(persistent=True) as outer:
            outer.watch(tensors)
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(tensors)
                value = PerReplica(tensors)
                (everywhere,) = ops.batch_reduce(op, [(value, value)])
                one = ops.reduce(op, value, "/cpu:1")
                cubes = sum(tf.reduce_sum(part**3) * k for k, part in enumerate(everywhere.values, 1))
                cube = tf.reduce_sum(one**3)
            first = tape.gradient(cubes, tensors), tape.gradient(cube, tensors)
        return [*first, outer.gradient(first[1], tensors)]

    own = as_tensorflow(cd.RingAllReduce(), cd.CommunicationOptions(precision=precision))
    right = gradients(tf.distribute.ReductionToOneDevice())
    for mode in ("eager", "graph"):
        for found, expected in zip(run(mode, lambda: gradients(own)), right, strict=True):
            for replica, (a, b) in enumerate(zip(found, expected, strict=True)):
                assert a is not None, f"replica {replica} has no gradient"
                np.testing.assert_allclose(tf.cast(a, tf.complex128), tf.cast(b, tf.complex128), rtol=1e-2)
                assert mode == "graph" or a.device.endswith(f"CPU:{replica}")


def test_a_batch_of_integers_and_floats_has_the_gradients_of_its_floats():
    ops = as_tensorflow(cd.HierarchicalCopyAllReduce())
    floats, integers = placed(np.float32([[1], [2]])), placed(np.int64([[1], [2]]))
    with tf.GradientTape() as tape:
        tape.watch(floats)
        pairs = [(PerReplica(integers), PerReplica(integers)), (PerReplica(floats), PerReplica(floats))]
        _, total = ops.batch_reduce("SUM", pairs)
        weighted = total.values[0] * 2
    assert [float(grad[0]) for grad in tape.gradient(weighted, floats)] == [2, 2]


def test_the_gradient_of_another_operation_is_refused_and_not_none():
    ops, tensors = as_tensorflow(cd.RingAllReduce()), placed(np.float32([[1], [2]]))
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        (largest,) = ops.batch_reduce("MAX", [(PerReplica(tensors), PerReplica(tensors))])
    with pytest.raises(ReduceOpError, match="MAX has no gradient"):
        tape.gradient(largest.values[0], tensors)


@pytest.mark.parametrize("function", [tf.add_n, tf.math.accumulate_n, lambda parts: sum(parts) * 2])
@pytest.mark.parametrize("signature", [[2], [None]], ids=["known", "unknown"])
@each_mode
def test_accumulation_functions_of_tensorflow_are_used_as_tensorflow_uses_them(mode, signature, function):
    ours = as_tensorflow(cd.ReductionToOneDevice("cpu:1", accumulation_fn=function))
    theirs = tf.distribute.ReductionToOneDevice("/cpu:1", function)

    def reduce(ops, *arrays):
        value = PerReplica(list(arrays))
        rows = PerReplica(
            [tf.IndexedSlices(array[:1], tf.constant([1]), tf.constant([2])) for array in arrays]
        )
        found = []
        for op in ("SUM", "MEAN"):
            named = tf.distribute.ReduceOp(op)
            found += [ops.reduce(named, value, "/cpu:2"), *ops.batch_reduce(named, [(value, "/cpu:0")])]
            found += [tf.convert_to_tensor(ops.reduce(named, rows, "/cpu:0"))]
        return found

    arrays = placed(np.float32([[1, 2], [3, 5], [7, 8]]))
    outcomes = []
    for ops in (ours, theirs):
        traced = tf.function(
            lambda *arrays, ops=ops: reduce(ops, *arrays),
            input_signature=[tf.TensorSpec(signature)] * 3,
            autograph=False,
        )
        outcomes.append(
            [np.asarray(r).tolist() for r in (traced(*arrays) if mode == "graph" else reduce(ops, *arrays))]
        )
    assert outcomes[0] == outcomes[1]


@each_row
def test_arguments_of_a_function_stay_where_tensorflow_puts_them(row):
    ops = as_tensorflow(row.make())

    def reduce(*tensors):
        value = PerReplica(list(tensors))
        return [result.values for result in ops.batch_reduce("MEAN", [(value, value)])]

    specs = [tf.TensorSpec([2]), tf.TensorSpec([2]), tf.TensorSpec([2])]
    graph = tf.function(reduce, autograph=False).get_concrete_function(*specs).graph
    via = {""} if row.name != "one_other_device" else {"", "/device:CPU:11"}
    assert {operation.device for operation in graph.get_operations()} == via

    def in_a_cluster(*tensors):
        with tf.device("/job:worker/task:1"):
            tensors = [tf.identity(tensor) for tensor in tensors]
        return reduce(*tensors)

    graph = tf.function(in_a_cluster, autograph=False).get_concrete_function(*specs).graph
    assert {operation.device for operation in graph.get_operations()} <= {*via, "/job:worker/task:1"}


IN_A_CLUSTER = """
import tensorflow as tf

import crossdevice as cd
from crossdevice.integrations.tensorflow import as_tensorflow

host = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(host, [tf.config.LogicalDeviceConfiguration()] * 3)
cluster = tf.train.ClusterSpec({"worker": ["localhost:0"]})
tf.config.experimental_connect_to_cluster(cluster, job_name="worker", task_index=0)
names = [f"/job:worker/task:0/cpu:{k}" for k in range(3)]
for ops in (cd.RingAllReduce(), cd.ReductionToOneDevice("cpu:2"), cd.ReductionToOneDevice(None, tf.add_n)):
    strategy = tf.distribute.MirroredStrategy(names, cross_device_ops=as_tensorflow(ops))

    def step(x):
        context = tf.distribute.get_replica_context()
        rows = tf.IndexedSlices(tf.reshape(x, [1, 2]), tf.constant([1]), tf.constant([2, 2]))
        return context.all_reduce("MEAN", [x, tf.cast(x, tf.int64), rows])[:2]

    x = strategy.experimental_distribute_values_from_function(lambda context: tf.constant([1.0, 3.0]))
    for run in (strategy.run, tf.function(strategy.run)):
        for mean in run(step, args=(x,)):
            for part in strategy.experimental_local_results(mean):
                assert part.numpy().tolist() == [1.0, 3.0]
                assert part.device.startswith("/job:worker/"), part.device
print("all right")
"""


def test_a_process_of_a_cluster_reduces_on_its_own_devices():
    done = subprocess.run(
        [sys.executable, "-c", IN_A_CLUSTER],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert done.stdout == "all right\n", done.stderr


def test_mistakes_are_refused_with_the_replica():
    with pytest.raises(OptionError, match="OnlyReduces overrides reduce_implementation"):
        as_tensorflow(OnlyReduces())
    plain = as_tensorflow(cd.RingAllReduce())
    with pytest.raises(ShapeMismatchError, match="replica 1"):
        plain.reduce("SUM", PerReplica([tf.zeros(2), tf.zeros(3)]), "/cpu:0")
    with pytest.raises(ReduceOpError):
        plain.reduce("mode", PerReplica([tf.constant([1.0]), tf.constant([2.0])]), "/cpu:0")
