"""A plan as one self-contained HTML page that plays it: links light up, devices fill with contributions."""

from __future__ import annotations

import html
import importlib.resources
import itertools
import json
from typing import TYPE_CHECKING, Any

from crossdevice.choosing import FLOAT_BYTES
from crossdevice.costs.simulation import SAME_SECONDS, Span, places_of
from crossdevice.costs.topology import DirectLinks, Switched, Topology
from crossdevice.errors import OptionError
from crossdevice.execution.reading.values import few
from crossdevice.plans.plan import Plan
from crossdevice.plans.steps import Add, Copy, EngineAllReduce, Finish, Step, sources_of, targets_of
from crossdevice.values.quantities import counted, size_text, time_text

if TYPE_CHECKING:
    from crossdevice.cli.explain.command import Explanation

MAX_DRAWN_DEVICES = 16
"""More do not fit around one circle with a grid of contributions each."""


def plan_page(explanation: Explanation) -> str:
    """Returns the page, with all its data, styles and code inside: it needs no network."""
    plan, simulation = explanation.plan, explanation.simulation
    count = explanation.topology.num_devices
    if plan is None or simulation is None or count > MAX_DRAWN_DEVICES:
        raise OptionError(f"a page draws up to {MAX_DRAWN_DEVICES} devices; got {count}")
    title = f"{explanation.title} on {counted(count, 'device')} of {explanation.topology.name}"
    data = {
        "title": title,
        "devices": [str(device) for device in places_of(plan)],
        "num_replicas": len(plan.inputs),
        "wires": _wires(explanation.topology),
        "switch": isinstance(explanation.topology.fabric, Switched),
        "frames": _frames(plan, simulation.spans),
    }
    summary = (
        f"All-reduce of {size_text(explanation.num_bytes)}, precision {explanation.precision}: "
        f"predicted {time_text(explanation.duration.seconds)}. Why: {explanation.reason}."
    )
    template = (importlib.resources.files(__package__) / "plan_page.html").read_text(encoding="utf-8")
    # "</" would end the script that holds the data.
    embedded = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return (
        template.replace("{{title}}", html.escape(title))
        .replace("{{summary}}", html.escape(summary))
        .replace('"{{data}}"', embedded)
    )


def _wires(topology: Topology) -> list[list[int]]:
    """Returns pairs of devices with wires of their own: [one, other, how many]."""
    fabric = topology.fabric
    if not isinstance(fabric, DirectLinks):
        return []
    pairs = itertools.combinations(range(min(topology.num_devices, topology.devices_per_node)), 2)
    return [[one, other, fabric.counts[one][other]] for one, other in pairs if fabric.counts[one][other]]


def _frames(plan: Plan, spans: tuple[Span, ...]) -> list[dict[str, Any]]:
    """Returns the frames of the animation: steps that begin together, and the devices' state after them."""
    places = places_of(plan)
    edges = sorted(
        {edge for step in plan.steps for buffer in targets_of(step) for edge in (buffer.start, buffer.stop)}
        | {0, plan.num_elements}
    )
    ranges = list(itertools.pairwise(edges))
    held = [[[0, False] for _ in ranges] for _ in places]
    for buffer in plan.inputs:
        for cell in held[places[buffer.device]]:
            cell[0] |= buffer.replicas
    frames = [_frame(0.0, "Every device holds its own contribution.", [], [], held)]
    begun = 0.0
    together: list[Step] = []
    for span in sorted(spans, key=lambda each: (each.start_seconds, each.step)):
        if together and span.start_seconds > begun + SAME_SECONDS:
            frames += _shown(together, begun, places, ranges, held)
            together = []
        begun = span.start_seconds
        together.append(plan.steps[span.step])
    frames += _shown(together, begun, places, ranges, held)
    return frames


def _shown(
    together: list[Step], seconds: float, places: Any, ranges: list[tuple[int, int]], held: list[Any]
) -> list[dict[str, Any]]:
    """Returns one frame for these steps; none if they change nothing visible."""
    sends: list[list[Any]] = []
    adds: list[int] = []
    finished: set[int] = set()
    for step in together:
        for buffer in targets_of(step):
            for number, (start, stop) in enumerate(ranges):
                if buffer.start <= start and stop <= buffer.stop:
                    cell = held[places[buffer.device]][number]
                    cell[0] |= buffer.replicas
                    cell[1] |= buffer.is_finished
        device = places[targets_of(step)[0].device]
        if isinstance(step, Copy) and step.source.device != step.target.device:
            size = size_text(step.source.length * FLOAT_BYTES)
            sends.append([places[step.source.device], device, size])
        elif isinstance(step, Add):
            adds.append(device)
        elif isinstance(step, EngineAllReduce):
            adds += [places[buffer.device] for buffer in sources_of(step)]
        elif isinstance(step, Finish):
            finished.add(device)
    said = []
    if sends:
        listed = few([f"{source} to {target} ({size})" for source, target, size in sends], 8)
        said.append(f"{counted(len(sends), 'copy', 'copies')}: {listed}.")
    if adds:
        said.append(f"Adding on {', '.join(map(str, sorted(set(adds))))}.")
    if finished:
        said.append(f"Results finished on {', '.join(map(str, sorted(finished)))}.")
    if not said:
        return []
    return [_frame(seconds, " ".join(said), sends, adds, held)]


def _frame(
    seconds: float, text: str, sends: list[list[Any]], adds: list[int], held: list[Any]
) -> dict[str, Any]:
    """Makes a frame; `held` has the replicas of each device and range as bits; results end in !."""
    written = [[f"{replicas:x}{'!' if finished else ''}" for replicas, finished in cells] for cells in held]
    return {"time": time_text(seconds), "text": text, "sends": sends, "adds": adds, "held": written}
