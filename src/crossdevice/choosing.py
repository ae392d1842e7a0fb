"""Choice of an algorithm: by the types of devices, or by predicted or measured cost."""

from __future__ import annotations

import json
import math
import numbers
import sys
import types
import warnings
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import NamedTuple

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.algorithms.nccl_all_reduce import NcclAllReduce
from crossdevice.algorithms.registry import ALGORITHMS
from crossdevice.costs.simulation import simulate
from crossdevice.costs.timing import Duration, engine_duration, fused_pass_duration, rounds_duration
from crossdevice.costs.topology import Topology, read_topology
from crossdevice.errors import OptionError, PlanError
from crossdevice.plans.builder import PlanBuilder
from crossdevice.plans.ledger import proved_plan
from crossdevice.plans.plan import Plan
from crossdevice.values.device import Device
from crossdevice.values.options import PRECISIONS, whole_number
from crossdevice.values.quantities import time_text


class Choice(NamedTuple):
    """An algorithm, why it was chosen and, if by cost, the seconds that each would take, fastest first."""

    name: str
    cross_device_ops: CrossDeviceOps
    reason: str
    seconds: Mapping[str, float] = types.MappingProxyType({})


def chosen(name: str, reason: str, seconds: Mapping[str, float] = types.MappingProxyType({})) -> Choice:
    """Returns the algorithm of that name with its default settings, as a choice."""
    return Choice(name, ALGORITHMS.load(name)(), reason, seconds)


def choice_by_devices(devices: Sequence[Device]) -> Choice:
    """Chooses for one replica on each of these devices; NCCL's algorithm where it is available.

    >>> choice_by_devices([Device("cuda:0"), Device("cuda:1")]).name
    'nccl'
    """
    kinds = {device.type for device in devices}
    distinct = set(devices)
    if len(devices) == 1:
        return chosen("one_device", "one replica, so values are only copied")
    if kinds == {"cpu"}:
        reason = "all devices share the host's memory, where every algorithm becomes one fused pass"
        return chosen("direct", reason)
    if len(distinct) == 1:
        return chosen("one_device", f"all replicas are on {devices[0]}, so nothing has to leave it")
    if kinds != {"cuda"}:
        names = ", ".join(sorted(kinds))
        return chosen("one_device", f"devices of these types share no collective engine: {names}")
    if len(distinct) < len(devices):
        reason = "several replicas are on one GPU, which NCCL refuses; each replica sums its own shard"
        return chosen("direct", reason)
    if sys.platform != "linux":
        reason = f"NCCL exists on Linux only, not on {sys.platform}; each GPU sums its own shard"
        return chosen("direct", reason)
    return chosen("nccl", "one replica on each GPU, which NCCL reduces over their links")


MAX_PLANNED_DEVICES = 16
"""Number of devices above which algorithms are timed by their rounds: a ring's plan grows quadratically."""

FLOAT_BYTES = 4
"""Plans count elements; predictions are for 32-bit ones."""


def devices_of(topology: Topology) -> tuple[Device, ...]:
    """Returns a topology's devices by name, node by node."""
    size = topology.devices_per_node
    numbers = range(topology.num_devices)
    return tuple(Device(topology.device_type, number % size, task=number // size) for number in numbers)


def planned_all_reduce(algorithm: CrossDeviceOps, topology: Topology, num_bytes: int) -> Plan:
    """Returns the plan of an all-reduce of `num_bytes` on all devices of a topology."""
    devices = devices_of(topology)
    build = PlanBuilder(devices, max(1, num_bytes // FLOAT_BYTES))
    if len(devices) == 1:
        return build.plan(build.inputs)
    return proved_plan(algorithm, build, devices)


def knows_rounds(algorithm: CrossDeviceOps) -> bool:
    """Returns True if the algorithm can be timed on thousands of devices."""
    return type(algorithm).plan_rounds is not CrossDeviceOps.plan_rounds


def predicted(
    algorithm: CrossDeviceOps, topology: Topology, num_bytes: int, *, precision: str = "accurate"
) -> Duration:
    """Returns the time of an all-reduce and its parts; for shared memory, that of one fused pass.

    Under `"fast"` partial sums travel; else the contributions they are made of.
    """
    count = topology.num_devices
    if topology.shares_memory:
        return fused_pass_duration(count, count, num_bytes, topology)
    if (
        topology.engine is not None
        and isinstance(algorithm, NcclAllReduce)
        and algorithm.fallback_reason(devices_of(topology)) is None
    ):
        return engine_duration(topology, num_bytes)
    unsummed = precision != "fast"
    rounds = algorithm.plan_rounds(topology, num_bytes) if count > MAX_PLANNED_DEVICES else None
    if rounds is not None:
        return rounds_duration(rounds, topology, unsummed=unsummed)
    plan = planned_all_reduce(algorithm, topology, num_bytes)
    return simulate(plan, topology, FLOAT_BYTES, unsummed=unsummed).duration


NEAR_FACTOR = 2.0
"""Measurements count for sizes up to this factor smaller or larger."""

MEASURED_KEYS = ("algorithm", "devices", "bytes", "seconds")
"""The keys of each measurement in a file."""


def choice_by_cost(
    num_devices: int,
    topology: str | Path | Topology,
    num_bytes: int | None,
    *,
    precision: str = "accurate",
    measured: str | Path | None = None,
) -> Choice:
    """Returns the fastest algorithm for an all-reduce of this size, with its reason."""
    if not (isinstance(num_bytes, (int, numbers.Real)) and num_bytes >= 1):
        raise OptionError(f"num_bytes must be a number, 1 or more; got {num_bytes!r}")
    if precision not in PRECISIONS:
        raise OptionError(f"precision must be one of {', '.join(PRECISIONS)}; got {precision!r}")
    machine = topology if isinstance(topology, Topology) else read_topology(topology)
    known = {} if measured is None else measured_seconds(measured, num_devices, num_bytes)
    if known:
        return _fastest(known, f"measured in {Path(str(measured)).name}")
    durations = predicted_durations(machine.with_devices(num_devices), num_bytes, precision=precision)
    choice = _fastest(
        {name: each.seconds for name, each in durations.items()}, f"predicted on {machine.name}"
    )
    own = durations[choice.name]
    return choice._replace(reason=f"{choice.reason}; {_explained(own)}") if own.seconds else choice


def is_engine(name: str) -> bool:
    """Returns True if the algorithm leaves the sum to an engine; no choice here may change bits."""
    try:
        return bool(ALGORITHMS.load(name)().uses_engine)
    except OptionError:  # it is not installed
        return False


def predicted_durations(
    topology: Topology, num_bytes: int, *, precision: str = "accurate"
) -> dict[str, Duration]:
    """Predicts the times of all algorithms but engines; on many devices only of those with known rounds.

    One that cannot be loaded or planned is left out with a warning: any installed package may bring one.
    """
    found: dict[str, Duration] = {}
    for name in ALGORITHMS:
        try:
            one = ALGORITHMS.load(name)()
            if one.uses_engine:
                continue
            if topology.num_devices <= MAX_PLANNED_DEVICES or knows_rounds(one):
                found[name] = predicted(one, topology, num_bytes, precision=precision)
        except (OptionError, PlanError) as error:
            warnings.warn(f"the algorithm {name!r} is left out: {error}", stacklevel=3)
    return found


def measured_seconds(path: str | Path, num_devices: int, num_bytes: int) -> dict[str, float]:
    """Returns the measurements nearest in size for this number of devices; none if they are too far away."""
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))["measured"]
        lacking = [[key for key in MEASURED_KEYS if key not in row] for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(f"measurements {str(path)!r} cannot be read: {error!r}") from None
    for number, keys in enumerate(lacking):
        if keys:
            raise OptionError(
                f"measurements {str(path)!r}: entry {number} of 'measured' lacks {', '.join(keys)}; "
                f"got {rows[number]!r}"
            )
    rows = [row for row in rows if row["devices"] == num_devices]
    factors = {row["bytes"]: abs(math.log(row["bytes"] / num_bytes)) for row in rows}
    nearest = min(factors, key=factors.__getitem__, default=None)
    if nearest is None or factors[nearest] > math.log(NEAR_FACTOR):
        return {}
    near = {row["algorithm"]: float(row["seconds"]) for row in rows if row["bytes"] == nearest}
    return {name: seconds for name, seconds in near.items() if not is_engine(name)}


def _fastest(seconds: Mapping[str, float], evidence: str) -> Choice:
    order = dict(sorted(seconds.items(), key=lambda item: item[1]))
    first, *others = order
    reason = f"{first} is fastest, {evidence}: {time_text(order[first])}"
    if others and order[first]:  # one device takes no time
        reason += f"; next is {others[0]} at {order[others[0]] / order[first]:.2f} times that"
    return chosen(first, reason, order)


def _explained(duration: Duration) -> str:
    """Explains which part of the time is largest, and which algorithm wins because of it."""
    shares = {
        "latency, so few rounds win": duration.latency_seconds,
        "bytes on links, so little traffic on the busiest link wins": duration.bandwidth_seconds,
        "additions, so spreading them over devices wins": duration.reduction_seconds,
    }
    what = max(shares, key=lambda each: shares[each])
    return f"{shares[what] / duration.seconds:.0%} of its time is {what}"


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
