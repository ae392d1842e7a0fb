"""Measuring: competitors take turns, round after round, and the median of each one's turns counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from crossdevice.cli.bench import data
from crossdevice.cli.bench.calls import Competitor, Measurable, Memory
from crossdevice.cli.bench.workload import GIGABYTE, ResultPlace, UnsupportedWorkError, Workload

TURN_SECONDS = 0.002
"""Short calls are repeated for about as long in one turn: clock and cold caches would be felt otherwise."""

MAX_REPEATS = 2000

PAUSE_SECONDS = 0.003
"""Pause between turns: OpenMP's threads spin for about a millisecond after their last work."""


class Figure(NamedTuple):
    """One cell group of the table: the median time of one competitor, place and size."""

    work: Workload
    place: ResultPlace
    seconds: float
    memory: Memory
    wrong: int | None

    @property
    def algorithm_bandwidth(self) -> float:
        """Size / time, in GB/s."""
        return self.work.size_bytes / self.seconds / GIGABYTE

    @property
    def bus_bandwidth(self) -> float:
        """Bandwidth in GB/s as if every byte went over a wire."""
        return self.algorithm_bandwidth * self.work.bus_factor


class Row(NamedTuple):
    """One competitor's line for one size; None where it cannot do that."""

    competitor: str
    work: Workload
    out_of_place: Figure | None
    in_place: Figure | None
    precision: str = "own dtype"

    @property
    def figures(self) -> list[Figure]:
        """The figures that were measured."""
        return [figure for figure in (self.out_of_place, self.in_place) if figure is not None]

    @property
    def main(self) -> Figure:
        """The figure for comparisons and charts: out of place if available."""
        return self.figures[0]


class Schedule(NamedTuple):
    """Iterations and checks."""

    iterations: int = 20
    warm_up: int = 5
    checks: bool = True
    prefers_fresh: bool = False


def measured_rows(
    work: Workload,
    competitors: Sequence[Competitor],
    schedule: Schedule,
    *,
    say: Callable[[str], None] = lambda _: None,
    tick: Callable[[], None] = lambda: None,
) -> list[Row]:
    """Returns a row per capable competitor; `say` reports the others, `tick` each round."""
    inputs = data.all_arrays(work)
    ready: dict[str, Measurable] = {}
    precisions = {competitor.name: competitor.precision for competitor in competitors}
    for competitor in competitors:
        try:
            ready[competitor.name] = competitor.ready(work, inputs)
        except UnsupportedWorkError as error:
            say(f"{competitor.name}: left out, {error}")
    out_of_place: Sequence[ResultPlace] = ("fresh", "given") if schedule.prefers_fresh else ("given", "fresh")
    outside = _figures(work, ready, out_of_place, schedule, tick)
    inside = _figures(work, ready, ("in_place",), schedule, tick)
    rows = [Row(name, work, outside.get(name), inside.get(name), precisions[name]) for name in ready]
    return [row for row in rows if row.figures]


def seconds_in_turns(
    ready: Mapping[str, Measurable],
    places: Mapping[str, ResultPlace],
    schedule: Schedule,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds per call of each competitor in each round, all of them taking turns."""
    repeats: dict[str, int] = {}
    for _ in range(max(1, schedule.warm_up)):
        for name, place in places.items():
            last = max(ready[name].turn(place, 1), 1e-7)
            repeats[name] = max(1, min(MAX_REPEATS, int(TURN_SECONDS / last)))
    seconds: dict[str, list[float]] = {name: [] for name in places}
    for _ in range(schedule.iterations):
        for name, place in places.items():
            if len(places) > 1:
                time.sleep(PAUSE_SECONDS)
            seconds[name].append(ready[name].turn(place, repeats[name]))
        tick()
    return seconds


def _figures(
    work: Workload,
    ready: Mapping[str, Measurable],
    wanted: Sequence[ResultPlace],
    schedule: Schedule,
    tick: Callable[[], None],
) -> dict[str, Figure]:
    """Returns the figures of all that support the wanted placement, each at its first one."""
    able = {name: [place for place in wanted if place in one.places] for name, one in ready.items()}
    places = {name: own[0] for name, own in able.items() if own}
    seconds = seconds_in_turns(ready, places, schedule, tick)
    figures = {}
    for name, place in places.items():
        memory, wrong = ready[name].inspect(place, counts_wrong=schedule.checks)
        figures[name] = Figure(work, place, statistics.median(seconds[name]), memory, wrong)
    return figures
