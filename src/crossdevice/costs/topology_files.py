"""Topologies as small TOML files: built-in ones by name, and your own by path."""

from __future__ import annotations

import dataclasses
import importlib.resources
import math
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from crossdevice.costs.topology import FABRICS, CollectiveEngine, Cost, Fabric, HostBridge, Network, Topology
from crossdevice.errors import TopologyError

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
