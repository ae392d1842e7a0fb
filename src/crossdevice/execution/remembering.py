"""Calls that were made before: one plain value with known signatures needs no reading and no checks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from types import NoneType
from typing import Any, NamedTuple

from crossdevice.backends.protocol import Array
from crossdevice.backends.registry import backend_of_type
from crossdevice.execution.reduction import PreparedReduction
from crossdevice.values.device import Device
from crossdevice.values.distributed import DistributedValues, Mirrored
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp


class RememberedCall(NamedTuple):
    """A prepared reduction of one dense leaf, with all it takes to wrap the result."""

    prepared: PreparedReduction
    destinations: tuple[Device, ...]

    def __call__(self, arrays: Sequence[Array]) -> Any:
        """Reduces one array per replica."""
        (results,) = self.prepared.run((arrays,), (None,))
        return results[0] if len(results) == 1 else Mirrored.of(results, self.destinations)


def call_key(reduce_op: Any, value: Any, destinations: Any, options: Any) -> Hashable | None:
    """What two calls must share to be the same but for the elements; None for calls not worth remembering."""
    if not isinstance(value, DistributedValues) or not value.values:
        return None
    if not isinstance(reduce_op, (str, ReduceOp)):
        return None
    if not isinstance(options, (CommunicationOptions, NoneType)):
        return None
    backend = backend_of_type(type(value.values[0]))
    where: Hashable
    if destinations is value:
        where = None
    elif isinstance(destinations, str):
        where = destinations
    elif isinstance(destinations, DistributedValues):
        where = destinations.devices
    else:
        return None
    if backend is None:
        return None
    try:
        return (reduce_op, options, value.given_devices, where, *map(backend.signature, value.values))
    except (AttributeError, RuntimeError):  # not all are arrays of that library
        return None
