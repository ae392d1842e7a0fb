"""TensorFlow's tensors and variables: read without a copy, shared as TensorFlow shares them."""

import gc

import numpy as np
import pytest

import crossdevice as cd
from conformance import array_libraries
from crossdevice.backends.registry import backend_named
from crossdevice.errors import ConversionError, DeviceError, LibraryMismatchError, OutError
from crossdevice.kernels.host.resources.pool import SMALLEST_POOLED_BYTES, result_pool

tf = pytest.importorskip("tensorflow")
from crossdevice.backends import tensorflow_backend  # noqa: E402 - imports TensorFlow

pytestmark = pytest.mark.more("TensorFlow")

LARGE = SMALLEST_POOLED_BYTES // 4


@pytest.fixture(autouse=True)
def _devices():
    array_libraries.tensorflow_devices()


def replicas(*numbers, size=LARGE):
    arrays = [np.full(size, number, np.float32) for number in numbers]
    return cd.PerReplica([array_libraries.tensorflow_tensor(array, k) for k, array in enumerate(arrays)])


def address(tensor):
    return np.asarray(tensor).__array_interface__["data"][0]


def variable(array, number):
    with tf.device(f"/cpu:{number}"):
        return tf.Variable(array)


def test_host_tensors_and_variables_are_read_without_a_copy():
    (tensor,) = replicas(1).values
    assert address(backend_named("tensorflow").host_view(tensor)) == address(tensor)
    held = variable(tensor, 0)
    assert address(backend_named("tensorflow").host_view(held)) == address(held.read_value())


def test_destinations_share_one_result_on_devices_of_their_own():
    value = replicas(1, 2, 4)
    result = cd.RingAllReduce().reduce("sum", value, value)
    assert [tensor.device for tensor in result.values] == [tensor.device for tensor in value.values]
    assert len({address(tensor) for tensor in result.values}) == 1
    assert all(float(tensor[-1]) == 7 for tensor in result.values)


def test_memory_is_not_used_again_while_any_tensor_lies_in_it():
    value = replicas(1, 2)
    gc.collect()
    before = result_pool.statistics().leased_bytes
    kept = cd.ReductionToOneDevice().reduce("sum", value, value).values[1]
    for number in range(4):
        other = replicas(number, number)
        later = cd.ReductionToOneDevice().reduce("sum", other, other)
        assert address(later.values[0]) != address(kept)
        assert float(later.values[0][0]) == 2 * number
    assert np.asarray(kept).min() == np.asarray(kept).max() == 3
    del later
    gc.collect()
    assert result_pool.statistics().leased_bytes > before
    del kept
    gc.collect()
    assert result_pool.statistics().leased_bytes == before


def test_variables_are_read_and_results_do_not_follow_them():
    held = [variable(np.float32([1, 2]), 0), variable(np.float32([3, 4]), 1)]
    total = cd.RingAllReduce().reduce("sum", cd.PerReplica(held), cd.PerReplica(held))
    copies = cd.RingAllReduce().broadcast(held[0], cd.PerReplica(held))
    alone = cd.RingAllReduce().reduce("sum", held[0], held[1])
    for each in held:
        each.assign_add([10.0, 10.0])
    assert [np.asarray(tensor).tolist() for tensor in total.values] == [[4, 6], [4, 6]]
    assert [np.asarray(tensor).tolist() for tensor in (*copies.values, alone)] == [[1, 2]] * 3
    assert alone.device == held[1].device


@pytest.mark.parametrize("lowering", ["auto", "off"])
def test_tensorflows_slices_come_back_as_such(lowering):
    def slices(rows, indices, number):
        parts = (np.float32(rows), np.int64(indices), np.int64([4, 2]))
        return tf.IndexedSlices(*(array_libraries.tensorflow_tensor(part, number) for part in parts))

    value = cd.PerReplica([slices([[1, 1]], [2], 0), slices([[3, 3], [5, 5]], [2, 0], 1)])
    options = cd.CommunicationOptions(lowering=lowering)
    for op, divisor in (("sum", 1), ("mean", 2)):
        for joined in cd.TreeAllReduce().reduce(op, value, value, options).values:
            assert isinstance(joined, tf.IndexedSlices)
            assert (np.asarray(joined.values) * divisor).tolist() == [[1, 1], [3, 3], [5, 5]]
            assert np.asarray(joined.indices).tolist() == [2, 2, 0]
            assert np.asarray(joined.dense_shape).tolist() == [4, 2]
    nested = cd.reduce([{"table": part} for part in value.values], "sum")
    assert isinstance(nested["table"], tf.IndexedSlices)
    copied = cd.broadcast(value.values[0], ["cpu:1", "cpu:2"])
    assert all(isinstance(part, tf.IndexedSlices) for part in copied)
    dense = array_libraries.tensorflow_tensor(np.ones((4, 2), np.float32), 1)
    mixed = cd.TreeAllReduce().reduce("sum", cd.PerReplica([value.values[0], dense]), "cpu:0", options)
    assert np.asarray(mixed).tolist() == [[1, 1], [1, 1], [2, 2], [1, 1]]


def test_tensors_of_a_graph_are_refused_with_the_way_to_do_it_there():
    inside = tf.function(lambda tensor: cd.all_reduce([tensor, tensor])[0], autograph=False)
    with pytest.raises(ConversionError, match=r"integrations\.tensorflow\.as_tensorflow"):
        inside(tf.constant([1.0]))


def test_slices_of_a_graph_are_refused_in_the_same_way():
    slices = tf.function(
        lambda rows: cd.reduce([tf.IndexedSlices(rows, tf.constant([0]), tf.shape(rows))] * 2),
        autograph=False,
    )
    with pytest.raises(ConversionError, match=r"IndexedSlices without elements.*as_tensorflow"):
        slices(tf.ones((1, 2)))


def test_a_first_call_inside_a_graph_does_not_make_eager_tensors_unknown():
    tensorflow_backend._eager_type.cache_clear()
    test_tensors_of_a_graph_are_refused_with_the_way_to_do_it_there()
    assert float(cd.RingAllReduce().reduce("sum", replicas(1, 2, size=1), "cpu:0")[0]) == 3


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda: tf.ragged.constant([[1.0], [2.0, 3.0]]), r"RaggedTensor; expected a dense.*to_tensor\(\)"),
        (lambda: tf.sparse.from_dense([0.0, 1.0]), r"SparseTensor; expected a dense.*tf\.sparse\.to_dense"),
    ],
)
def test_tensors_that_are_not_dense_are_refused_as_such(make, advice):
    with pytest.raises(ConversionError, match=advice):
        cd.all_reduce([make(), make()])


def test_variables_of_keras_are_refused_with_what_to_give():
    wrong = type("Variable", (), {"__module__": "keras.src.backend"})()  # Keras takes seconds to import
    with pytest.raises(ConversionError, match=r"replica 0 is a Variable of Keras; expected its \.value"):
        backend_named("tensorflow").check_array(wrong, "replica 0")


def test_out_is_refused_since_tensors_are_immutable():
    value = replicas(1, 2, size=3)
    with pytest.raises(OutError, match="an array of tensorflow, which cannot be written to"):
        cd.RingAllReduce().reduce("sum", value, value, out=value)


def test_devices_that_tensorflow_has_not_made_do_not_exist():
    with pytest.raises(DeviceError, match=r"cpu:99 does not exist for tensorflow.*logical_device"):
        cd.RingAllReduce().reduce("sum", replicas(1, 2, size=3), "cpu:99")


def test_libraries_do_not_mix():
    with pytest.raises(LibraryMismatchError, match=r"numpy.*tensorflow|tensorflow.*numpy"):
        cd.all_reduce([np.float32([1]), replicas(1, size=1).values[0]])


def test_bfloat16_without_any_axis():
    for lowering in ("auto", "off"):
        options = cd.CommunicationOptions(lowering=lowering)
        total = cd.reduce([tf.constant(1.5, tf.bfloat16)] * 2, options=options)
        assert total.dtype == tf.bfloat16
        assert float(total) == 3.0


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 40)])
def test_float8_goes_in_and_comes_out(dtype, shape):
    held = tf.cast(tf.fill(shape, 1.5), dtype)
    value = cd.PerReplica([held, tf.identity(held)])
    for total in (cd.reduce(list(value.values)), cd.bind(list(value.values), "sum", "cpu:0")()):
        assert total.dtype == held.dtype
        assert tf.cast(total, tf.float32).numpy().tolist() == np.full(shape, 3.0).tolist()
