"""Any algorithm as a `tf.distribute.CrossDeviceOps`, for TensorFlow's own strategies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.backends.registry import backend_named
from crossdevice.errors import ConversionError, DtypeMismatchError, OptionError, ShapeMismatchError
from crossdevice.execution.local.accumulation import accumulated
from crossdevice.execution.local.planning import Planner
from crossdevice.execution.reading.leaf_spec import Dense, LeafSpec
from crossdevice.execution.reading.values import check_agreement
from crossdevice.values.device import Device
from crossdevice.values.dtypes import check_reducible
from crossdevice.values.libraries import missing_library
from crossdevice.values.options import CommunicationOptions, as_options
from crossdevice.values.reduce_op import ReduceOp

try:
    import tensorflow as tf

    # TensorFlow exports neither of these: its own algorithms wrap results and read destinations with them.
    from tensorflow.python.distribute.cross_device_ops import get_devices_from
    from tensorflow.python.distribute.distribute_utils import regroup
    from tensorflow.python.distribute.values import Mirrored

    from crossdevice.backends.tensorflow_backend import TensorflowBackend
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{__name__} needs {missing_library(error)}", name=error.name) from None

__all__ = ["as_tensorflow"]

_HOOKS = ("reduce_implementation", "batch_reduce_implementation")


def as_tensorflow(
    ops: CrossDeviceOps, options: CommunicationOptions | None = None
) -> tf.distribute.CrossDeviceOps:
    """An algorithm for `tf.distribute.MirroredStrategy(cross_device_ops=as_tensorflow(ops))`.

    Eager tensors take the fused pass. Inside a `tf.function` the algorithm's plan becomes operations of
    the graph, pack by pack: copies under `tf.device`, additions in the plan's order, wide ones unless
    `options.precision` is `"fast"`; `"exact"` sums cannot be had there. `IndexedSlices`, and values whose
    shape is unknown while tracing, go to TensorFlow's own ReductionToOneDevice; so does `gather`.

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
        """TensorFlow shares memory by itself where it can."""
        return str(device)

    def to_host(self, array: Any) -> Any:  # noqa: ARG002
        """A graph cannot reach the host's arithmetic."""
        raise ConversionError(
            "precision='exact' and means of 64-bit integers need the host's arithmetic, which a tf.function "
            "cannot reach; use 'accurate' (for such integers 'fast') or reduce outside of it"
        )


_GRAPH = GraphBackend()


class _AsTensorflow(tf.distribute.CrossDeviceOps):
    """What MirroredStrategy holds."""

    def __init__(self, ops: CrossDeviceOps, options: CommunicationOptions) -> None:
        super().__init__()
        self._ops = ops
        self._options = options
        self._planner = Planner(ops)
        where = None if ops.reduce_to_device is None else ops.reduce_to_device.canonical
        self._own = tf.distribute.ReductionToOneDevice(where)

    def __repr__(self) -> str:
        return f"as_tensorflow({self._ops!r})"

    def reduce_implementation(
        self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any
    ) -> Any:
        """A batch of one."""
        return self.batch_reduce_implementation(reduce_op, [(per_replica_value, destinations)], options)[0]

    def batch_reduce_implementation(
        self, reduce_op: Any, value_destination_pairs: Sequence[tuple[Any, Any]], options: Any
    ) -> list[Any]:
        """Dense values of known shape by our plan, all others by TensorFlow."""
        op = ReduceOp(getattr(reduce_op, "name", reduce_op))
        chosen = self._options.merge(CommunicationOptions(bytes_per_pack=options.bytes_per_pack))
        leaves = [_dense(value, destinations, op) for value, destinations in value_destination_pairs]
        reduced = iter(self._reduced([leaf for leaf in leaves if leaf is not None], op, chosen))
        return [
            self._own.reduce(tf.distribute.ReduceOp(op.name), value, destinations, options)
            if leaf is None
            else regroup(next(reduced), wrap_class=Mirrored)
            for leaf, (value, destinations) in zip(leaves, value_destination_pairs, strict=True)
        ]

    def _reduced(
        self, dense: Sequence[Dense], op: ReduceOp, options: CommunicationOptions
    ) -> Sequence[tuple[Any, ...]]:
        function, via = self._ops.accumulation_fn, self._ops.reduce_to_device
        if not dense:
            return []
        if function is not None:
            return accumulated(dense, function, via, op, options.precision)
        prepared = self._planner.prepared(tuple(leaf.spec for leaf in dense), op, options)
        return prepared.run([leaf.arrays for leaf in dense], [None] * len(dense))

    def _gather_implementation(self, *arguments: Any) -> Any:
        return self._own._gather_implementation(*arguments)


def _dense(value: Any, destinations: Any, op: ReduceOp) -> Dense | None:
    """A checked leaf; None if it is sparse or its shape is not known."""
    tensors = [part.read_value() if isinstance(part, tf.Variable) else part for part in value.values]
    if not all(isinstance(tensor, tf.Tensor) and tensor.shape.is_fully_defined() for tensor in tensors):
        return None
    backend = backend_named("tensorflow") if tf.executing_eagerly() else _GRAPH
    devices = tuple(Device.parse(tensor.device) for tensor in tensors)
    shapes = [backend.shape_of(tensor) for tensor in tensors]
    dtypes = [backend.dtype_of(tensor) for tensor in tensors]
    check_agreement(dtypes, devices, "dtype", DtypeMismatchError)
    check_agreement(shapes, devices, "shape", ShapeMismatchError)
    check_reducible(dtypes[0], op, f"replica 0 ({devices[0]})")
    targets = tuple(map(Device.parse, get_devices_from(destinations)))
    return Dense(tensors, LeafSpec(backend, dtypes[0], shapes[0], devices, targets))
