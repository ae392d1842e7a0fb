"""Variables of JAX arrays and TensorFlow tensors, which replicas make on devices of their own."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from conformance import array_libraries
from crossdevice.errors import ContextError, ConversionError, DtypeError
from crossdevice.values.device import device_of
from unit.strategies.variables.making import own_replica

jax = pytest.importorskip("jax")
tf = pytest.importorskip("tensorflow")

pytestmark = pytest.mark.more("JAX and TensorFlow")

LIBRARIES = {
    "jax": (array_libraries.jax_array, jax.numpy.full),
    "tensorflow": (array_libraries.tensorflow_tensor, tf.fill),
}
each_library = pytest.mark.parametrize(("make", "full"), LIBRARIES.values(), ids=LIBRARIES)


def copies(variable):
    return [copy.numpy().tolist() for copy in variable.values]


@each_library
@pytest.mark.parametrize(("aggregation", "right"), [("sum", 3), ("mean", 1.5), ("only_first_replica", 1)])
def test_what_replicas_assign_may_be_on_any_device(strategy, make, full, aggregation, right):
    variable = strategy.create_variable(make(np.zeros(2, np.float32), 0), aggregation=aggregation)
    strategy.run(lambda: variable.assign(full((2,), 1.0 + own_replica())) is None)
    assert copies(variable) == [[right] * 2] * 2
    constant = make(np.ones(2, np.float32), 1)
    strategy.run(lambda: variable.assign_add(constant) is None)
    assert copies(variable) == [[right + (2 if aggregation == "sum" else 1)] * 2] * 2
    assert variable.devices == strategy.extended.worker_devices


@each_library
def test_copies_are_updated_on_their_devices(strategy, make, full):
    variable = strategy.create_variable(make(np.ones(2, np.float32), 0))
    made = strategy.extended.update(variable, lambda copy, factor: full((2,), 3.0) * factor, args=(2.0,))
    assert [device_of(array) for array in made.values] == list(variable.devices)


@each_library
def test_elements_are_iterated_over_and_come_to_an_end(strategy, make, full):
    variable = strategy.create_variable(make(np.float32([1, 2]), 0))
    for values in (variable, variable.assign([1.0, 2.0])):
        assert [float(element) for element in itertools.islice(values, 9)] == [1, 2]


@pytest.mark.parametrize(("aggregation", "right"), [("none", 7), ("sum", 13), ("mean", 7)])
def test_slices_of_tensorflow_are_scattered(strategy, aggregation, right):
    variable = strategy.create_variable(
        array_libraries.tensorflow_tensor(np.float32([1, 2]), 0), aggregation=aggregation
    )
    slices = tf.IndexedSlices(tf.constant([2.0, 4.0]), tf.constant([0, 0]))  # both rows count
    strategy.run(lambda: variable.scatter_add(slices) is None)
    assert copies(variable) == [[right, 2]] * 2


def test_a_variable_is_not_kept_by_a_tf_function(strategy):
    variable = strategy.create_variable(array_libraries.tensorflow_tensor(np.float32([1]), 0), name="w")

    @tf.function(autograph=False)
    def double(value=None):
        return 2 * (variable if value is None else value)

    for read in (double, tf.function(variable.value, autograph=False)):
        with pytest.raises(ContextError, match=r"variable 'w' was used inside a tf.function.*argument"):
            read()
    for right in (2, 4):
        assert double(variable.value()).numpy().tolist() == [right]
        variable.assign_add([1.0])
    assert tf.function(lambda: tf.constant(repr(variable)), autograph=False)() == repr(variable)  # as ever


@pytest.mark.parametrize(
    "make",
    [
        np.array,
        torch.from_numpy,
        lambda array: array_libraries.jax_array(array, 0),
        lambda array: array_libraries.tensorflow_tensor(array, 0),
        lambda array: array_libraries.strict_array(array, 0),
    ],
    ids=["numpy", "torch", "jax", "tensorflow", "strict"],
)
def test_dtypes_that_a_library_does_not_have_are_refused(strategy, make):
    with pytest.raises(DtypeError, match="flaot32"):
        strategy.create_variable(make(np.ones(1, np.float32)), dtype="flaot32")


def test_jax_never_takes_half_the_bits(strategy):
    for dtype in ("float64", "<f8"):
        with jax.enable_x64(False), pytest.raises(DtypeError, match="jax_enable_x64"):
            strategy.create_variable(array_libraries.jax_array(np.ones(1, np.float32), 0), dtype=dtype)


def test_arrays_without_plain_elements_are_refused(strategy):
    variable = strategy.create_variable([1.0])
    for wrong, reason in {
        "masked": (np.ma.masked_array([1.0], [True]), "masked array.*mask would be lost"),
        "keys": (jax.random.key(0), r"random keys.*jax\.random\.key_data"),
        "ragged": (tf.ragged.constant([[1.0]]), "RaggedTensor"),
    }.values():
        with pytest.raises(ConversionError, match=f"given to variable 'Variable' is .*{reason}"):
            strategy.create_variable(wrong)
        with pytest.raises(ConversionError, match=f"given to variable 'Variable' is .*{reason}"):
            variable.assign(wrong)
    assert copies(variable) == [[1]] * 2
