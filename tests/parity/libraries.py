"""What a program needs of `tf.distribute` or of crossdevice, under the same names."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np

import crossdevice as cd
from conformance import array_libraries

ERRORS = (
    NotImplementedError,
    TypeError,
    ValueError,
    AssertionError,
    RuntimeError,
    IndexError,
)
"""Built-in classes by which programs tell errors apart, a subclass before its base."""

NAMES = (
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ReduceOp",
    "ReductionToOneDevice",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "experimental_set_strategy",
)

Program = Callable[[Any], Any]


def crossdevice() -> Any:
    """Programs run on NumPy arrays."""
    return types.SimpleNamespace(
        **{name: getattr(cd, name) for name in NAMES},
        Variable=cd.Variable,
        VariableAggregation=cd.VariableAggregation,
        VariableSynchronization=cd.VariableSynchronization,
        CommunicationOptions=cd.CommunicationOptions,
        IndexedSlices=cd.IndexedSlices,
        MirroredStrategy=cd.MirroredStrategy,
        to_dense=cd.to_dense,
        array=lambda values, dtype="float32": np.array(values, dtype),
        per_replica=lambda arrays: cd.PerReplica(arrays),
        mirrored=lambda arrays: cd.Mirrored(arrays),
        mirrored_objects=cd.Mirrored,
        placed=lambda *numbers: cd.Mirrored([np.float32(0)] * len(numbers), [f"cpu:{k}" for k in numbers]),
        on_device=lambda array, number: cd.Variable(array, device=f"cpu:{number}"),
        devices_of=lambda value: [str(device) for device in value.devices],
        dataset=lambda rows, size: [rows[k : k + size] for k in range(0, len(rows), size)],
        scalars=lambda numbers: [np.float32(number) for number in numbers],
        full_name=lambda device: device.canonical,
        plain=_plain_crossdevice,
    )


def tensorflow() -> Any:
    """The same of the installed TensorFlow, on logical host devices and without collectives.

    One failed collective makes all later ones of the process fail, so the default of MirroredStrategy, which
    is made of them, is replaced.
    """
    import tensorflow as tf
    from tensorflow.python.distribute import values

    array_libraries.tensorflow_devices()

    def on(number: int, array: Any) -> Any:
        with tf.device(f"/cpu:{number}"):
            return tf.identity(array) if isinstance(array, (tf.Tensor, np.ndarray)) else array

    def mirrored_strategy(devices: Any = None, cross_device_ops: Any = None) -> Any:
        return tf.distribute.MirroredStrategy(
            devices, cross_device_ops=cross_device_ops or tf.distribute.ReductionToOneDevice()
        )

    def placed(*numbers: int) -> Any:
        return values.Mirrored([on(k, tf.constant(0.0)) for k in numbers])

    def variable_on(array: Any, number: int) -> Any:
        with tf.device(f"/cpu:{number}"):
            return tf.Variable(array)

    return types.SimpleNamespace(
        **{name: getattr(tf.distribute, name) for name in NAMES},
        Variable=tf.Variable,
        VariableAggregation=tf.VariableAggregation,
        VariableSynchronization=tf.VariableSynchronization,
        CommunicationOptions=tf.distribute.experimental.CommunicationOptions,
        IndexedSlices=tf.IndexedSlices,
        MirroredStrategy=mirrored_strategy,
        to_dense=tf.convert_to_tensor,
        array=lambda numbers, dtype="float32": tf.constant(numbers, dtype),
        per_replica=lambda arrays: values.PerReplica([on(k, array) for k, array in enumerate(arrays)]),
        mirrored=lambda arrays: values.Mirrored([on(k, array) for k, array in enumerate(arrays)]),
        mirrored_objects=values.Mirrored,
        placed=placed,
        on_device=variable_on,
        devices_of=lambda value: [array.device.rpartition("device:")[2].lower() for array in value.values],
        dataset=lambda rows, size: tf.data.Dataset.from_tensor_slices(rows).batch(size),
        scalars=lambda numbers: tf.data.Dataset.from_tensor_slices(tf.constant(numbers, "float32")),
        full_name=str,
        plain=_plain_tensorflow,
    )


def outcome(program: Program, library: Any) -> Any:
    """What a program gives, in plain Python; or the class of its error."""
    try:
        return library.plain(program(library))
    except Exception as error:
        return next((kind.__name__ for kind in ERRORS if isinstance(error, kind)), type(error).__name__)


def _plain_crossdevice(result: Any) -> Any:
    if isinstance(result, (cd.MirroredVariable, cd.SyncOnReadVariable)):
        return "variable", [_plain_crossdevice(copy) for copy in result.values]
    if isinstance(result, cd.DistributedValues):
        return type(result).__name__, [_plain_crossdevice(part) for part in result.values]
    if isinstance(result, cd.IndexedSlices):
        return "rows", result.indices.tolist(), _plain_crossdevice(result.values)
    if isinstance(result, cd.Variable):
        return _plain_crossdevice(result.value())
    return _plain(result, _plain_crossdevice)


def _plain_tensorflow(result: Any) -> Any:
    import tensorflow as tf
    from tensorflow.python.distribute import values

    if isinstance(result, values.DistributedVariable):
        return "variable", [_plain_tensorflow(copy) for copy in result.values]
    if isinstance(result, values.DistributedValues):
        return type(result).__name__, [_plain_tensorflow(part) for part in result.values]
    if isinstance(result, tf.IndexedSlices):
        return "rows", result.indices.numpy().tolist(), _plain_tensorflow(result.values)
    if isinstance(result, (tf.Tensor, tf.Variable)):
        return _plain_tensorflow(result.numpy())
    return _plain(result, _plain_tensorflow)


def _plain(result: Any, plain: Callable[[Any], Any]) -> Any:
    if isinstance(result, (np.ndarray, np.generic)):
        return str(result.dtype), result.tolist()
    if isinstance(result, dict):
        return {key: plain(part) for key, part in result.items()}
    if isinstance(result, (list, tuple)):
        return [plain(part) for part in result]
    return result if isinstance(result, (bool, int, float, str, type(None))) else type(result).__name__
