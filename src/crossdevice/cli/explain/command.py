"""`crossdevice explain`: what an algorithm does on a machine, what it costs there, and what others would."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

from crossdevice.algorithms.registry import ALGORITHMS
from crossdevice.cli.explain.explanation import Explanation, explanation_of
from crossdevice.cli.explain.plan_page import plan_page
from crossdevice.cli.output_file import output_file
from crossdevice.cli.sizes import size_in_bytes
from crossdevice.cli.terminal import Section, show
from crossdevice.costs.timing import Duration
from crossdevice.costs.topology_files import read_topology, topology_names
from crossdevice.errors import OptionError
from crossdevice.plans.rendering import devices_text, size_text
from crossdevice.values.options import PRECISIONS

MAX_LINES, MAX_COLUMNS, MAX_ROWS = 60, 160, 24
"""Longer plans lose their middle, longer lines and tables their end, unless --all."""

_ALIASES = {"hierarchical": "hierarchical_copy"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the operation, the devices and the sizes."""
    add = parser.add_argument
    add("--algorithm", "--ops", default="direct", metavar="NAME", help=f"{', '.join(ALGORITHMS)} (direct)")
    add("--devices", type=int, metavar="N", help="number of devices (one full node)")
    machines = ", ".join(topology_names())
    add("--topology", default="host", metavar="NAME|FILE", help=f"a TOML file, or {machines} (host)")
    add("--bytes", default="1MiB", metavar="SIZE", help="size of one array, such as 512, 4K, 100MiB (1MiB)")
    travels = "under fast partial sums are sent, otherwise contributions unsummed"
    add("--precision", choices=PRECISIONS, default="accurate", help=f"{travels} (accurate)")
    add("--all", action="store_true", help=f"show all steps, even if there are more than {MAX_LINES}")
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
        arguments.html.write_text(plan_page(explanation), encoding="utf-8")
    if arguments.json:
        print(json.dumps(explanation.as_json(), indent=2))
        return 0
    lines, sections = explanation.steps(), list(_sections(explanation))
    if not arguments.all:
        lines, sections = _abbreviated(lines), list(map(_shortened, sections))
    show(_headline(explanation), sections, "steps", lines)
    return 0


def _abbreviated(lines: list[str]) -> list[str]:
    if len(lines) > MAX_LINES:
        left_out = f"  ... {len(lines) - MAX_LINES} more lines (--all shows them) ..."
        lines = [*lines[: MAX_LINES - 10], left_out, *lines[-10:]]
    return [line if len(line) <= MAX_COLUMNS else f"{line[: MAX_COLUMNS - 4]} ..." for line in lines]


def _shortened(section: Section) -> Section:
    if len(section.rows) <= MAX_ROWS:
        return section
    more = [f"... {len(section.rows) - MAX_ROWS} more", *[""] * (len(section.headings) - 1)]
    return section._replace(rows=[*section.rows[:MAX_ROWS], more])


def _headline(explanation: Explanation) -> list[str]:
    topology = explanation.topology
    where = f" on {topology.num_nodes} nodes" if topology.num_nodes > 1 else ""
    lines = [
        f"{explanation.title}: all-reduce of {size_text(explanation.num_bytes)} on "
        f"{devices_text(topology.num_devices)}{where}, precision {explanation.precision}",
        f"{topology.name}: {topology.summary}",
        f"predicted: {_time(explanation.duration.seconds)} ({_split(explanation.duration)})",
        f"why: {explanation.reason}",
    ]
    if explanation.fallback is not None:
        lines.append(f"sums on the first destination instead: {explanation.fallback}")
    if explanation.plan is None:
        lines.append("too many devices to list the plan; timed by its rounds")
    return lines


def _sections(explanation: Explanation) -> Iterator[Section]:
    simulation, own = explanation.simulation, explanation.duration.seconds
    if simulation is not None:
        if not explanation.topology.shares_memory:
            links = sorted(simulation.link_bytes.items(), key=lambda item: -item[1])
            rows = [(name, size_text(size)) for name, size in links]
            yield Section("bytes per link", ("link", "bytes"), rows)
        peaks = [(str(device), size_text(size)) for device, size in simulation.peak_bytes.items()]
        yield Section("peak memory per device, step by step", ("device", "bytes"), peaks)
    others = [
        # One device takes no time, whatever the algorithm.
        (name, _time(duration.seconds), f"{duration.seconds / own:.3g}" if own else "1", _split(duration))
        for name, duration in explanation.others.items()
    ]
    yield Section("what other algorithms would cost", ("algorithm", "time", "times", "parts"), others)


def _split(duration: Duration) -> str:
    latency, bandwidth, reduction = duration
    return f"latency {_time(latency)}, bandwidth {_time(bandwidth)}, reduction {_time(reduction)}"


def _time(seconds: float) -> str:
    """As one reads it aloud.

    >>> _time(0.00123)
    '1.23 ms'
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
