"""Arrays on the logical host devices of JAX and TensorFlow, which must be told how many before first use."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

NUM_DEVICES = 16
"""Eight for the replicas and as many again, since the laws place results elsewhere too."""


@functools.cache
def jax_devices() -> Any:
    """JAX's host devices, with 64-bit dtypes."""
    import jax

    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    jax.config.update("jax_enable_x64", True)
    return jax.devices("cpu")


def jax_array(array: np.ndarray, number: int) -> Any:
    """A JAX array of its own memory on the device of that number."""
    import jax

    return jax.device_put(np.array(array), jax_devices()[number])


@functools.cache
def tensorflow_devices() -> Any:
    """TensorFlow's host devices."""
    import tensorflow as tf

    host = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(NUM_DEVICES)]
    tf.config.set_logical_device_configuration(host, logical)
    return tf.config.list_logical_devices("CPU")


def tensorflow_tensor(array: np.ndarray, number: int) -> Any:
    """A tensor of its own memory on the device of that number."""
    import tensorflow as tf

    with tf.device(tensorflow_devices()[number].name):
        return tf.constant(np.array(array))


def strict_array(array: np.ndarray, _: int) -> Any:
    """An array of array-api-strict, which has one host device."""
    import array_api_strict

    return array_api_strict.asarray(np.array(array))
