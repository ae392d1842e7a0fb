"""Predicted time of an all-reduce on a topology, from its plan, or from its rounds if it is large."""

from __future__ import annotations

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.algorithms.nccl_all_reduce import NcclAllReduce
from crossdevice.costs.rounds import rounds_duration
from crossdevice.costs.simulation import simulate
from crossdevice.costs.timing import Duration, engine_duration, fused_pass_duration
from crossdevice.costs.topology import Topology
from crossdevice.plans.builder import PlanBuilder
from crossdevice.plans.ledger import proved_plan
from crossdevice.plans.plan import Plan
from crossdevice.values.device import Device

MAX_PLANNED_DEVICES = 16
"""Above this, algorithms that know their rounds are timed by them: a ring's plan grows with the square."""

FLOAT_BYTES = 4
"""Plans count elements; predictions are for 32-bit ones."""


def devices_of(topology: Topology) -> tuple[Device, ...]:
    """A topology's devices by name, node by node."""
    size = topology.devices_per_node
    numbers = range(topology.num_devices)
    return tuple(Device(topology.device_type, number % size, task=number // size) for number in numbers)


def planned_all_reduce(algorithm: CrossDeviceOps, topology: Topology, num_bytes: int) -> Plan:
    """The plan of an all-reduce of so many bytes on all devices of a topology."""
    devices = devices_of(topology)
    build = PlanBuilder(devices, max(1, num_bytes // FLOAT_BYTES))
    if len(devices) == 1:
        return build.plan(build.inputs)
    return proved_plan(algorithm, build, devices)


def knows_rounds(algorithm: CrossDeviceOps) -> bool:
    """True if the algorithm can be timed on thousands of devices."""
    return type(algorithm).plan_rounds is not CrossDeviceOps.plan_rounds


def predicted(
    algorithm: CrossDeviceOps, topology: Topology, num_bytes: int, *, precision: str = "accurate"
) -> Duration:
    """The time of an all-reduce and its parts; where memory is shared, that of one fused pass.

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
