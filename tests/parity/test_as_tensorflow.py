"""Every algorithm inside tf.distribute, in every call, beside TensorFlow's own ReductionToOneDevice."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

import crossdevice as cd
from conformance import array_libraries
from conformance.rows import ALGORITHM_ROWS

tf = pytest.importorskip("tensorflow")
from tensorflow.python.distribute.values import PerReplica  # noqa: E402 - TensorFlow does not export it

from crossdevice.integrations.tensorflow import as_tensorflow  # noqa: E402 - imports TensorFlow

pytestmark = pytest.mark.more("TensorFlow")

PRECISE = {
    precision: lambda precision=precision: as_tensorflow(
        cd.HierarchicalCopyAllReduce(num_packs=2), cd.CommunicationOptions(precision=precision)
    )
    for precision in ("fast", "exact")
}
MAKERS = {
    **{
        row.name: lambda row=row: as_tensorflow(row.make())
        for row in ALGORITHM_ROWS
        if row.name != "users_own"
    },
    **PRECISE,
    "add_n": lambda: as_tensorflow(cd.ReductionToOneDevice(accumulation_fn=tf.add_n)),
}
COUNTS = (1, 2, 3, 5)
DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "int32", "int64", "uint8", "complex64")
DTYPES_OF = {"eager": DTYPES, "graph": ("bfloat16", "int64"), "arguments": ("float32",)}
CASES = [
    (name, mode, count)
    for name, mode, count in itertools.product(MAKERS, DTYPES_OF, COUNTS)
    if mode != "arguments" or name in ("hierarchical_copy", "one_other_device", "exact", "add_n")
]
SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


@pytest.fixture(scope="module", autouse=True)
def _devices():
    array_libraries.tensorflow_devices()


def dense_value(dtype, count, start):
    """Numbers whose sums every precision holds exactly, one array for each device."""
    tensors = []
    for number in range(count):
        with tf.device(f"/cpu:{number}"):
            tensors.append(tf.cast(tf.constant([start + number, 2.0, number]), dtype))
    return PerReplica(tensors)


def sparse_value(dtype, count):
    slices = []
    for number, rows in enumerate(dense_value(dtype, count, 1).values):
        with tf.device(f"/cpu:{number}"):
            indices, shape = tf.constant([number % 2, 1, 0]), tf.constant([4])
            slices.append(tf.IndexedSlices(tf.identity(rows), indices, shape))
    return PerReplica(slices)


def calls_of(ops, first, second, rows):
    """The results of all calls with two dense values and a sparse one, by name."""
    found = {}
    for op in (SUM, MEAN):
        for kind, value in (("dense", first), ("sparse", rows)):
            found[f"reduce {kind} {op.name}"] = ops.reduce(op, value, value)
            found[f"reduce {kind} {op.name} to one"] = ops.reduce(op, value, "/cpu:1")
        pairs = [(first, first), (rows, rows), (second, second)]
        for number, result in enumerate(ops.batch_reduce(op, pairs)):
            found[f"batch_reduce {op.name} {number}"] = result
        for number, result in enumerate(ops.batch_reduce(op, [(first, "/cpu:1"), (second, second)])):
            found[f"batch_reduce {op.name} to one {number}"] = result
    for kind, value in (("dense", first), ("sparse", rows)):
        found[f"broadcast {kind}"] = ops.broadcast(value.values[0], second)
    found["gather"] = ops._gather(first, "/cpu:1", 0, None)
    return found


def described(result):
    """What can be compared of a result: whether it is mirrored, its dtypes and numbers."""
    components = getattr(result, "values", None)
    if isinstance(result, (tf.Tensor, tf.IndexedSlices)) or components is None:
        return one_described(result)
    return [one_described(component) for component in components]


def one_described(component):
    if isinstance(component, tf.IndexedSlices):
        return "sparse", [
            one_described(part) for part in (component.values, component.indices, component.dense_shape)
        ]
    return component.dtype.name, np.asarray(component).tolist()


def outcome(make, mode, count):
    found = {}

    def program(*values):
        return calls_of(make(), *values)

    for dtype in DTYPES_OF[mode]:
        values = dense_value(dtype, count, 1), dense_value(dtype, count, 3), sparse_value(dtype, count)
        if mode == "eager":
            results = program(*values)
        elif mode == "arguments":
            results = unwrapped(
                tf.function(lambda *values: wrapped(program(*values)), autograph=False)(*values)
            )
        else:

            def traced(dtype=dtype):
                return wrapped(
                    program(
                        dense_value(dtype, count, 1), dense_value(dtype, count, 3), sparse_value(dtype, count)
                    )
                )

            results = unwrapped(tf.function(traced, autograph=False)())
        found |= {f"{name}, {dtype}": described(result) for name, result in results.items()}
    return found


def wrapped(results):
    """Mirrored values as lists: a function would return their first component only."""
    return {
        name: result
        if isinstance(result, (tf.Tensor, tf.IndexedSlices)) or not hasattr(result, "values")
        else list(result.values)
        for name, result in results.items()
    }


class _Several(list):
    @property
    def values(self):
        return tuple(self)


def unwrapped(results):
    return {
        name: _Several(result) if isinstance(result, list) else result for name, result in results.items()
    }


@functools.cache
def right(mode, count):
    return outcome(tf.distribute.ReductionToOneDevice, mode, count)


@pytest.mark.parametrize(("name", "mode", "count"), CASES)
def test_every_call_gives_what_tensorflows_reduction_to_one_device_gives(name, mode, count):
    found, expected = outcome(MAKERS[name], mode, count), right(mode, count)
    wrong = {call: (found[call], answer) for call, answer in expected.items() if found[call] != answer}
    assert not wrong, f"{len(wrong)} of {len(expected)} calls differ"


def trained(make, count, path):
    """What two epochs make of a model, with a checkpoint and a new model between them."""
    import keras

    if keras.backend.backend() != "tensorflow":
        pytest.skip("Keras trains with another library here")
    examples = np.linspace(0, 1, 4 * count, dtype=np.float32).reshape(-1, 1)
    for _ in range(2):
        strategy = tf.distribute.MirroredStrategy(
            [f"/cpu:{k}" for k in range(count)], cross_device_ops=make()
        )
        with strategy.scope():
            model = keras.Sequential(
                [keras.layers.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")]
            )
            model.compile(keras.optimizers.SGD(0.5, momentum=0.5), "mse")
            model.optimizer.build(model.trainable_variables)
        if path.exists():
            model.load_weights(path)
        model.fit(examples, 3 * examples, batch_size=2 * count, shuffle=False, verbose=0)
        model.save_weights(path)
    return np.concatenate([weight.reshape(-1) for weight in model.get_weights()])


_RIGHTLY_TRAINED = {}


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras, writing HDF5
@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("name", ["add_n", "fast", "exact", "hierarchical_copy", "ring"])
def test_keras_trains_and_goes_on_from_a_checkpoint(name, count, tmp_path):
    if count not in _RIGHTLY_TRAINED:
        theirs = tmp_path / "theirs.weights.h5"
        _RIGHTLY_TRAINED[count] = trained(tf.distribute.ReductionToOneDevice, count, theirs)
    found = trained(MAKERS[name], count, tmp_path / "ours.weights.h5")
    np.testing.assert_allclose(found, _RIGHTLY_TRAINED[count], rtol=1e-5)


def made_by_us(theirs, kind, asked):
    class Made(theirs):
        def __new__(cls, *args, **named):
            asked.append(kind)
            return as_tensorflow(kind(*args, **named))

    return Made


def test_ours_take_the_place_of_tensorflows_where_its_strategies_make_them(monkeypatch):
    from tensorflow.python.distribute import cross_device_ops

    asked = []
    for name in (
        "ReductionToOneDevice",
        "HierarchicalCopyAllReduce",
        "NcclAllReduce",
        "AllReduceCrossDeviceOps",
    ):
        made = made_by_us(getattr(cross_device_ops, name), getattr(cd, name), asked)
        for module in (cross_device_ops, tf.distribute):
            monkeypatch.setattr(module, name, made, raising=False)
        assert repr(getattr(tf.distribute, name)()).startswith(f"as_tensorflow({name}")
        assert not isinstance(cd.RingAllReduce(), getattr(cross_device_ops, name))
    strategy = tf.distribute.MirroredStrategy(
        ["/cpu:0", "/cpu:1"], cross_device_ops=cross_device_ops.HierarchicalCopyAllReduce(num_packs=2)
    )
    assert repr(strategy.extended._cross_device_ops).startswith("as_tensorflow(HierarchicalCopyAllReduce")
    value = strategy.run(
        lambda: tf.constant([2]) * (tf.distribute.get_replica_context().replica_id_in_sync_group + 1)
    )
    asked.clear()
    assert np.asarray(strategy.reduce("SUM", value, axis=None)).tolist() == [6]
    assert asked == [cd.ReductionToOneDevice], "integers on CPUs are reduced by what TensorFlow makes itself"
