"""TensorFlow's eager tensors and variables, on the devices that TensorFlow was started with."""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from crossdevice.backends.protocol import Backend, ThreadState, address_range, dtype_named, native
from crossdevice.errors import ConversionError, DeviceError
from crossdevice.values.device import Device
from crossdevice.values.distributed import IndexedSlices
from crossdevice.values.quantities import kind_text

_NAMESPACE = types.SimpleNamespace(
    add=tf.add,
    multiply=tf.multiply,
    minimum=tf.minimum,
    maximum=tf.maximum,
    full_like=lambda array, number: tf.cast(tf.fill(tf.shape(array), number), array.dtype),
    zeros_like=tf.zeros_like,
    isfinite=tf.math.is_finite,
    where=tf.where,
    sum=tf.reduce_sum,
    min=tf.reduce_min,
    max=tf.reduce_max,
    prod=tf.reduce_prod,
)

ADOPTED_ALIGNMENT_BYTES = 64
"""TensorFlow's own operations abort the process on memory that does not start on such a line."""


class TensorflowBackend(Backend):
    """Tensors are handed over through DLPack, and all destinations share one result, as in TensorFlow.

    Variables are read; results are tensors.
    """

    name = "tensorflow"
    is_immutable = True

    def namespace(self) -> Any:
        """Returns the functions that are needed: TensorFlow follows no standard."""
        return _NAMESPACE

    def working_on(self, device: Device) -> AbstractContextManager[Any]:
        """Enters the device: TensorFlow does not follow its arguments."""
        return tf.device(device.canonical)

    def thread_state(self, devices: Sequence[Device]) -> ThreadState | None:
        """Makes a replica's new tensors live on its device, if TensorFlow has all of them."""
        return self.working_on if devices and _devices().keys() >= set(devices) else None

    def check_array(self, array: Any, where: str) -> None:
        """Refuses tensors of a graph, which have no elements yet, and ragged and sparse ones."""
        if isinstance(array, (tf.RaggedTensor, tf.SparseTensor)):
            dense = ".to_tensor()" if isinstance(array, tf.RaggedTensor) else "tf.sparse.to_dense"
            raise ConversionError(
                f"{where} is {kind_text(array)}; expected a dense tensor ({dense}) or tf.IndexedSlices"
            )
        if type(array).__module__.startswith("keras."):
            raise ConversionError(f"{where} is {kind_text(array)} of Keras; expected its .value")
        if not _is_eager(array):
            raise ConversionError(
                f"{where} is {kind_text(array)} without elements, as inside a tf.function; there, give "
                "crossdevice.integrations.tensorflow.as_tensorflow(ops) to tf.distribute.MirroredStrategy"
            )

    def signature(self, array: Any) -> Hashable:
        """Raises for tensors of a graph, which may have no known shape, so that such calls are not cached."""
        if not _is_eager(array):
            raise RuntimeError("not an eager tensor")
        return type(array), array.dtype, tuple(array.shape), array.device

    def check_device(self, device: Device) -> None:
        """Accepts only devices that TensorFlow has made: their number is fixed when it starts."""
        if device not in _devices():
            raise DeviceError(
                f"{device} does not exist for tensorflow tensors; those that do are "
                f"{', '.join(map(str, _devices()))} (more host devices: "
                "tf.config.set_logical_device_configuration before TensorFlow is first used)"
            )

    def dtype_of(self, array: Any) -> str:
        """Returns the dtype's name."""
        return str(array.dtype.name)

    def host_view(self, array: Any) -> NDArray[Any]:
        """Returns the tensor's memory; a variable is read first, also without a copy."""
        tensor = _tensor(array)
        if tensor.shape.rank == 0 and np.dtype(tensor.dtype.as_numpy_dtype).isbuiltin != 1:
            tensor = tf.reshape(tensor, (1,))  # TensorFlow does not hand it to NumPy as it is
        return native(np.asarray(tensor))

    def address_range(self, array: Any) -> tuple[int, int]:
        """Returns the range of its view on the host."""
        return address_range(self.host_view(array))

    def writable_view(self, array: Any) -> None:  # noqa: ARG002
        """Always None: the arrays are immutable."""
        return

    def from_host(self, flat: NDArray[Any], shape: tuple[int, ...], device: Device) -> Any:
        """Adopts memory on the host that starts on a line; copies it otherwise."""
        shaped = flat.reshape(shape)
        if flat.dtype == dtype_named("bfloat16"):  # NumPy's DLPack does not know it
            tensor = tf.bitcast(_adopted(shaped.view(np.uint16)), tf.bfloat16)
        elif flat.dtype.isbuiltin != 1:  # float8, of which TensorFlow's bitcast does not know either
            tensor = tf.constant(shaped)
        else:
            tensor = _adopted(shaped)
        name = device.canonical
        if tensor.device == name:
            return tensor
        # Like `tensor.cpu()`, for any device, unrecorded: adopted memory is not differentiated yet, and
        # an operation takes six times as long, for every gradient on every device.
        copy = getattr(tensor, "_copy", None)
        return self.copy(tensor, device) if copy is None else copy(device_name=name)

    def flat(self, array: Any) -> Any:
        """Returns the same memory in another shape."""
        return self.reshape(_tensor(array), (-1,))

    def reshape(self, flat: Any, shape: tuple[int, ...]) -> Any:
        """Returns the same memory in another shape."""
        with tf.device(flat.device):
            return tf.reshape(flat, shape)

    def copy(self, array: Any, device: Device) -> Any:
        """Copies; on host devices TensorFlow shares memory and copies it before a write."""
        with tf.device(device.canonical):
            return tf.identity(_tensor(array))

    read_only = copy

    def concat(self, arrays: Sequence[Any], axis: int, device: Device) -> Any:
        """Concatenates arrays along `axis`."""
        with tf.device(device.canonical):
            return tf.concat([_tensor(array) for array in arrays], axis)

    def cast(self, array: Any, dtype: str) -> Any:
        """Returns the values in another dtype."""
        with tf.device(array.device):
            return tf.cast(array, dtype)

    def round_once(self, wide: Any, dtype: str) -> Any:
        """Rounds to odd in float32 first: TensorFlow goes to 16 bits through float32, which rounds twice."""
        if dtype not in ("bfloat16", "float16"):
            return self.cast(wide, dtype)
        with tf.device(wide.device):
            near = tf.cast(wide, tf.float32)
            back = tf.cast(near, tf.float64)
            bits = tf.bitcast(near, tf.int32)
            bits = tf.where(tf.abs(back) > tf.abs(wide), bits - 1, bits)
            is_odd = tf.cast((back != wide) & ~tf.math.is_nan(wide), tf.int32)
            return tf.cast(tf.bitcast(tf.bitwise.bitwise_or(bits, is_odd), tf.float32), dtype)

    def parts_of(self, array: Any) -> Any:
        """Returns real and imaginary parts in turn."""
        with tf.device(array.device):
            return tf.reshape(tf.stack([tf.math.real(array), tf.math.imag(array)], axis=-1), (-1,))

    def from_parts(self, parts: Any) -> Any:
        """Combines real and imaginary parts."""
        with tf.device(parts.device):
            pairs = tf.reshape(parts, (-1, 2))
            return tf.complex(pairs[:, 0], pairs[:, 1])

    def as_indexed_slices(self, array: Any) -> IndexedSlices | None:
        """Reads a `tf.IndexedSlices`, to return one; leaves those of a graph to `check_array`."""
        if not isinstance(array, tf.IndexedSlices) or not _is_eager(array.values):
            return None
        return _TensorflowSlices(array.values, array.indices, array.dense_shape)

    def scatter_rows(self, rows: Any, indices: Any, shape: tuple[int, ...]) -> Any:
        """Adds up the rows of repeated indices."""
        with tf.device(rows.device):
            return tf.scatter_nd(tf.expand_dims(indices, 1), rows, tf.constant(shape, indices.dtype))


class _TensorflowSlices(IndexedSlices):
    """Slices that came as TensorFlow's, and go back as such."""

    __slots__ = ()

    def with_parts(self, values: Any, indices: Any, dense_shape: tuple[int, ...] | None) -> Any:
        """Returns a `tf.IndexedSlices`."""
        shape = None if dense_shape is None else tf.constant(dense_shape, indices.dtype)
        return tf.IndexedSlices(values, indices, shape)


def _is_eager(array: Any) -> bool:
    return isinstance(array, (_eager_type(), tf.Variable)) and tf.executing_eagerly()


@functools.cache
def _eager_type() -> type[Any]:
    with tf.init_scope():  # the first question may come from inside a tf.function
        return type(tf.constant(0))


def _tensor(array: Any) -> Any:
    return array.read_value() if isinstance(array, tf.Variable) else array


def _adopted(array: NDArray[Any]) -> Any:
    if array.__array_interface__["data"][0] % ADOPTED_ALIGNMENT_BYTES:
        return tf.constant(array)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


@functools.cache
def _devices() -> dict[Device, str]:
    """Maps our names to TensorFlow's devices: asking for them makes them final."""
    return {Device.parse(device.name): device.name for device in tf.config.list_logical_devices()}
