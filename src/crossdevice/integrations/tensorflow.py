"""Any algorithm as a `tf.distribute.CrossDeviceOps`, for TensorFlow's own strategies."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any, Self

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.backends.registry import backend_named
from crossdevice.errors import DtypeMismatchError, OptionError, ReduceOpError, ShapeMismatchError
from crossdevice.execution.local.combining import needs_host
from crossdevice.execution.local.planning import Planner
from crossdevice.execution.reading.leaf_spec import Dense, LeafSpec
from crossdevice.execution.reading.values import check_agreement
from crossdevice.values.device import Device
from crossdevice.values.distributed import PerReplica
from crossdevice.values.dtypes import PARTS, check_reducible
from crossdevice.values.options import CommunicationOptions, as_options
from crossdevice.values.recipe import Recipe
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.registry import missing_library

try:
    import tensorflow as tf

    # TensorFlow exports none of these: its own algorithms wrap results and read destinations with them, and
    # its own functions with a gradient are recorded so.
    from tensorflow.python.distribute.cross_device_ops import get_devices_from
    from tensorflow.python.distribute.distribute_utils import regroup
    from tensorflow.python.distribute.values import Mirrored
    from tensorflow.python.eager import record

    from crossdevice.backends.tensorflow_backend import TensorflowBackend
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{__name__} needs {missing_library(error)}", name=error.name) from None

__all__ = ["as_tensorflow"]

_HOOKS = ("reduce_implementation", "batch_reduce_implementation")


def as_tensorflow(
    ops: CrossDeviceOps, options: CommunicationOptions | None = None
) -> tf.distribute.CrossDeviceOps:
    """Returns an algorithm for `tf.distribute.MirroredStrategy(cross_device_ops=as_tensorflow(ops))`.

    Eager tensors take the fused pass. Inside a `tf.function` the algorithm's plan becomes operations of
    the graph, pack by pack: copies under `tf.device`, additions in the plan's order, wide ones unless
    `options.precision` is `"fast"`. What the graph's operations cannot compute (`"exact"` sums, means of
    64-bit integers) is left to one `tf.numpy_function` for each value. `IndexedSlices`, values whose shape
    is unknown while tracing, `gather`, and everything if there is an `accumulation_fn`, go to TensorFlow's
    own ReductionToOneDevice. All of it is differentiated, by every tape.

    TensorFlow does not always ask. Its `MirroredStrategy` makes a ReductionToOneDevice of its own for
    `reduce_to` (and so `Strategy.reduce`) with a destination on a CPU or on devices other than the
    value's, and for every int32 value. `batch_reduce_to` and `ReplicaContext.all_reduce`, by which Keras
    reduces gradients, do ask, except that one value on its own device is returned unseen, as is a
    captured constant: one object on all replicas, which TensorFlow does not sum.
    """
    if not isinstance(ops, CrossDeviceOps):
        raise OptionError(
            "expected an instance of CrossDeviceOps, as in as_tensorflow(crossdevice.RingAllReduce()); "
            f"got {ops!r}"
        )
    for hook in _HOOKS:
        if getattr(type(ops), hook) is not getattr(CrossDeviceOps, hook):
            raise OptionError(
                f"{type(ops).__name__} overrides {hook}, which has no plan to build a graph from; "
                "subclass tf.distribute.CrossDeviceOps instead"
            )
    return _AsTensorflow(ops, as_options(options))


class GraphBackend(TensorflowBackend):
    """Tensors of a graph: every device has a memory of its own, so that plans are carried out in full."""

    def memory_of(self, device: Device) -> str:
        """Returns the device itself, since TensorFlow shares memory by itself where it can."""
        return device.canonical

    def round_once(self, wide: Any, dtype: str) -> Any:
        """Returns the same bits with the gradient of a cast; the bit operations themselves have none."""

        @tf.custom_gradient
        def rounded(wide: Any) -> tuple[Any, Any]:
            return super(GraphBackend, self).round_once(wide, dtype), lambda grad: tf.cast(grad, wide.dtype)

        with tf.device(wide.device):
            return rounded(wide)


class _UnplacedDevice(Device):
    """The part of a device's name that a graph gives; TensorFlow completes it when it places operations."""

    __slots__ = ()

    def __new__(cls, name: str) -> Self:
        device = str.__new__(cls, name)
        for part, known in zip(Device.__slots__, Device.parse(name)._parts, strict=True):
            object.__setattr__(device, part, known)
        return device

    def __str__(self) -> str:
        return self.canonical or "not placed yet"


@functools.cache
def _device(name: str) -> Device:
    device = Device.parse(name)
    return device if device == name else _UnplacedDevice(name)


def _name_for_tensorflow(device: Device) -> str:
    """Returns the name without a process, which TensorFlow adds, unless the device names another process."""
    is_of_this_process = (device.job, device.replica, device.task) == ("localhost", 0, 0)
    return f"/{device.rpartition('/')[2]}" if is_of_this_process else device.canonical


_GRAPH = GraphBackend()


_TENSORFLOWS = tf.distribute.ReductionToOneDevice()
"""Made now and copied later: its class cannot be called once TensorFlow's name for it stands for another."""


class _AsTensorflow(tf.distribute.CrossDeviceOps):
    """The algorithm in the form MirroredStrategy takes."""

    def __init__(self, ops: CrossDeviceOps, options: CommunicationOptions) -> None:
        super().__init__()
        self._ops = ops
        self._options = options
        self._own = copy.copy(_TENSORFLOWS)
        if ops.reduce_to_device is not None:
            self._own.reduce_to_device = _name_for_tensorflow(ops.reduce_to_device)
            ops = copy.copy(ops)
            ops.reduce_to_device = _device(self._own.reduce_to_device)
        self._planner = Planner(ops)
        if ops.accumulation_fn is not None:
            self._own.accumulation_fn = ops.accumulation_fn

    def __repr__(self) -> str:
        return f"as_tensorflow({self._ops!r})"

    def reduce_implementation(
        self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any
    ) -> Any:
        """Reduces a batch of one."""
        return self.batch_reduce_implementation(reduce_op, [(per_replica_value, destinations)], options)[0]

    def batch_reduce_implementation(
        self, reduce_op: Any, value_destination_pairs: Sequence[tuple[Any, Any]], options: Any
    ) -> list[Any]:
        """Reduces dense values of known shape by our plan, all others by TensorFlow."""
        op = ReduceOp(getattr(reduce_op, "name", reduce_op))
        chosen = self._options.merge(CommunicationOptions(bytes_per_pack=options.bytes_per_pack))
        leaves = [
            None if self._ops.accumulation_fn else _dense(value, destinations, op)
            for value, destinations in value_destination_pairs
        ]
        reduced = iter(self._reduced([leaf for leaf in leaves if leaf is not None], op, chosen))
        return [
            self._own.reduce_implementation(tf.distribute.ReduceOp(op.name), value, destinations, options)
            if leaf is None
            else regroup(next(reduced), wrap_class=Mirrored)
            for leaf, (value, destinations) in zip(leaves, value_destination_pairs, strict=True)
        ]

    def _reduced(
        self, dense: Sequence[Dense], op: ReduceOp, options: CommunicationOptions
    ) -> Sequence[tuple[Any, ...]]:
        if not dense:
            return []
        if tf.executing_eagerly():
            return (
                self._recorded(dense, op, options)
                if record.could_possibly_record()
                else self._combined(dense, op, options)
            )
        is_on_host = [_needs_host(leaf.spec.dtype, op, options) for leaf in dense]
        planned = [leaf for leaf, is_left in zip(dense, is_on_host, strict=True) if not is_left]
        results = iter(self._combined(planned, op, options))
        return [
            self._on_host(leaf, op, options) if is_left else next(results)
            for leaf, is_left in zip(dense, is_on_host, strict=True)
        ]

    def _combined(
        self, dense: Sequence[Dense], op: ReduceOp, options: CommunicationOptions
    ) -> Sequence[tuple[Any, ...]]:
        prepared = self._planner.prepared(tuple(leaf.spec for leaf in dense), op, options)
        return prepared.run([leaf.arrays for leaf in dense], [None] * len(dense))

    def _recorded(
        self, dense: Sequence[Dense], op: ReduceOp, options: CommunicationOptions
    ) -> Sequence[tuple[Any, ...]]:
        """Returns the results of the fused pass, unseen by tapes, recorded as one operation per value.

        Not by `tf.custom_gradient`, which would copy all results to one device.
        """
        with record.stop_recording():
            results = self._combined(dense, op, options)
        for leaf, result in zip(dense, results, strict=True):
            back = functools.partial(self._gradients, leaf.spec, op, options)
            record.record_operation("CrossDeviceReduce", list(result), list(leaf.arrays), back)
        return results

    def _gradients(
        self, spec: LeafSpec, op: ReduceOp, options: CommunicationOptions, *grads: Any
    ) -> Sequence[Any]:
        """Returns the sum of the results' gradients, on the devices of the values; itself differentiable."""
        if op not in (ReduceOp.SUM, ReduceOp.MEAN):
            raise ReduceOpError(f"{op.name} has no gradient here; those of SUM and MEAN are known")
        tensors = [tf.convert_to_tensor(grad) for grad in grads]
        back = LeafSpec(
            spec.backend, spec.backend.dtype_of(tensors[0]), spec.shape, spec.destinations, spec.devices
        )
        (summed,) = self._reduced([Dense(tensors, back)], ReduceOp.SUM, options)
        if op is ReduceOp.SUM:
            return summed
        return tuple(map(functools.partial(_divided, number=len(spec.devices)), summed))

    def _on_host(self, leaf: Dense, op: ReduceOp, options: CommunicationOptions) -> tuple[Any, ...]:
        """Computes a value on the host when the graph runs, and copies it to the destinations."""
        spec = leaf.spec
        backend = spec.backend

        def reduced(*arrays: Any) -> Any:
            return self._ops.reduce(op, PerReplica(arrays), "cpu:0", options)

        @tf.custom_gradient
        def call(*tensors: Any) -> tuple[Any, Any]:
            result = tf.numpy_function(reduced, tensors, spec.result_dtype(op), stateful=False)
            result.set_shape(spec.shape)
            return result, lambda grad: self._gradients(one, op, options, grad)

        host = _device("/device:CPU:0")
        one = LeafSpec(backend, spec.dtype, spec.shape, (host,) * len(spec.devices), (host,))
        with tf.device(host):
            result = call(*leaf.arrays)
        return tuple(backend.copy(result, device) for device in spec.destinations)

    def _gather_implementation(self, *arguments: Any) -> Any:
        return self._own._gather_implementation(*arguments)


def _dense(value: Any, destinations: Any, op: ReduceOp) -> Dense | None:
    """Returns a checked leaf; None if it is sparse or its shape is not known."""
    tensors = [part.read_value() if isinstance(part, tf.Variable) else part for part in value.values]
    if not all(isinstance(tensor, tf.Tensor) and tensor.shape.is_fully_defined() for tensor in tensors):
        return None
    backend = backend_named("tensorflow") if tf.executing_eagerly() else _GRAPH
    devices = tuple(_device(tensor.device) for tensor in tensors)
    shapes = [backend.shape_of(tensor) for tensor in tensors]
    dtypes = [backend.dtype_of(tensor) for tensor in tensors]
    check_agreement(dtypes, devices, "dtype", DtypeMismatchError)
    check_agreement(shapes, devices, "shape", ShapeMismatchError)
    check_reducible(dtypes[0], op, f"replica 0 ({devices[0]})")
    targets = tuple(map(_device, get_devices_from(destinations)))
    return Dense(tensors, LeafSpec(backend, dtypes[0], shapes[0], devices, targets))


def _divided(tensor: Any, number: int) -> Any:
    with tf.device(tensor.device):
        return tensor / tf.cast(number, tensor.dtype)


def _needs_host(dtype: str, op: ReduceOp, options: CommunicationOptions) -> bool:
    recipe = (
        Recipe(ReduceOp.SUM, options.precision, 2) if op is ReduceOp.MEAN else Recipe(op, options.precision)
    )
    return needs_host(recipe, PARTS.get(dtype, dtype) if recipe.op is ReduceOp.SUM else dtype)  # part by part
