"""Reading destinations: on which devices results are wanted."""

from __future__ import annotations

from typing import Any

from crossdevice.backends.registry import backend_of_type
from crossdevice.errors import DestinationError
from crossdevice.values.delegation import PlacedArray
from crossdevice.values.device import Device, device_of, host_device
from crossdevice.values.distributed import DistributedValues, IndexedSlices, as_distributed


def read_destinations(destinations: Any) -> tuple[Device, ...]:
    """The devices of a DistributedValues, in order; the one device of anything else that has one."""
    destinations = as_distributed(destinations)
    if isinstance(destinations, DistributedValues):
        if not destinations.devices:
            raise DestinationError("destinations is a distributed value without components")
        return destinations.devices
    if isinstance(destinations, Device):
        return (destinations,)
    if isinstance(destinations, str) and destinations:
        return (Device.parse(destinations),)
    is_array = hasattr(destinations, "dtype") and backend_of_type(type(destinations)) is not None
    sharding = getattr(destinations, "sharding", None) if is_array else None  # JAX's
    if sharding is not None and len(sharding.device_set) > 1:
        raise DestinationError(
            f"destinations is an array sharded over {len(sharding.device_set)} devices; expected one device"
        )
    if is_array or isinstance(destinations, (IndexedSlices, PlacedArray)):
        return (device_of(destinations) or host_device(0),)
    raise DestinationError(
        f"destinations is {_short_text(destinations)}; expected a DistributedValues, a variable, an array "
        "or a device string (the functions crossdevice.reduce and .broadcast also take lists of them)"
    )


def _short_text(thing: Any) -> str:
    text = repr(thing)
    return text if len(text) <= 80 else f"a {type(thing).__name__}"
