"""The names of TensorFlow 1.9 to 1.14 and 2.2: CrossTowerOps, PerDevice, CollectiveHints.

They translate and then call today's algorithms. Differences kept from that time: the operation of a tower
class is a `VariableAggregation`, results are always Mirrored, and destinations may be a list of device
strings or None, which means "where the value is".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from crossdevice.algorithms import all_reduce_cross_device_ops as today
from crossdevice.algorithms import base as algorithms
from crossdevice.algorithms.reduction_to_one_device import ReductionToOneDevice
from crossdevice.errors import ConversionError, OptionError
from crossdevice.strategies import mirrored as strategies
from crossdevice.values.device import Device, device_of, host_device
from crossdevice.values.distributed import (
    DistributedValues,
    Mirrored,
    PerReplica,
    as_distributed,
    destinations_on,
)
from crossdevice.values.nesting import first_leaf
from crossdevice.values.options import CollectiveHints as CollectiveHints
from crossdevice.values.options import whole_number
from crossdevice.values.quantities import kind_text
from crossdevice.values.reduce_op import ReduceOp, VariableAggregation

MAX_GPUS = 4096


class PerDevice(PerReplica):
    """A PerReplica written as a dict from device names to values.

    Args:
        index: the value of each device, by the device's name.

    Raises:
        DeviceError: a device name cannot be read, or there is no such device.

    >>> PerDevice({"/cpu:0": 1.0, "/cpu:1": 3.0}).devices
    (Device('cpu:0'), Device('cpu:1'))
    """

    __slots__ = ()

    def __init__(self, index: Mapping[Device | str, Any]) -> None:
        if not isinstance(index, Mapping):
            raise ConversionError(f"a PerDevice is a dict from devices to values, got {kind_text(index)}")
        super().__init__(index.values(), list(index))


class CrossTowerOps:
    """The base class of TensorFlow 1.12; subclasses say which of today's algorithms they are."""

    _ops: algorithms.CrossDeviceOps | None = None

    @property
    def cross_device_ops(self) -> algorithms.CrossDeviceOps:
        """The current algorithm, which `MirroredStrategy` takes from here."""
        if self._ops is None:
            raise NotImplementedError(
                f"{type(self).__name__} has no algorithm; use ReductionToOneDeviceCrossTowerOps or "
                "AllReduceCrossTowerOps"
            )
        return self._ops

    def reduce(
        self, aggregation: VariableAggregation | str, per_device_value: Any, destinations: Any
    ) -> Mirrored:
        """Combines a PerDevice (or an array that knows its device) and puts the result on `destinations`.

        Args:
            aggregation: SUM or MEAN.
            per_device_value: a PerDevice, or an array that knows its device.
            destinations: the devices for the result.

        Returns:
            A Mirrored.

        Raises:
            MismatchError: replicas differ in shape, dtype, structure, device or library; the message names
                the odd one out.
            DtypeError: the operation is not defined for this dtype.
            ReduceOpError: the operation is unknown.
            ConversionError: something cannot be read as an array.
            DestinationError: `destinations` names no device.

        >>> ReductionToOneDeviceCrossTowerOps().reduce(
        ...     VariableAggregation.MEAN, PerDevice({"/cpu:0": 1.0, "/cpu:1": 3.0}), ["/cpu:1"]
        ... ).devices
        (Device('cpu:1'),)
        """
        return self._reduced(_operation(aggregation), per_device_value, destinations)

    def batch_reduce(
        self, aggregation: VariableAggregation | str, value_destination_pairs: Sequence[tuple[Any, Any]]
    ) -> list[Mirrored]:
        """Combines a list or tuple of (PerDevice, destinations) tuples.

        Args:
            aggregation: SUM or MEAN.
            value_destination_pairs: a list or tuple of pairs, each as for `reduce`.

        Returns:
            A list of Mirrored.

        Raises:
            MismatchError: replicas differ in shape, dtype, structure, device or library; the message names
                the odd one out.
            DtypeError: the operation is not defined for this dtype.
            ReduceOpError: the operation is unknown.
            ConversionError: something cannot be read as an array.
            DestinationError: `destinations` names no device.
        """
        return self._batch_reduced(_operation(aggregation), value_destination_pairs)

    def broadcast(self, tensor: Any, destinations: Any) -> Mirrored:
        """Copies a value to each destination.

        Args:
            tensor: an array.
            destinations: the devices for the copies.

        Returns:
            A Mirrored.

        Raises:
            ConversionError: something cannot be read as an array.
            DestinationError: `destinations` names no device.
        """
        ops = self._ops or algorithms.CrossDeviceOps()  # which copies, whatever the algorithm
        return _mirrored(ops.broadcast, tensor, _placed(destinations, _per_device(tensor)))

    def _reduced(self, operation: ReduceOp, per_device_value: Any, destinations: Any) -> Mirrored:
        value = _per_device(per_device_value)
        return _mirrored(self.cross_device_ops.reduce, operation, value, _placed(destinations, value))

    def _batch_reduced(
        self, operation: ReduceOp, value_destination_pairs: Sequence[tuple[Any, Any]]
    ) -> list[Mirrored]:
        if not isinstance(value_destination_pairs, (list, tuple)) or not all(
            isinstance(pair, tuple) and len(pair) == 2 for pair in value_destination_pairs
        ):
            raise ConversionError(
                "value_destination_pairs must be a list or a tuple of (PerDevice, destinations) tuples"
            )
        values = [_per_device(value) for value, _ in value_destination_pairs]
        targets = [
            _placed(destinations, value)
            for value, (_, destinations) in zip(values, value_destination_pairs, strict=True)
        ]
        results = self.cross_device_ops.batch_reduce(operation, list(zip(values, targets, strict=True)))
        return [_always_mirrored(result, target) for result, target in zip(results, targets, strict=True)]


class ReductionToOneDeviceCrossTowerOps(CrossTowerOps):
    """The name that ReductionToOneDevice had in TensorFlow 1.12.

    Args:
        reduce_to_device: as in ReductionToOneDevice.
        accumulation_fn: as in ReductionToOneDevice.

    Raises:
        DeviceError: a device name cannot be read, or there is no such device.
    """

    def __init__(
        self,
        reduce_to_device: Device | str | None = None,
        accumulation_fn: Callable[[tuple[Any, ...]], Any] | None = None,
    ) -> None:
        self._ops = ReductionToOneDevice(reduce_to_device, accumulation_fn)


class AllReduceCrossTowerOps(CrossTowerOps):
    """The name that AllReduceCrossDeviceOps had in TensorFlow 1.12.

    Args:
        all_reduce_alg: as in today's class.
        num_packs: as in today's class.
        agg_small_grads_max_bytes: as in today's class.
        agg_small_grads_max_group: as in today's class.

    Raises:
        OptionError: the algorithm is unknown, or a number is outside its range.
    """

    def __init__(
        self,
        all_reduce_alg: str = "nccl",
        num_packs: int = 1,
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
    ) -> None:
        self._ops = today.AllReduceCrossDeviceOps(
            all_reduce_alg, num_packs, agg_small_grads_max_bytes, agg_small_grads_max_group
        )


class CrossDeviceOps(CrossTowerOps):
    """The base class of TensorFlow 1.13 and 1.14: the operation is a ReduceOp, all else is as with towers.

    >>> isinstance(AllReduceCrossDeviceOps("ring"), CrossDeviceOps)
    True
    """

    def reduce(  # type: ignore[override]  # other names, as they were
        self, reduce_op: ReduceOp | str, per_replica_value: Any, destinations: Any
    ) -> Mirrored:
        """Combines a PerReplica (or an array that knows its device) and puts the result on `destinations`.

        Args:
            reduce_op: the operation, as in `CrossDeviceOps.reduce`.
            per_replica_value: a PerReplica, or an array that knows its device.
            destinations: the devices for the result.

        Returns:
            A Mirrored.

        Raises:
            MismatchError: replicas differ in shape, dtype, structure, device or library; the message names
                the odd one out.
            DtypeError: the operation is not defined for this dtype.
            ReduceOpError: the operation is unknown.
            ConversionError: something cannot be read as an array.
            DestinationError: `destinations` names no device.
        """
        return self._reduced(ReduceOp(reduce_op), per_replica_value, destinations)

    def batch_reduce(  # type: ignore[override]
        self, reduce_op: ReduceOp | str, value_destination_pairs: Sequence[tuple[Any, Any]]
    ) -> list[Mirrored]:
        """Combines a list or tuple of (PerReplica, destinations) tuples.

        Args:
            reduce_op: the operation, as in `CrossDeviceOps.reduce`.
            value_destination_pairs: a list or tuple of pairs, each as for `reduce`.

        Returns:
            A list of Mirrored.

        Raises:
            MismatchError: replicas differ in shape, dtype, structure, device or library; the message names
                the odd one out.
            DtypeError: the operation is not defined for this dtype.
            ReduceOpError: the operation is unknown.
            ConversionError: something cannot be read as an array.
            DestinationError: `destinations` names no device.
        """
        return self._batch_reduced(ReduceOp(reduce_op), value_destination_pairs)


class AllReduceCrossDeviceOps(CrossDeviceOps, AllReduceCrossTowerOps):
    """The all-reduce of TensorFlow 1.13 and 1.14.

    Args:
        all_reduce_alg: as in today's class.
        num_packs: as in today's class.
        agg_small_grads_max_bytes: as in today's class.
        agg_small_grads_max_group: as in today's class.

    Raises:
        OptionError: the algorithm is unknown, or a number is outside its range.

    >>> value = PerDevice({"/cpu:0": 1.0, "/cpu:1": 3.0})
    >>> AllReduceCrossDeviceOps("hierarchical_copy").reduce(ReduceOp.MEAN, value, ["/cpu:1"]).devices
    (Device('cpu:1'),)
    """


def MirroredStrategy(  # noqa: N802 - TensorFlow's name
    devices: Sequence[Device | str] | None = None,
    num_gpus: int | None = None,
    cross_tower_ops: CrossTowerOps | algorithms.CrossDeviceOps | None = None,
    **arguments: Any,
) -> strategies.MirroredStrategy:
    """Makes today's MirroredStrategy from the arguments of TensorFlow 1.12.

    Args:
        devices: names of devices, one replica for each.
        num_gpus: uses the first n GPUs, in place of `devices`.
        cross_tower_ops: the algorithm for all reductions.
        arguments: those of today's MirroredStrategy.

    Returns:
        A MirroredStrategy of today.

    Raises:
        OptionError: arguments contradict each other.
        DeviceError: a device name cannot be read, or there is no such device.

    >>> MirroredStrategy(["/cpu:0", "/cpu:1"], cross_tower_ops=ReductionToOneDeviceCrossTowerOps())
    MirroredStrategy(['cpu:0', 'cpu:1'])
    """
    if num_gpus is not None:
        if devices is not None:
            raise OptionError("devices and num_gpus were both given; give one of them")
        number = whole_number("num_gpus", num_gpus)
        if number > MAX_GPUS:
            raise OptionError(
                f"num_gpus is {number}; expected at most {MAX_GPUS}, which is more than one process has: "
                "give the number of GPUs of this machine"
            )
        devices = [Device("cuda", index) for index in range(number)] or None
    if cross_tower_ops is not None:
        arguments["cross_device_ops"] = cross_tower_ops
    return strategies.MirroredStrategy(devices, **arguments)


def _operation(aggregation: VariableAggregation | str) -> ReduceOp:
    """Returns SUM or MEAN, from a VariableAggregation or the strings of TensorFlow 1.11."""
    if isinstance(aggregation, str) and aggregation.upper() in ("SUM", "MEAN"):
        return ReduceOp(aggregation)
    return ReduceOp.from_variable_aggregation(aggregation)


def _per_device(value: Any) -> DistributedValues:
    value = as_distributed(value)
    if isinstance(value, DistributedValues):
        return value
    if value is None:
        raise ConversionError("per_device_value is None; expected a PerDevice or an array")
    return PerReplica.of((value,), (device_of(first_leaf(value)) or host_device(0),))


def _placed(destinations: Any, value: DistributedValues) -> Any:
    if destinations is None:
        return value
    if isinstance(destinations, (list, tuple)) and destinations:
        return destinations_on(destinations)
    return as_distributed(destinations)


def _mirrored(call: Callable[..., Any], *arguments: Any) -> Mirrored:
    return _always_mirrored(call(*arguments), arguments[-1])


def _always_mirrored(result: Any, destinations: Any) -> Mirrored:
    if isinstance(result, Mirrored):
        return result
    if isinstance(destinations, DistributedValues):
        return Mirrored.of((result,), destinations.devices)
    device = Device.parse(destinations) if isinstance(destinations, str) else device_of(destinations)
    return Mirrored.of((result,), (device or host_device(0),))
