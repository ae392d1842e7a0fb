"""Values of which one replica's part is another, or missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crossdevice.backends.registry import backend_of_type
from crossdevice.errors import OptionError
from crossdevice.strategies.data.regrouping import map_structure
from crossdevice.values.delegation import operand_of
from crossdevice.values.device import device_of, host_device
from crossdevice.values.distributed import DistributedValues, PerReplica
from crossdevice.values.indexed_slices import IndexedSlices


def with_component_changed(value: Any, replica: int, change: Callable[[Any], Any]) -> Any:
    """A structure of values in which each array of a replica is what `change` makes of a copy of it."""

    def changed(leaf: Any) -> Any:
        if not isinstance(leaf, DistributedValues):
            _check_replica(replica, 1)
            return _changed_array(leaf, change)
        _check_replica(replica, len(leaf.values))
        values = list(leaf.values)
        values[replica] = map_structure(lambda array: _changed_array(array, change), values[replica])
        return PerReplica.of(tuple(values), leaf.devices)

    return map_structure(changed, value)


def without_component(value: Any, replica: int) -> Any:
    """A structure of values in which a replica does not count."""

    def remaining(leaf: Any) -> Any:
        count = len(leaf.values) if isinstance(leaf, DistributedValues) else 1
        _check_replica(replica, count)
        if count == 1:
            raise OptionError("the only replica cannot be dropped")
        kept = [other for other in range(count) if other != replica]
        return PerReplica.of(
            tuple(leaf.values[other] for other in kept), tuple(leaf.devices[other] for other in kept)
        )

    return map_structure(remaining, value)


def _check_replica(replica: int, count: int) -> None:
    if replica >= count:
        raise OptionError(f"replica {replica} is to be faulty, but the value has {count} in this process")


def _changed_array(array: Any, change: Callable[[Any], Any]) -> Any:
    array = operand_of(array)
    if isinstance(array, IndexedSlices):
        return array.with_parts(_changed_array(array.values, change), array.indices, array.dense_shape)
    backend = backend_of_type(type(array))
    return change(array if backend is None else backend.copy(array, device_of(array) or host_device(0)))
