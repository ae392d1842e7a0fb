"""`crossdevice explain`: an algorithm's steps and costs on a machine, and the costs of others."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator

from crossdevice.algorithms.registry import ALGORITHMS
from crossdevice.choosing import is_engine
from crossdevice.cli.arguments import output_file, size_in_bytes
from crossdevice.cli.explain.explanation import Explanation, explanation_of
from crossdevice.cli.explain.plan_page import plan_page
from crossdevice.cli.terminal import Section, show
from crossdevice.costs.timing import Duration
from crossdevice.costs.topology import read_topology, topology_names
from crossdevice.errors import OptionError
from crossdevice.values.options import PRECISIONS
from crossdevice.values.quantities import counted, size_text, time_text

_ALIASES = {"hierarchical": "hierarchical_copy"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the operation, the devices and the sizes."""
    add = parser.add_argument
    add("--algorithm", "--ops", default="direct", metavar="NAME", help=f"{', '.join(ALGORITHMS)} (direct)")
    add("--devices", type=int, metavar="N", help="number of devices (one full node)")
    machines = ", ".join(topology_names())
    add("--topology", default="host", metavar="NAME|FILE", help=f"a TOML file, or {machines} (host)")
    add("--bytes", default="1MiB", metavar="SIZE", help="size of one array, such as 512, 4K, 100MiB (1MiB)")
    travels = "fast sends partial sums; accurate and exact send single contributions, unsummed"
    add("--precision", choices=PRECISIONS, default="accurate", help=f"{travels} (accurate)")
    add("--steps", action="store_true", help="also print all steps, links and devices")
    add("--json", action="store_true", help="print JSON")
    add("--html", type=output_file, metavar="FILE", help="write a page that animates the plan step by step")


def run(arguments: argparse.Namespace) -> int:
    """Prints the explanation; writes the page."""
    if arguments.devices is not None and arguments.devices < 1:
        raise OptionError(f"--devices must be 1 or more; got {arguments.devices}")
    topology = read_topology(arguments.topology, arguments.devices)
    name = _ALIASES.get(arguments.algorithm, arguments.algorithm)
    explanation = explanation_of(name, topology, size_in_bytes(arguments.bytes), arguments.precision)
    if arguments.html is not None:
        page = plan_page(explanation)
        arguments.html.write_text(page, encoding="utf-8")
        print(f"wrote {arguments.html} ({size_text(len(page))}): open it in a browser", file=sys.stderr)
    if arguments.json:
        print(json.dumps(explanation.as_json(), indent=2))
        return 0
    details = list(_details(explanation)) if arguments.steps else []
    lines = explanation.steps() if arguments.steps else []
    show(_headline(explanation), [_others(explanation), *details], "steps", lines)
    if explanation.plan is not None and not arguments.steps:
        count = counted(len(explanation.plan.steps), "step")
        print(f"\n--steps prints the {count}, the bytes on each link and the memory of each device")
    return 0


def _headline(explanation: Explanation) -> list[str]:
    topology = explanation.topology
    where = f" in {topology.num_nodes} nodes" if topology.num_nodes > 1 else ""
    lines = [
        f"{explanation.title}: all-reduce of {size_text(explanation.num_bytes)} on "
        f"{counted(topology.num_devices, 'device')}{where}, precision {explanation.precision}",
        f"{topology.name}: {topology.summary}",
        f"predicted: {time_text(explanation.duration.seconds)} ({_split(explanation.duration)})",
        f"why: {explanation.reason}",
        f"travels: {explanation.travelling}",
    ]
    simulation = explanation.simulation
    if simulation is not None:
        if simulation.link_bytes and not topology.shares_memory:
            link, size = max(simulation.link_bytes.items(), key=lambda item: item[1])
            lines.append(f"busiest link: {link}, {size_text(size)}")
        most = size_text(max(simulation.peak_bytes.values()))
        lines.append(f"memory: at most {most} on a device, if the plan runs step by step")
    if explanation.fallback is not None:
        lines.append(f"sums on the first destination instead: {explanation.fallback}")
    if explanation.plan is None:
        lines.append("too many devices to list the plan; timed by its rounds")
    if topology.num_nodes > 1 and not explanation.algorithm_adds_in_engine:
        lines.append("between nodes plans use one port at a time, NCCL all: take NCCL for large arrays")
    return lines


def _others(explanation: Explanation) -> Section:
    own = explanation.duration.seconds
    rows = [
        # One device takes no time, whatever the algorithm.
        (
            f"{name} (fast only)" if is_engine(name) and explanation.precision != "fast" else name,
            time_text(duration.seconds),
            f"{duration.seconds / own:.3g}" if own else "1",
            _split(duration),
        )
        for name, duration in explanation.others.items()
    ]
    return Section("what other algorithms would cost", ("algorithm", "time", "times", "parts"), rows)


def _details(explanation: Explanation) -> Iterator[Section]:
    simulation = explanation.simulation
    if simulation is None:
        return
    if not explanation.topology.shares_memory:
        links = sorted(simulation.link_bytes.items(), key=lambda item: -item[1])
        rows = [(name, size_text(size)) for name, size in links]
        yield Section("bytes per link", ("link", "bytes"), rows)
    peaks = [(str(device), size_text(size)) for device, size in simulation.peak_bytes.items()]
    yield Section("peak memory per device, step by step", ("device", "bytes"), peaks)


def _split(duration: Duration) -> str:
    latency, bandwidth, reduction = map(time_text, duration)
    return f"latency {latency}, bandwidth {bandwidth}, reduction {reduction}"
