"""Measuring: competitors take turns, round after round, and the median of each one's turns counts."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from crossdevice.cli.bench import data
from crossdevice.cli.bench.calls import Competitor, Measurable, Memory
from crossdevice.cli.bench.workload import GIGABYTE, ResultPlace, UnsupportedWorkError, Workload

TURN_SECONDS = 0.002
"""Short calls are repeated for about as long in one turn: clock and cold caches would be felt otherwise."""

MAX_REPEATS = 2000

PAUSE_SECONDS = 0.003
"""Between turns: OpenMP's threads spin for about a millisecond after their last work."""


@dataclasses.dataclass(frozen=True)
class Figure:
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
        """As if every byte went over a wire, in GB/s."""
        return self.algorithm_bandwidth * self.work.bus_factor


@dataclasses.dataclass(frozen=True)
class Row:
    """One competitor's line for one size; None where it cannot do that."""

    competitor: str
    work: Workload
    out_of_place: Figure | None
    in_place: Figure | None

    @property
    def figures(self) -> list[Figure]:
        """Those there are."""
        return [figure for figure in (self.out_of_place, self.in_place) if figure is not None]

    @property
    def main(self) -> Figure:
        """What is compared and drawn: out of place if there is one."""
        return self.figures[0]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How often, and what besides the time."""

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
    """One row per competitor that can do this work; `say` hears of the others, `tick` of every round."""
    inputs = data.all_arrays(work)
    able = {one.name: _ready(one, work, inputs, say) for one in competitors}
    ready = {name: one for name, one in able.items() if one is not None}
    chosen = {name: _out_of_place(one, schedule) for name, one in ready.items()}
    outside = _figures(work, ready, chosen, schedule, tick)
    inside = _figures(work, ready, {name: _in_place(one) for name, one in ready.items()}, schedule, tick)
    rows = [Row(name, work, outside.get(name), inside.get(name)) for name in ready]
    return [row for row in rows if row.figures]


def seconds_in_turns(
    ready: Mapping[str, Measurable],
    places: Mapping[str, ResultPlace],
    schedule: Schedule,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds per call of each competitor in each round, all of them taking turns."""
    last: dict[str, float] = {}
    for _ in range(max(1, schedule.warm_up)):
        for name, place in places.items():
            last[name] = ready[name].turn(place, 1)
    repeats = {name: _repeats(seconds) for name, seconds in last.items()}
    seconds: dict[str, list[float]] = {name: [] for name in places}
    for _ in range(schedule.iterations):
        for name, place in places.items():
            if len(places) > 1:
                time.sleep(PAUSE_SECONDS)
            seconds[name].append(ready[name].turn(place, repeats[name]))
        tick()
    return seconds


def _ready(
    competitor: Competitor, work: Workload, inputs: Sequence[data.Arrays], say: Callable[[str], None]
) -> Measurable | None:
    try:
        return competitor.ready(work, inputs)
    except UnsupportedWorkError as error:
        say(f"{competitor.name}: left out, {error}")
        return None


def _figures(
    work: Workload,
    ready: Mapping[str, Measurable],
    wanted: Mapping[str, ResultPlace | None],
    schedule: Schedule,
    tick: Callable[[], None],
) -> dict[str, Figure]:
    places: dict[str, ResultPlace] = {name: place for name, place in wanted.items() if place is not None}
    if not places:
        for _ in range(schedule.iterations):
            tick()
        return {}
    seconds = seconds_in_turns(ready, places, schedule, tick)
    figures = {}
    for name, place in places.items():
        memory, wrong = ready[name].inspect(place, counts_wrong=schedule.checks)
        figures[name] = Figure(work, place, statistics.median(seconds[name]), memory, wrong)
    return figures


def _out_of_place(one: Measurable, schedule: Schedule) -> ResultPlace | None:
    order: tuple[ResultPlace, ...] = ("fresh", "given") if schedule.prefers_fresh else ("given", "fresh")
    return next((place for place in order if place in one.places), None)


def _in_place(one: Measurable) -> ResultPlace | None:
    return "in_place" if "in_place" in one.places else None


def _repeats(seconds: float) -> int:
    return max(1, min(MAX_REPEATS, int(TURN_SECONDS / max(seconds, 1e-7))))
