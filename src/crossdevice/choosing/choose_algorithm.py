"""The one question: which algorithm? By the devices, or by predicted and measured cost."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from pathlib import Path

from crossdevice.choosing.by_cost import choice_by_cost
from crossdevice.choosing.by_devices import Choice, choice_by_devices
from crossdevice.costs.topology import Topology
from crossdevice.errors import OptionError
from crossdevice.values.device import Device
from crossdevice.values.options import whole_number


def choose_algorithm(
    devices: int | Sequence[Device | str],
    topology: str | Path | Topology | None = None,
    num_bytes: int | None = None,
    *,
    precision: str = "accurate",
    measured: str | Path | None = None,
) -> Choice:
    """Chooses the algorithm for an all-reduce on these devices, and gives the reason.

    Without a topology the types of devices decide, as for a strategy without `cross_device_ops`:

    With a topology and a size it chooses the fastest, by the cost model or by measurements:

    This choice is among algorithms that give the same bits under `"accurate"` and `"exact"`, so never NCCL.
    Under `"fast"` the bits depend on the algorithm: choose once and keep the choice.

    Args:
        devices: the devices or, with a topology, their number.
        topology: a name, a TOML file or a Topology.
        num_bytes: the size of the array on each device; required with a topology.
        precision: as in `CommunicationOptions`; it decides how much travels.
        measured: a JSON file `{"measured": [{"algorithm", "devices", "bytes", "seconds"}, ...]}`; where it
            has this number of devices and a size within a factor of 2, it decides instead of the model.

    Returns:
        A `Choice` with the `name` of the algorithm, the `reason`, and an object of its class by `make()`.

    Raises:
        OptionError: a number is missing or outside its range, or the measurements cannot be read.
        TopologyError: the topology is unknown.
        DeviceError: a device name cannot be read, or there is no such device.

    >>> choose_algorithm(["cpu:0", "cpu:1"]).name
    'direct'

    >>> choose_algorithm(8, "hgx_h100", 1 << 30).name
    'direct'
    """
    if topology is not None:
        count = len(devices) if isinstance(devices, Sized) else whole_number("devices", devices)
        return choice_by_cost(count, topology, num_bytes, precision=precision, measured=measured)
    if num_bytes is not None or measured is not None:
        raise OptionError("num_bytes and measured are for a choice by cost, which needs a topology too")
    if not isinstance(devices, Sized) or not devices:
        raise OptionError(f"without a topology, expected a list of one device or more; got {devices!r}")
    return choice_by_devices([Device.parse(device) for device in devices])
