"""Topologies as small TOML files: those that come with crossdevice, by name, and your own, by path."""

from __future__ import annotations

import functools
import importlib.resources
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from crossdevice.costs.topology import (
    Cost,
    DirectLinks,
    Engine,
    Fabric,
    HostBridge,
    Network,
    SharedMemory,
    Switched,
    Topology,
)
from crossdevice.errors import TopologyError

_FOLDER = importlib.resources.files(__package__) / "topologies"

GIGA, MICRO = 1e9, 1e-6

_Made = TypeVar("_Made")


class _Table(Mapping[str, Any]):
    """A table of a file, which remembers the keys that it was asked for."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self._table = table
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return self._table[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


def topology_names() -> list[str]:
    """The topologies that come with crossdevice.

    >>> "dgx1v" in topology_names()
    True
    """
    return sorted(
        entry.name.removesuffix(".toml") for entry in _FOLDER.iterdir() if entry.name.endswith(".toml")
    )


def read_topology(name_or_path: str | Path, num_devices: int | None = None) -> Topology:
    """A topology by name or from a TOML file, with so many devices (one full node if not said).

    >>> read_topology("hgx_h100", 64).num_nodes
    8
    """
    path = Path(name_or_path)
    if path.suffix == ".toml":
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise TopologyError(f"topology file {str(path)!r} cannot be read: {error.strerror}") from None
    elif str(name_or_path) in topology_names():
        text = (_FOLDER / f"{name_or_path}.toml").read_text(encoding="utf-8")
    else:
        raise TopologyError(
            f"{str(name_or_path)!r} is no topology; expected a file that ends in .toml, "
            f"or one of {', '.join(topology_names())}"
        )
    try:
        topology = _read("the file", _with_base(tomllib.loads(text)), _topology)
    except tomllib.TOMLDecodeError as error:
        raise TopologyError(f"topology {str(name_or_path)!r} is no TOML: {error}") from None
    except KeyError as error:
        raise TopologyError(f"topology {str(name_or_path)!r} lacks {error}") from None
    return topology if num_devices is None else topology.with_devices(num_devices)


def _with_base(tables: dict[str, Any]) -> dict[str, Any]:
    """The tables of the built-in that `like` names, each replaced by the file's own where it has one."""
    if "like" not in tables:
        return tables
    like = tables.pop("like")
    if like not in topology_names():
        raise TopologyError(f"like = {like!r}: expected one of {', '.join(topology_names())}")
    base = _with_base(tomllib.loads((_FOLDER / f"{like}.toml").read_text(encoding="utf-8")))
    return {**base, **tables}


def _read(where: str, table: Mapping[str, Any], made_of: Callable[[Mapping[str, Any]], _Made]) -> _Made:
    """What is made of a table; a key that nobody asked for is refused."""
    reading = _Table(table)
    made = made_of(reading)
    unknown = [key for key in table if key not in reading.asked]
    if unknown:
        raise TopologyError(
            f"{where} has {', '.join(map(repr, unknown))}, which nothing reads; "
            f"expected some of {', '.join(sorted(reading.asked))}"
        )
    return made


def _topology(tables: Mapping[str, Any]) -> Topology:
    devices, network, engine = tables["devices"], tables.get("network"), tables.get("engine")
    fabric = _read("[links]", tables["links"], functools.partial(_fabric, num_devices=devices))
    memory_bytes_per_second, step_seconds = _read("[memory]", tables["memory"], _memory)
    return Topology(
        name=tables["name"],
        summary=tables["summary"],
        sources=tuple(tables.get("sources", ())),
        device_type=tables["device_type"],
        devices_per_node=devices,
        num_devices=devices,
        fabric=fabric,
        memory_bytes_per_second=memory_bytes_per_second,
        step_seconds=step_seconds,
        network=None if network is None else _read("[network]", network, _network),
        engine=None if engine is None else _read("[engine]", engine, _engine),
    )


def _memory(table: Mapping[str, Any]) -> tuple[float, float]:
    return table["gigabytes_per_second"] * GIGA, table["step_microseconds"] * MICRO


def _fabric(links: Mapping[str, Any], num_devices: int) -> Fabric:
    speed, cost = _positive(links, "gigabytes_per_second") * GIGA, _cost(links)
    match links["kind"]:
        case "memory":
            return SharedMemory(speed, cost)
        case "switch":
            return Switched(speed, cost)
        case "host":
            return _bridge(links)
        case "pairs":
            counts = tuple(tuple(row) for row in links["counts"])
            if len(counts) != num_devices or any(len(row) != num_devices for row in counts):
                raise TopologyError(f"links.counts must have {num_devices} rows of {num_devices} numbers")
            if any(counts[a][b] != counts[b][a] for a in range(num_devices) for b in range(a)):
                raise TopologyError("links.counts must be symmetric: a wire has two ends")
            return DirectLinks(counts, speed, cost, _read("[links.otherwise]", links["otherwise"], _bridge))
        case kind:
            raise TopologyError(f"links.kind = {kind!r}; expected memory, switch, host or pairs")


def _bridge(table: Mapping[str, Any]) -> HostBridge:
    return HostBridge(
        bytes_per_second=_positive(table, "gigabytes_per_second") * GIGA,
        cost=_cost(table),
        devices_per_switch=table["devices_per_switch"],
        switches_per_socket=table["switches_per_socket"],
        socket_bytes_per_second=_positive(table, "socket_gigabytes_per_second") * GIGA,
        has_peer_access=table["peer_access"],
    )


def _network(table: Mapping[str, Any]) -> Network:
    return Network(
        bytes_per_second=_positive(table, "gigabytes_per_second") * GIGA,
        cost=_cost(table),
        ports_per_node=table["ports_per_node"],
        oversubscription=table.get("oversubscription", 1.0),
    )


def _engine(table: Mapping[str, Any]) -> Engine:
    return Engine(
        call_seconds=table["call_microseconds"] * MICRO,
        hop_seconds=table["hop_microseconds"] * MICRO,
        in_switch_efficiency=table.get("in_switch_efficiency", 0.0),
    )


def _cost(table: Mapping[str, Any]) -> Cost:
    return Cost(table["latency_microseconds"] * MICRO, table["message_microseconds"] * MICRO)


def _positive(table: Mapping[str, Any], key: str) -> float:
    number = float(table[key])
    if not (math.isfinite(number) and number > 0):
        raise TopologyError(f"{key} must be above 0; got {number}")
    return number
