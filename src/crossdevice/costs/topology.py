"""Links between devices, their speeds, and the route of a transfer; topologies as TOML files.

Costs follow Hockney's alpha-beta model with LogP's gap: a message waits a latency, keeps its links busy for a
moment of its own, and then for its bytes. Links have one direction each and are shared fairly.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import math
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

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


_FOLDER = importlib.resources.files(__package__) / "topologies"

GIGA, MICRO = 1e9, 1e-6

_Made = TypeVar("_Made")


_KEYS = ("name", "summary", "sources", "device_type", "devices", "links", "memory", "network", "engine")


def topology_names() -> list[str]:
    """Returns the topologies that come with crossdevice.

    >>> "dgx1v" in topology_names()
    True
    """
    files = [entry.name for entry in _FOLDER.iterdir()]
    return sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml"))


def read_topology(name_or_path: str | Path, num_devices: int | None = None) -> Topology:
    """Reads a topology by its name, or from a TOML file.

    Args:
        name_or_path: one of the names that `crossdevice explain --list` prints, or a path that ends in
            `.toml`.
        num_devices: the number of devices; None is one full node.

    Returns:
        The Topology.

    Raises:
        TopologyError: the name is unknown, the file cannot be read, or it cannot have this many devices.

    >>> read_topology("hgx_h100", 64).num_nodes
    8
    """
    path = Path(name_or_path)
    if path.suffix == ".toml":
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise TopologyError(f"topology file {str(path)!r} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise TopologyError(f"topology {str(path)!r} is not valid TOML: {error}") from None
    elif str(name_or_path) in topology_names():
        text = (_FOLDER / f"{name_or_path}.toml").read_text(encoding="utf-8")
    else:
        raise TopologyError(
            f"{str(name_or_path)!r} is not a topology; expected a file that ends in .toml, "
            f"or one of {', '.join(topology_names())}"
        )
    try:
        topology = _topology(_with_base(tomllib.loads(text)))
    except tomllib.TOMLDecodeError as error:
        raise TopologyError(f"topology {str(name_or_path)!r} is not valid TOML: {error}") from None
    except KeyError as error:
        raise TopologyError(f"topology {str(name_or_path)!r} lacks {error}") from None
    return topology if num_devices is None else topology.with_devices(num_devices)


def _with_base(tables: dict[str, Any]) -> dict[str, Any]:
    """Returns the tables of the built-in that `like` names; the file's own tables replace them."""
    if "like" not in tables:
        return tables
    like = tables.pop("like")
    if like not in topology_names():
        raise TopologyError(f"like = {like!r}: expected one of {', '.join(topology_names())}")
    base = _with_base(tomllib.loads((_FOLDER / f"{like}.toml").read_text(encoding="utf-8")))
    return {**base, **tables}


def _topology(tables: Mapping[str, Any]) -> Topology:
    _refuse_unknown("the file", tables, _KEYS)
    devices, network, engine = tables["devices"], tables.get("network"), tables.get("engine")
    fabric = _fabric(dict(tables["links"]), devices)
    memory = _numbers("[memory]", tables["memory"], ("bytes_per_second", "step_seconds"))
    return Topology(
        name=tables["name"],
        summary=tables["summary"],
        sources=tuple(tables.get("sources", ())),
        device_type=tables["device_type"],
        devices_per_node=devices,
        num_devices=devices,
        fabric=fabric,
        memory_bytes_per_second=memory["bytes_per_second"],
        step_seconds=memory["step_seconds"],
        network=None if network is None else _made(Network, "[network]", network),
        engine=None if engine is None else _made(CollectiveEngine, "[engine]", engine),
    )


def _fabric(links: dict[str, Any], num_devices: int) -> Fabric:
    kind, more = links.pop("kind"), {}
    if kind not in FABRICS:
        raise TopologyError(f"links.kind = {kind!r}; expected memory, switch, host or pairs")
    if kind == "pairs":
        counts = tuple(tuple(row) for row in links.pop("counts"))
        if len(counts) != num_devices or any(len(row) != num_devices for row in counts):
            raise TopologyError(f"links.counts must have {num_devices} rows of {num_devices} numbers")
        if any(counts[a][b] != counts[b][a] for a in range(num_devices) for b in range(a)):
            raise TopologyError("links.counts must be symmetric: a wire has two ends")
        bridge = _made(HostBridge, "[links.otherwise]", links.pop("otherwise"))
        more = {"counts": counts, "bridge": bridge}
    return _made(FABRICS[kind], "[links]", links, **more)


def _made(kind: type[_Made], where: str, table: Mapping[str, Any], **given: Any) -> _Made:
    """Makes an object from a table with a key for each field that is not given."""
    fields = {field.name: field for field in dataclasses.fields(kind) if field.name not in given}  # type: ignore[arg-type]
    optional = [name for name, field in fields.items() if field.default is not dataclasses.MISSING]
    costs = Cost._fields if fields.pop("cost", None) else ()
    numbers = _numbers(where, table, (*fields, *costs), optional)
    if costs:
        numbers["cost"] = Cost(*map(numbers.pop, costs))
    return kind(**numbers, **given)


def _numbers(
    where: str, table: Mapping[str, Any], names: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, Any]:
    """Reads the numbers of a table by field names, in bytes and seconds."""
    keys = {_key_of(name): name for name in names}
    _refuse_unknown(where, table, keys)
    return {
        name: _scaled(table[key], key) for key, name in keys.items() if key in table or name not in optional
    }


def _key_of(name: str) -> str:
    """Returns the name of a field in files, with its unit."""
    name = name.removeprefix("has_").replace("bytes_per_second", "gigabytes_per_second")
    return name.replace("_seconds", "_microseconds")


def _scaled(value: Any, key: str) -> Any:
    if key.endswith("gigabytes_per_second"):
        if not (math.isfinite(value) and value > 0):
            raise TopologyError(f"{key} must be above 0; got {value}")
        return value * GIGA
    return value * MICRO if key.endswith("_microseconds") else value


def _refuse_unknown(where: str, table: Mapping[str, Any], expected: Collection[str]) -> None:
    unknown = [key for key in table if key not in expected]
    if unknown:
        raise TopologyError(
            f"{where} has {', '.join(map(repr, unknown))}, which nothing reads; "
            f"expected some of {', '.join(sorted(expected))}"
        )
