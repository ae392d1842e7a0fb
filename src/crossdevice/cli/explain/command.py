"""`crossdevice explain`: steps, bytes per link, memory and time of an algorithm, and the costs of others."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from crossdevice.algorithms.registry import ALGORITHMS
from crossdevice.choosing import FLOAT_BYTES, is_engine, planned_all_reduce, predicted, predicted_durations
from crossdevice.cli.explain.plan_page import plan_page
from crossdevice.cli.terminal import Section, output_file, show, size_in_bytes, write_file
from crossdevice.costs.simulation import Simulation, simulate
from crossdevice.costs.timing import Duration
from crossdevice.costs.topology import Topology, read_topology, topology_names
from crossdevice.errors import OptionError
from crossdevice.plans.plan import Plan, render_plan
from crossdevice.values.options import PRECISIONS
from crossdevice.values.quantities import counted, size_text, time_text

MAX_SHOWN_DEVICES = 64
"""Larger plans are timed by their rounds and not printed."""


class Explanation(NamedTuple):
    """One all-reduce on one topology; `plan` and `simulation` are None if there are too many devices.

    `others` are all algorithms besides, the fastest first.
    """

    algorithm: str
    title: str
    topology: Topology
    num_bytes: int
    precision: str
    duration: Duration
    others: Mapping[str, Duration]
    fallback: str | None
    plan: Plan | None
    simulation: Simulation | None

    @property
    def reason(self) -> str:
        """Reason to choose the algorithm here, or not to."""
        # Engines sum in their own way: they are listed, but not held against what keeps every bit.
        engines = list(filter(is_engine, self.others))
        rivals = [(name, duration) for name, duration in self.others.items() if name not in engines]
        if self.topology.shares_memory:
            return "all devices share one memory: every algorithm becomes the same fused pass"
        if self.topology.num_devices == 1:
            return "with one device there is nothing to send: every algorithm takes no time"
        if not rivals:
            return "there is nothing to compare it with"
        best, other = rivals[0]
        least = min(self.duration.seconds, other.seconds)
        faster = [name for name in sorted(engines) if self.others[name].seconds < least]
        aside = f" ({', '.join(faster)} aside, which adds in its own order)" if faster else ""
        equals = [name for name, duration in rivals if _as_fast(duration, self.duration)]
        if equals and (best in equals or self.duration.seconds <= other.seconds):
            return f"among the fastest here{aside}, with {', '.join(equals)}"
        if self.duration.seconds <= other.seconds:
            times = other.seconds / self.duration.seconds
            return f"the fastest here{aside}: the next, {best}, takes {times:.2f} times as long"
        slower = self.duration.seconds / other.seconds
        gaps = {
            "more rounds and messages": self.duration.latency_seconds - other.latency_seconds,
            "more bytes on its busiest link": self.duration.bandwidth_seconds - other.bandwidth_seconds,
            "more additions on one device": self.duration.reduction_seconds - other.reduction_seconds,
        }
        why = max(gaps, key=lambda gap: gaps[gap])
        return f"{best} is the fastest here{aside}: this takes {slower:.2f} times as long, mostly for {why}"

    def steps(self) -> list[str]:
        """The plan as lines; none if it is not listed in full."""
        if self.plan is None:
            return []
        return render_plan(self.plan, FLOAT_BYTES, unsummed=self.precision != "fast").splitlines()

    @property
    def travelling(self) -> str:
        """Description of the traffic on links, and of that with the other kind of precision."""
        if self.topology.shares_memory:
            return "nothing: the devices share one memory, and one pass reads all arrays"
        if self.plan is None:
            return "partial sums" if self.precision == "fast" else "contributions, unsummed"
        sums, contributions = (
            size_text(self.plan.total_traffic(unsummed=unsummed) * FLOAT_BYTES) for unsummed in (False, True)
        )
        rounds = counted(self.plan.num_rounds, "round")
        if self.algorithm_adds_in_engine:
            return f"whatever the engine sends, in its own order ({self.title} adds there under fast only)"
        if self.precision == "fast":
            return f"{sums} of partial sums in {rounds} (under accurate {contributions} of contributions)"
        return f"{contributions} of contributions, unsummed, in {rounds} (under fast {sums} of partial sums)"

    @property
    def algorithm_adds_in_engine(self) -> bool:
        """True if the predicted time is that of an engine."""
        return is_engine(self.algorithm) and self.fallback is None and self.topology.engine is not None

    def as_json(self) -> dict[str, Any]:
        """Returns all of it, for other programs."""
        simulation = self.simulation
        return {
            "algorithm": self.algorithm,
            "class": self.title,
            "topology": self.topology.name,
            "devices": self.topology.num_devices,
            "nodes": self.topology.num_nodes,
            "bytes": self.num_bytes,
            "precision": self.precision,
            **_seconds(self.duration),
            "fallback": self.fallback,
            "reason": self.reason,
            "others": {name: _seconds(duration) for name, duration in self.others.items()},
            "link_bytes": dict(simulation.link_bytes) if simulation else {},
            "peak_bytes": {str(d): size for d, size in simulation.peak_bytes.items()} if simulation else {},
            "steps": self.steps(),
        }


def explanation_of(name: str, topology: Topology, num_bytes: int, precision: str) -> Explanation:
    """Explains one algorithm's all-reduce on all devices of a topology."""
    algorithm = ALGORITHMS.load(name)()
    plan = simulation = None
    if topology.num_devices <= MAX_SHOWN_DEVICES:
        plan = planned_all_reduce(algorithm, topology, num_bytes)
        simulation = simulate(plan, topology, FLOAT_BYTES, unsummed=precision != "fast")
    everyone = predicted_durations(topology, num_bytes, precision=precision)
    if topology.engine is not None:
        for engine in filter(is_engine, ALGORITHMS.keys() - {name}):
            everyone[engine] = predicted(ALGORITHMS.load(engine)(), topology, num_bytes, precision=precision)
    duration = everyone.pop(name, None) or predicted(algorithm, topology, num_bytes, precision=precision)
    return Explanation(
        algorithm=name,
        title=type(algorithm).__name__,
        topology=topology,
        num_bytes=num_bytes,
        precision=precision,
        duration=duration,
        others=dict(sorted(everyone.items(), key=lambda item: item[1].seconds)),
        fallback=None if plan is None else algorithm.fallback_reason([b.device for b in plan.inputs]),
        plan=plan,
        simulation=simulation,
    )


def _as_fast(first: Duration, second: Duration) -> bool:
    """Returns True if two times are printed alike."""
    return max(first.seconds, second.seconds) < 1.005 * min(first.seconds, second.seconds)


def _seconds(duration: Duration) -> dict[str, float]:
    return {"seconds": duration.seconds, **duration._asdict()}


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
        write_file(arguments.html, page)
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
