"""Holds crossdevice to its promises: measures every row of the table below and fails if one is missed.

    python benchmarks/floors.py [--rows PATTERN] [--rounds N] [--quick]

All competitors of a row take turns, round after round, and medians are compared. NumPy and PyTorch run in
this process, TensorFlow and JAX in one of their own, gloo and MPI in one for each replica; between their
turns they sleep. "of the limit" compares with the time in which this machine copies the bytes that an
all-reduce must read and write when every replica gets memory of its own. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from promised_rows import is_asked_for, parser_of, schedule_of
from resnet50 import gradient_shapes

from crossdevice.cli.bench import calibration, data
from crossdevice.cli.bench.local_competitors import CrossDeviceCompetitor
from crossdevice.cli.bench.measure import Competitor, Inspection, Measurable, Schedule, seconds_in_turns
from crossdevice.cli.bench.peers import PEERS, peer_class, peer_unavailable
from crossdevice.cli.bench.process import PeerProcessError, PeerProcesses
from crossdevice.cli.bench.report import machine
from crossdevice.cli.bench.workload import ResultPlace, Workload
from crossdevice.functions import DEFAULT_ALGORITHM
from crossdevice.values.dtypes import ITEM_BYTES
from crossdevice.values.options import DEFAULT_OPTIONS, CommunicationOptions

MIB = 1 << 20
QUICK_DIVISOR = 64

OURS = {
    "fast": CommunicationOptions(precision="fast"),
    "accurate": DEFAULT_OPTIONS,
    "exact": CommunicationOptions(precision="exact"),
    "shared": CommunicationOptions(share_results=True),
}


class Runner(NamedTuple):
    """A competitor (one of OURS, of PEERS, or "limit") and where its results go."""

    name: str
    place: ResultPlace = "fresh"


LIMIT = Runner("limit", "given")
GIVEN: ResultPlace = "given"


class Row(NamedTuple):
    """One promise: `ours` against another, as a share in %, as times faster, or alone in microseconds."""

    text: str
    ours: Runner
    against: Runner | None
    unit: str
    floor: float
    aim: float


class Group(NamedTuple):
    """Rows whose competitors take turns with each other on the same work."""

    work: Workload
    rows: tuple[Row, ...]


def groups(*, quick: bool) -> list[Group]:
    """The whole table."""
    shrink = QUICK_DIVISOR if quick else 1
    shapes = tuple(gradient_shapes()[:: 16 if quick else 1])

    def one_array(
        op: str,
        dtype: str,
        num_devices: int,
        mebibytes: int,
        *,
        collective: str = "all_reduce",
        is_spread: bool = False,
    ) -> Workload:
        count = mebibytes * MIB // shrink // ITEM_BYTES[dtype]
        return Workload(collective, op, dtype, num_devices, ((count,),), is_spread)

    resnet = Workload("all_reduce", "MEAN", "float32", 8, shapes)
    return [
        Group(one_array("SUM", "float32", 8, 16), tuple(_limit_rows("8 x 16 MiB"))),
        *(
            Group(one_array("SUM", dtype, 8, 16, is_spread=True), tuple(_exact_rows(f"8 x 16 MiB {dtype}")))
            for dtype in ("float32", "bfloat16", "float64")
        ),
        Group(
            one_array("SUM", "float32", 8, 100),
            (
                *_limit_rows("8 x 100 MiB"),
                _times("8 x 100 MiB, no out=, against a PyTorch loop", Runner("accurate"), "torch", 5, 9),
                _times("8 x 100 MiB, no out=, against a NumPy loop", Runner("accurate"), "numpy", 3, 4.5),
            ),
        ),
        *(
            Group(
                one_array("SUM", "float32", 8, mebibytes, collective=collective),
                tuple(_one_pass_rows(f"8 x {mebibytes} MiB {where}", collective)),
            )
            for mebibytes, collective, where in (
                (16, "reduce", "to one result"),
                (16, "all_reduce", "to eight results"),
                (64, "reduce", "to one result"),
            )
        ),
        Group(
            resnet,
            (
                Row("ResNet-50 MEAN, of the limit", Runner("accurate"), LIMIT, "%", 70, 90),
                _times("ResNet-50 MEAN against a PyTorch loop", Runner("accurate"), "torch", 1.5, 2),
                _times("ResNet-50 MEAN against a NumPy loop", Runner("accurate"), "numpy", 2, 2.8),
                _times(
                    "ResNet-50 MEAN against PyTorch flatten-reduce-split",
                    Runner("accurate"),
                    "torch_flatten",
                    8,
                    12,
                ),
            ),
        ),
        *(
            Group(resnet, (_times(f"ResNet-50 MEAN against {what}", Runner(ours), peer, floor, aim),))
            for what, ours, peer, floor, aim in (
                # At 1.2 times the speed of a copy, the most that any row reaches, these would be 4.8 and 8.3.
                ("TensorFlow HierarchicalCopy(1)", "accurate", "tensorflow_hierarchical_copy", 3.5, 4.8),
                ("TensorFlow ring", "accurate", "tensorflow_ring", 5, 8),
                ("TensorFlow one device, shared results", "shared", "tensorflow", 2, 4),
            )
        ),
        Group(
            one_array("SUM", "float32", 4, 100),
            (
                _times("4 x 100 MiB, no out=, against JAX psum", Runner("accurate"), "jax", 5, 10),
                _times("4 x 100 MiB, in place, against gloo", Runner("accurate", "in_place"), "gloo", 8, 12),
                _times("4 x 100 MiB, out=, against MPI", Runner("accurate", GIVEN), "mpi", 4, 8),
            ),
        ),
        Group(
            Workload("all_reduce", "SUM", "float32", 8, ((1,),)),
            (
                Row("one element, 8 replicas", Runner("accurate"), None, "us", 30, 12),
                _times("one element against TensorFlow one device", Runner("accurate"), "tensorflow", 20, 60),
                _times("one element against JAX psum", Runner("accurate"), "jax", 8, 20),
            ),
        ),
        Group(
            one_array("SUM", "bfloat16", 8, 50),
            (Row("8 x 50 MiB bfloat16, out=, of the limit", Runner("accurate", GIVEN), LIMIT, "%", 70, 90),),
        ),
    ]


def _limit_rows(what: str) -> list[Row]:
    return [
        Row(f"{what}, out=, fast, of the limit", Runner("fast", GIVEN), LIMIT, "%", 90, 100),
        Row(f"{what}, out=, accurate, of the limit", Runner("accurate", GIVEN), LIMIT, "%", 80, 95),
        Row(f"{what}, out=, exact, of the limit", Runner("exact", GIVEN), LIMIT, "%", 50, 80),
        Row(f"{what}, no out=, accurate, of the limit", Runner("accurate"), LIMIT, "%", 70, 90),
    ]


def _exact_rows(what: str) -> list[Row]:
    """Exact sums where magnitudes differ between replicas, which takes more than adding in float64."""
    exact = Runner("exact", GIVEN)
    return [
        Row(f"{what}, 10^11 apart, out=, exact, of the limit", exact, LIMIT, "%", 50, 80),
        Row(f"{what}, 10^11 apart, exact against accurate", exact, Runner("accurate", GIVEN), "x", 0.6, 0.9),
    ]


def _one_pass_rows(what: str, collective: str) -> list[Row]:
    """Peers that read every input once, as we do; none may be more than 1.1 times as fast."""
    peers = {"torch_compile": GIVEN, "torch_stack": GIVEN, "numpy_stack": GIVEN, "jax_jit": "fresh"}
    if collective == "all_reduce":
        del peers["jax_jit"]  # it has one device
    return [
        Row(f"{what} against {peer}", Runner("accurate", place), Runner(peer, place), "x", 0.91, 1)
        for peer, place in peers.items()
    ]


def _times(text: str, ours: Runner, peer: str, floor: float, aim: float) -> Row:
    """So many times as fast as a peer; gloo and MPI write where they are told to, others make new results."""
    places: dict[str, ResultPlace] = {"gloo": "in_place", "mpi": "given"}
    return Row(text, ours, Runner(peer, places.get(peer, "fresh")), "x", floor, aim)


class Copies:
    """The copy limit as a competitor: the same bytes, in as many long arrays as there are replicas."""

    def __init__(self, work: Workload, way: str) -> None:
        size = -(-work.num_elements * ITEM_BYTES[work.dtype] // 4)
        sources = [np.ones(size, np.float32) for _ in range(work.num_devices)]
        targets = [np.zeros(size, np.float32) for _ in range(work.num_devices)]
        self._copy = calibration.WAYS[way](sources, targets)
        self.places: tuple[ResultPlace, ...] = ("given",)

    def turn(self, place: ResultPlace, repeats: int) -> float:  # noqa: ARG002
        return statistics.fmean(calibration.seconds_of(self._copy) for _ in range(repeats))

    def inspect(self, place: ResultPlace, *, counts_wrong: bool) -> Inspection:  # noqa: ARG002
        return Inspection("own", 0)


class Measured(NamedTuple):
    """What one group's turns gave: seconds of each runner, what its results look like, and who is missing."""

    seconds: dict[Runner, float]
    looks: dict[Runner, Inspection]
    missing: dict[str, str]


def measured(group: Group, schedule: Schedule) -> Measured:
    """Runs all that the group's rows need."""
    wanted = {runner for row in group.rows for runner in (row.ours, row.against) if runner is not None}
    inputs = data.all_arrays(group.work)
    ready: dict[str, Measurable] = {}
    places: dict[str, ResultPlace] = {}
    named: dict[str, Runner] = {}
    missing: dict[str, str] = {}
    with contextlib.ExitStack() as closing:
        competitors: dict[str, Measurable] = {}
        for runner in sorted(wanted):
            if runner == LIMIT:
                for way in calibration.WAYS:
                    ready[way], places[way], named[way] = Copies(group.work, way), "given", LIMIT
                continue
            if runner.name not in competitors and runner.name not in missing:
                made = _made(runner.name, group.work.num_devices)
                if isinstance(made, str):
                    missing[runner.name] = made
                    continue
                closing.callback(made.close)
                competitors[runner.name] = made.ready(group.work, inputs)
            if runner.name in competitors:
                key = f"{runner.name} {runner.place}"
                ready[key], places[key], named[key] = competitors[runner.name], runner.place, runner
        turns = seconds_in_turns(ready, places, schedule)
        seconds: dict[Runner, float] = {}
        for key, runner in named.items():
            seconds[runner] = min(seconds.get(runner, math.inf), statistics.median(turns[key]))
        looks = {runner: ready[key].inspect(runner.place, counts_wrong=True) for key, runner in named.items()}
    return Measured(seconds, looks, missing)


def _made(name: str, num_devices: int) -> Competitor | str:
    """The competitor, or why there is none."""
    if name in OURS:
        return CrossDeviceCompetitor(DEFAULT_ALGORITHM, "numpy", OURS[name], name=name)
    missing = peer_unavailable(name)
    if missing is not None:
        return missing
    if PEERS[name].runs == "here":
        made: Competitor = peer_class(name)()
        return made
    try:
        return PeerProcesses(name, num_devices)
    except PeerProcessError as error:
        return str(error)


def judged(row: Row, found: Measured, *, quick: bool) -> tuple[str, bool]:
    """The row's line, and whether its promise is kept; a peer that is missing breaks none."""
    if row.against is not None and row.against.name in found.missing:
        return f"{row.text:<56} {'':>9}  skipped: {found.missing[row.against.name]}", True
    ours = found.seconds[row.ours]
    if row.against is None:
        figure, is_kept, reaches_aim = ours * 1e6, ours * 1e6 <= row.floor, ours * 1e6 <= row.aim
    else:
        figure = found.seconds[row.against] / ours * (100 if row.unit == "%" else 1)
        is_kept, reaches_aim = figure >= row.floor, figure >= row.aim
    wrong = found.looks[row.ours].wrong
    verdict = "not judged" if quick else "BELOW" if not is_kept else "aim reached" if reaches_aim else "ok"
    verdict += f", {wrong} WRONG" if wrong else ""
    note = ""
    if row.against is not None and row.against != LIMIT:
        note = f"  ({found.looks[row.ours].memory} memory against {found.looks[row.against].memory})"
    line = f"{row.text:<56} {figure:>7.4g} {row.unit:<2} {row.floor:>6g} {row.aim:>6g}  {verdict}{note}"
    return line, (is_kept or quick) and not wrong


def selected(table: Sequence[Group], pattern: str) -> list[Group]:
    """Groups with the rows whose text has the pattern in it."""
    kept = [
        Group(group.work, tuple(row for row in group.rows if is_asked_for(row.text, pattern)))
        for group in table
    ]
    return [group for group in kept if group.rows]


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--group", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    schedule = schedule_of(arguments)
    table = selected(groups(quick=arguments.quick), arguments.rows)
    if not table:
        print(f"no row has {arguments.rows!r} in its text", file=sys.stderr)
        return 2
    say = functools.partial(print, flush=True)
    if arguments.group is not None:
        return _measure_and_say(table[arguments.group], schedule, quick=arguments.quick)
    say(f"# {machine()}, {schedule.iterations} rounds")
    if arguments.quick:
        say("# quick: small sizes, nothing is judged")
    say(f"# {'work (float32 unless said, default options)':<54} {'measured':>9} {'floor':>6} {'aim':>6}")
    missed = 0
    for number in range(len(table)):
        # A process for each group: what one leaves behind in memory must not slow the next.
        command = [sys.executable, __file__, *sys.argv[1:], "--group", str(number)]
        missed += subprocess.run(command, check=False).returncode
    say(f"# {missed} of {sum(len(group.rows) for group in table)} rows below their floor or wrong")
    return 1 if missed else 0


def _measure_and_say(group: Group, schedule: Schedule, *, quick: bool) -> int:
    """Prints the rows of one group; returns how many are below their floor."""
    found = measured(group, schedule)
    lines = [judged(row, found, quick=quick) for row in group.rows]
    for line, _ in lines:
        print(line, flush=True)
    return sum(not is_kept for _, is_kept in lines)


if __name__ == "__main__":
    sys.exit(main())
