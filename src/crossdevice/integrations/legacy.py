"""The names of TensorFlow 1.9 to 1.12 and 2.2: CrossTowerOps, PerDevice, CollectiveHints.

They translate and then call today's algorithms. Differences kept from that time: the operation is a
`VariableAggregation`, results are always Mirrored, and destinations may be a list of device strings
or None, which means "where the value is".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from crossdevice.algorithms.all_reduce_cross_device_ops import AllReduceCrossDeviceOps
from crossdevice.algorithms.base import CrossDeviceOps
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
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp, VariableAggregation


class PerDevice(PerReplica):
    """A PerReplica written as a dict from device names to values.

    >>> PerDevice({"/cpu:0": 1.0, "/cpu:1": 3.0}).devices
    (Device('cpu:0'), Device('cpu:1'))
    """

    __slots__ = ()

    def __init__(self, index: Mapping[Device | str, Any]) -> None:
        if not isinstance(index, Mapping):
            raise ConversionError(
                f"a PerDevice is a dict from devices to values, got a {type(index).__name__}"
            )
        super().__init__(index.values(), list(index))


def CollectiveHints(  # noqa: N802 - TensorFlow's name
    bytes_per_pack: int = 0, timeout_seconds: float | timedelta | None = None
) -> CommunicationOptions:
    """What `experimental_hints` took in TensorFlow 2.2: today's options under their old name."""
    return CommunicationOptions(bytes_per_pack, timeout_seconds)


class CrossTowerOps:
    """The base class of TensorFlow 1.12; subclasses say which of today's algorithms they are."""

    _ops: CrossDeviceOps = CrossDeviceOps()

    @property
    def cross_device_ops(self) -> CrossDeviceOps:
        """Today's algorithm; `MirroredStrategy` takes it from here."""
        return self._ops

    def reduce(
        self, aggregation: VariableAggregation | str, per_device_value: Any, destinations: Any
    ) -> Mirrored:
        """Combines a PerDevice (or an array that knows its device) and puts the result on `destinations`.

        >>> ReductionToOneDeviceCrossTowerOps().reduce(
        ...     VariableAggregation.MEAN, PerDevice({"/cpu:0": 1.0, "/cpu:1": 3.0}), ["/cpu:1"]
        ... ).devices
        (Device('cpu:1'),)
        """
        value = _per_device(per_device_value)
        return _mirrored(self._ops.reduce, _operation(aggregation), value, _placed(destinations, value))

    def batch_reduce(
        self, aggregation: VariableAggregation | str, value_destination_pairs: Sequence[tuple[Any, Any]]
    ) -> list[Mirrored]:
        """Combines a list or tuple of (PerDevice, destinations) tuples."""
        operation = _operation(aggregation)
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
        results = self._ops.batch_reduce(operation, list(zip(values, targets, strict=True)))
        return [_always_mirrored(result, target) for result, target in zip(results, targets, strict=True)]

    def broadcast(self, tensor: Any, destinations: Any) -> Mirrored:
        """Copies a value to each destination."""
        return _mirrored(self._ops.broadcast, tensor, _placed(destinations, _per_device(tensor)))


class ReductionToOneDeviceCrossTowerOps(CrossTowerOps):
    """Today's ReductionToOneDevice."""

    def __init__(
        self,
        reduce_to_device: Device | str | None = None,
        accumulation_fn: Callable[[tuple[Any, ...]], Any] | None = None,
    ) -> None:
        self._ops = ReductionToOneDevice(reduce_to_device, accumulation_fn)


class AllReduceCrossTowerOps(CrossTowerOps):
    """Today's AllReduceCrossDeviceOps."""

    def __init__(
        self,
        all_reduce_alg: str = "nccl",
        num_packs: int = 1,
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
    ) -> None:
        self._ops = AllReduceCrossDeviceOps(
            all_reduce_alg, num_packs, agg_small_grads_max_bytes, agg_small_grads_max_group
        )


def MirroredStrategy(  # noqa: N802 - TensorFlow's name
    devices: Sequence[Device | str] | None = None,
    num_gpus: int | None = None,
    cross_tower_ops: CrossTowerOps | CrossDeviceOps | None = None,
    **arguments: Any,
) -> strategies.MirroredStrategy:
    """Today's MirroredStrategy by the arguments of TensorFlow 1.12: `num_gpus` are the first so many.

    >>> MirroredStrategy(["/cpu:0", "/cpu:1"], cross_tower_ops=ReductionToOneDeviceCrossTowerOps())
    MirroredStrategy(['cpu:0', 'cpu:1'])
    """
    if num_gpus is not None:
        if devices is not None:
            raise OptionError("devices and num_gpus were both given; give one of them")
        devices = [Device("cuda", index) for index in range(num_gpus)]
    if cross_tower_ops is not None:
        arguments["cross_device_ops"] = cross_tower_ops
    return strategies.MirroredStrategy(devices, **arguments)


def _operation(aggregation: VariableAggregation | str) -> ReduceOp:
    """SUM or MEAN, as a VariableAggregation or as the strings of TensorFlow 1.11."""
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
