"""The content of `crossdevice explain`: steps, bytes per link, memory, predicted time, alternatives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from crossdevice.algorithms.registry import ALGORITHMS
from crossdevice.choosing import (
    FLOAT_BYTES,
    is_engine,
    planned_all_reduce,
    predicted,
    predicted_durations,
)
from crossdevice.costs.simulation import Simulation, simulate
from crossdevice.costs.timing import Duration
from crossdevice.costs.topology import Topology
from crossdevice.plans.plan import Plan
from crossdevice.plans.rendering import render_plan
from crossdevice.values.quantities import counted, size_text

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
