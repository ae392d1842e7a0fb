"""Competitors, their calls, and the turns they take: the median of each one's turns counts.

The calls of a competitor for one work are on arrays of its own, timed in this process.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import Array, Backend, dtype_named
from crossdevice.cli.bench import data
from crossdevice.cli.bench.workload import COLLECTIVES, GIGABYTE, ResultPlace, UnsupportedWorkError, Workload
from crossdevice.values.device import host_device
from crossdevice.values.dtypes import FLOATS

Memory = Literal["own", "shared"]
"""Memory of results: each destination has its own, or all see one array."""

Results = Sequence[Sequence[Array]]
"""Arrays for each destination."""

TimedCall = Callable[[], Any]
"""Does the work and returns results in whatever form it gets them."""

Read = Callable[[Any], Sequence[data.Arrays]]
"""Converts a call's result to flat host arrays of each destination; not timed."""


class Inspection(NamedTuple):
    """Findings about one call's results; `wrong` is None if elements were not counted."""

    memory: Memory
    wrong: int | None


class Measurable(Protocol):
    """A competitor ready for one work."""

    @property
    def places(self) -> tuple[ResultPlace, ...]:
        """Returns the places for results that a competitor supports."""

    def turn(self, place: ResultPlace, repeats: int) -> float:
        """Seconds per call, of `repeats` calls."""

    def inspect(self, place: ResultPlace, *, counts_wrong: bool) -> Inspection:
        """Looks at the results of one more call."""


class Competitor(abc.ABC):
    """A library or algorithm that can run collectives, or those of its `collectives` and `ops`."""

    name: str
    collectives: Collection[str] = COLLECTIVES
    ops: Collection[str] = ("SUM", "MEAN", "MIN", "MAX", "PROD")
    precision: str = "own dtype"
    """The precision of crossdevice's options, or "own dtype": sums are rounded to the dtype of the arrays."""

    @abc.abstractmethod
    def ready(self, work: Workload, inputs: Sequence[data.Arrays]) -> Measurable:
        """Brings its arrays into place; `inputs` are flat, in this process, and not to be written to."""

    def replicas(self, work: Workload) -> Sequence[int]:
        """Lists the replicas with inputs in its process."""
        return range(work.num_inputs)

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """Releases the resources started for it."""

    def check(self, work: Workload) -> None:
        """Refuses work that the library cannot do; means of integers differ between libraries."""
        if work.collective not in self.collectives or work.op not in self.ops:
            raise UnsupportedWorkError(
                f"only {', '.join(self.collectives)}, {' and '.join(self.ops).lower()}"
            )
        if work.op == "MEAN" and work.dtype not in FLOATS and work.reduces:
            raise UnsupportedWorkError("no mean of integers as crossdevice defines it")


class Arrays:
    """One library's arrays for a work: inputs, memory for results, and inputs that results replace."""

    def __init__(self, work: Workload, inputs: Sequence[data.Arrays], backend: Backend) -> None:
        self._flat_inputs = inputs
        self._backend = backend
        self.inputs = [self._shaped(arrays, work.shapes, replica) for replica, arrays in enumerate(inputs)]
        shares = work.num_inputs if work.collective == "gather" else 1
        shapes = [(shape[0] * shares, *shape[1:]) if shares > 1 else shape for shape in work.shapes]
        self._flat_given = [
            [np.zeros(math.prod(shape), dtype_named(work.result_dtype)) for shape in shapes]
            for _ in range(work.num_results)
        ]
        self.given = [self._shaped(flat, shapes, number) for number, flat in enumerate(self._flat_given)]
        # In place, a destination's result replaces the input there.
        self.replaced = [*self.given, *self.inputs[len(self.given) :]]
        self.can_replace = work.collective != "gather" and work.dtype == work.result_dtype
        self.can_be_written = backend.writable_view(self.given[0][0]) is not None

    def refill(self) -> None:
        """Puts the inputs back that results in place have replaced."""
        for arrays, originals in zip(self._flat_given, self._flat_inputs, strict=False):
            for array, original in zip(arrays, originals, strict=True):
                np.copyto(array, original)

    def poison(self) -> None:
        """Overwrites results, so that those of an earlier call cannot pass for new ones."""
        for arrays in self._flat_given:
            for array in arrays:
                array.fill(data.POISON)

    def read(self, results: Results) -> list[data.Arrays]:
        """Returns the elements of results, flat."""
        return [[self._backend.host_view(array) for array in arrays] for arrays in results]

    def _shaped(
        self, arrays: Sequence[NDArray[Any]], shapes: Sequence[tuple[int, ...]], replica: int
    ) -> list[Array]:
        device = host_device(replica)
        return [self._backend.from_host(a, shape, device) for a, shape in zip(arrays, shapes, strict=True)]


def _nothing() -> None:
    pass


@dataclasses.dataclass(frozen=True)
class Calls:
    """Calls that are timed here; `meet` is called before every turn, where other processes take part."""

    work: Workload
    calls: Mapping[ResultPlace, TimedCall]
    read: Read
    refill: Callable[[], None] = _nothing
    poison: Callable[[], None] = _nothing
    meet: Callable[[], None] = _nothing
    rounds_once: bool = False

    @property
    def places(self) -> tuple[ResultPlace, ...]:
        """Returns the places for results that a competitor supports."""
        return tuple(self.calls)

    def turn(self, place: ResultPlace, repeats: int) -> float:
        """Times calls, but for the first one out of place; returns the seconds per call.

        Letting go of the results is part of it, bringing inputs back is not.
        """
        if place == "in_place":
            return statistics.fmean(self._seconds(place, 1) for _ in range(repeats))
        self.calls[place]()  # after another competitor's turn, caches are cold and threads asleep
        return self._seconds(place, repeats) / repeats

    def inspect(self, place: ResultPlace, *, counts_wrong: bool) -> Inspection:
        """Makes one more call, for its results."""
        if place != "fresh":
            self.poison()
        self._prepare(place)
        made = self.calls[place]()  # held while its arrays are looked at: views may not own what they show
        results = self.read(made)
        count = data.num_wrong(self.work, results, rounds_once=self.rounds_once) if counts_wrong else None
        # As the addresses say, not as a library's documentation does.
        starts = [own.__array_interface__["data"][0] for arrays in results for own in arrays if own.size]
        return Inspection("own" if len(set(starts)) == len(starts) else "shared", count)

    def _seconds(self, place: ResultPlace, repeats: int) -> float:
        self._prepare(place)
        call = self.calls[place]
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        return time.perf_counter() - begin

    def _prepare(self, place: ResultPlace) -> None:
        if place == "in_place":
            self.refill()
        self.meet()


TURN_SECONDS = 0.002
"""Short calls are repeated for about as long in one turn: clock and cold caches would be felt otherwise."""

MAX_REPEATS = 2000

PAUSE_SECONDS = 0.01
"""Pause between turns: OpenMP's threads spin for 1 to 8 ms after their last work."""


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
