"""Links between devices, their speeds, and the route of a transfer.

Costs follow Hockney's alpha-beta model with LogP's gap: a message waits a latency, keeps its links busy for a
moment of its own, and then for its bytes. Links have one direction each and are shared fairly.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, TypeAlias

from crossdevice.errors import TopologyError

MAX_LISTED_DEVICES = 256
"""Number of devices up to which all transfers are listed, also those of all pairs."""


class Link(NamedTuple):
    """One direction of a wire, a port or a memory."""

    name: str
    bytes_per_second: float


class Cost(NamedTuple):
    """Fixed cost of a message: its latency, and how long it keeps its links busy."""

    latency_seconds: float
    message_seconds: float


class Route(NamedTuple):
    """The links between two devices, all used at once, and their bandwidth without other traffic."""

    links: tuple[Link, ...]
    bytes_per_second: float
    cost: Cost


@dataclasses.dataclass(frozen=True)
class OneMemory:
    """All devices lie in one memory: plans are lowered to one fused pass, and nothing is sent."""

    bytes_per_second: float
    cost: Cost

    def route(self, node: str, source: int, target: int) -> Route:  # noqa: ARG002
        """Copies within the memory."""
        link = Link(f"{node}memory", self.bytes_per_second / 2)  # a copy reads and writes
        return Route((link,), link.bytes_per_second, self.cost)


@dataclasses.dataclass(frozen=True)
class Switched:
    """Every device has one port to a switch that never blocks."""

    bytes_per_second: float
    cost: Cost

    def route(self, node: str, source: int, target: int) -> Route:
        """Goes out of one port and into the other."""
        speed = self.bytes_per_second
        links = Link(f"{node}{source}>switch", speed), Link(f"{node}switch>{target}", speed)
        return Route(links, speed, self.cost)


@dataclasses.dataclass(frozen=True)
class HostBridge:
    """Devices below PCIe switches, switches below sockets; without peer access, copies cross host memory."""

    bytes_per_second: float
    cost: Cost
    devices_per_switch: int
    switches_per_socket: int
    socket_bytes_per_second: float
    has_peer_access: bool

    def route(self, node: str, source: int, target: int) -> Route:
        """Goes up as far as needed, and down."""
        links = [Link(f"{node}{source}>pcie", self.bytes_per_second)]
        switches = source // self.devices_per_switch, target // self.devices_per_switch
        if switches[0] != switches[1] or not self.has_peer_access:
            sockets = [switch // self.switches_per_socket for switch in switches]
            links.append(Link(f"{node}pcie{switches[0]}>host", self.bytes_per_second))
            if sockets[0] != sockets[1]:
                name = f"{node}socket{sockets[0]}>socket{sockets[1]}"
                links.append(Link(name, self.socket_bytes_per_second))
            links.append(Link(f"{node}host>pcie{switches[1]}", self.bytes_per_second))
        links.append(Link(f"{node}pcie>{target}", self.bytes_per_second))
        slowest = min(link.bytes_per_second for link in links)
        if self.has_peer_access:
            return Route(tuple(links), slowest, self.cost)
        # Two copies, one after the other: to the host, from the host.
        cost = Cost(2 * self.cost.latency_seconds, 2 * self.cost.message_seconds)
        return Route(tuple(links), slowest / 2, cost)


@dataclasses.dataclass(frozen=True)
class DirectLinks:
    """Wires between pairs of devices (`counts` of them); pairs without one go over the host bridge."""

    counts: tuple[tuple[int, ...], ...]
    bytes_per_second: float
    cost: Cost
    bridge: HostBridge

    def route(self, node: str, source: int, target: int) -> Route:
        """Uses all wires of the pair at once."""
        count = self.counts[source][target]
        if count == 0:
            return self.bridge.route(node, source, target)
        link = Link(f"{node}{source}>{target}", count * self.bytes_per_second)
        return Route((link,), link.bytes_per_second, self.cost)


Fabric: TypeAlias = OneMemory | Switched | HostBridge | DirectLinks

FABRICS = {"memory": OneMemory, "switch": Switched, "host": HostBridge, "pairs": DirectLinks}
"""Link types by their names in topology files."""


@dataclasses.dataclass(frozen=True)
class Network:
    """The network between nodes: ports (rails) of each node, and a core that may be oversubscribed."""

    bytes_per_second: float
    cost: Cost
    ports_per_node: int
    oversubscription: float = 1.0

    def route(self, nodes: tuple[int, int], devices: tuple[int, int]) -> Route:
        """Goes out of the source's rail, through the core, into the target's rail."""
        (source, target), speed, ports = nodes, self.bytes_per_second, self.ports_per_node
        leaves = Link(f"node{source} port{devices[0] % ports}>", speed)
        arrives = Link(f">node{target} port{devices[1] % ports}", speed)
        if self.oversubscription <= 1:
            return Route((leaves, arrives), speed, self.cost)
        shared = ports * speed / self.oversubscription
        core = Link(f"node{source}>core", shared), Link(f"core>node{target}", shared)
        return Route((leaves, *core, arrives), min(speed, shared), self.cost)


@dataclasses.dataclass(frozen=True)
class CollectiveEngine:
    """Measured facts about a library (NCCL) that does whole collectives on this machine.

    `call_seconds` is the one number that is measured: an empty call, from the host's side.
    `in_switch_efficiency` is above zero where the switch itself adds (NVLS).
    """

    call_seconds: float
    hop_seconds: float
    in_switch_efficiency: float = 0.0


@dataclasses.dataclass(frozen=True)
class Topology:
    """A machine, or a cluster of equal machines, with devices numbered node by node.

    Args:
        name: the name of the machine.
        summary: one sentence that describes it.
        sources: where its figures come from.
        device_type: the type of its devices, such as `"cuda"`.
        devices_per_node: the number of devices in one node.
        num_devices: the number of devices in all.
        fabric: the links inside a node.
        memory_bytes_per_second: the memory bandwidth of one device, as used by additions.
        step_seconds: the time to start one addition on a device.
        network: the links between nodes; None if there are none.
        engine: the speeds of a library of collectives, as measured there; None if unknown.

    >>> from crossdevice import read_topology
    >>> machine = read_topology("hgx_h100", 16)
    >>> machine.num_nodes, machine.shares_memory
    (2, False)
    """

    name: str
    summary: str
    sources: tuple[str, ...]
    device_type: str
    devices_per_node: int
    num_devices: int
    fabric: Fabric
    memory_bytes_per_second: float
    step_seconds: float
    network: Network | None = None
    engine: CollectiveEngine | None = None

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return -(-self.num_devices // self.devices_per_node)

    @property
    def typical_devices(self) -> range:
        """Devices with transfers typical for all of them: those of the first node if there are many."""
        few = self.num_devices <= MAX_LISTED_DEVICES
        return range(self.num_devices if few else min(self.devices_per_node, self.num_devices))

    @property
    def shares_memory(self) -> bool:
        """True if all devices share one memory."""
        return isinstance(self.fabric, OneMemory)

    def with_devices(self, num_devices: int) -> Topology:
        """Describes the same kind of machine with another number of devices; many are a cluster of nodes.

        Args:
            num_devices: the number of devices in all.

        Returns:
            A new Topology.

        Raises:
            TopologyError: there is no such machine.
        """
        if num_devices < 1:
            raise TopologyError(f"a topology has 1 device or more; got {num_devices}")
        if self.shares_memory:
            return dataclasses.replace(self, devices_per_node=num_devices, num_devices=num_devices)
        if num_devices > self.devices_per_node and self.network is None:
            found = f"{self.devices_per_node} devices and no network"
            raise TopologyError(f"topology {self.name!r} has {found}; got {num_devices}")
        return dataclasses.replace(self, num_devices=num_devices)

    def route(self, source: int, target: int) -> Route:
        """Finds the way from one device to another.

        Args:
            source: the number of the device that sends.
            target: the number of the device that receives.

        Returns:
            The links, their bandwidth and latency.

        Raises:
            TopologyError: the devices are in different nodes, and there is no network.
        """
        source_node, source = divmod(source, self.devices_per_node)
        target_node, target = divmod(target, self.devices_per_node)
        if source_node == target_node:
            prefix = f"node{source_node} " if self.num_nodes > 1 else ""
            return self.fabric.route(prefix, source, target)
        if self.network is None:
            raise TopologyError(f"topology {self.name!r} has no network between nodes")
        return self.network.route((source_node, target_node), (source, target))

    def ring_bytes_per_second(self) -> float:
        """Returns the bandwidth per device of rings that use all links of a node."""
        wires = max(map(sum, self.fabric.counts)) if isinstance(self.fabric, DirectLinks) else 1
        return wires * self.fabric.bytes_per_second
