"""Holds crossdevice between processes to its promises: the same work side by side, in one run.

    python benchmarks/process_groups.py [--rows PATTERN] [--rounds N] [--quick]

Eight replicas as two processes of four logical devices each, on gloo and on MPI, against eight ranks of gloo
and of MPI; and DistributedDataParallel with our hook against without, in two processes. All processes of a
row are there from the beginning and take turns, round after round; the slowest of a contender's
processes counts, and medians are compared. Run it on a quiet machine.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from promised_rows import is_asked_for, parser_of, schedule_of

from crossdevice.algorithms.collective_all_reduce import CollectiveAllReduce
from crossdevice.cli.bench import data
from crossdevice.cli.bench.measure import Calls, Inspection, Measurable, Schedule, seconds_in_turns
from crossdevice.cli.bench.peers import PeerSetup, Runs, peer_unavailable
from crossdevice.cli.bench.process import PeerProcesses
from crossdevice.cli.bench.rank_peers import Rank
from crossdevice.cli.bench.report import machine
from crossdevice.cli.bench.workload import ResultPlace, Workload
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.values.distributed import DistributedValues, PerReplica
from crossdevice.values.options import CommunicationOptions

MIB = 1 << 20
NUM_REPLICAS, NUM_PROCESSES = 8, 2
WIDTH = 2048

TRAINING = Workload("all_reduce", "MEAN", "float32", NUM_PROCESSES, ((1,),))
"""Stands for a training step, which brings its own arrays."""


class OurRank(Rank):
    """One of the processes that share our replicas; results are new arrays on each of its devices."""

    options = CommunicationOptions()

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.rank = group.rank

    def replicas(self, work: Workload) -> range:
        share = work.num_devices // self._group.size
        return range(self.rank * share, (self.rank + 1) * share)

    def ready(self, work: Workload, inputs: Sequence[data.Arrays]) -> Calls:
        ops = CollectiveAllReduce(group=self._group, options=self.options)
        values = [PerReplica(column) for column in zip(*inputs, strict=True)]

        def read(results: Sequence[DistributedValues]) -> list[data.Arrays]:
            return [list(arrays) for arrays in zip(*(result.values for result in results), strict=True)]

        return Calls(
            work,
            {"fresh": lambda: [ops.reduce(work.op, value, value) for value in values]},
            read=read,
            meet=self.meet,
            rounds_once=True,
        )

    def meet(self) -> None:
        with self._group.call("meet", b"meet") as call:
            call.all_gather(b"here")

    def close(self) -> None:
        self._group.close()


class OursOnGloo(OurRank):
    """Ours, on torch.distributed."""

    name = "crossdevice on gloo"

    def __init__(self, setup: PeerSetup) -> None:
        import torch.distributed as dist

        from crossdevice.process_groups.engines.torch_engine import form_group

        store = dist.FileStore(f"{setup.folder}/store", setup.num_processes)
        super().__init__(form_group(setup.rank, setup.num_processes, store=store))


class OursInFloat32OnGloo(OursOnGloo):
    """Ours adding as gloo does: in the arrays' own dtype, rounding at every step."""

    name = "crossdevice on gloo, fast"
    options = CommunicationOptions(precision="fast")


class OursOnMpi(OurRank):
    """Ours, on MPI."""

    name = "crossdevice on MPI"

    def __init__(self, setup: PeerSetup) -> None:  # noqa: ARG002
        from crossdevice.process_groups.engines.mpi_engine import form_group

        super().__init__(form_group())


class PlainTraining:
    """Steps of DistributedDataParallel on gloo with some ten million parameters, one thread per process."""

    name = "DDP"
    places: tuple[ResultPlace, ...] = ("in_place",)

    def __init__(self, setup: PeerSetup) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        torch.manual_seed(setup.rank)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{setup.folder}/store",
            rank=setup.rank,
            world_size=setup.num_processes,
        )
        layers = [
            torch.nn.Linear(512, WIDTH),
            torch.nn.ReLU(),
            torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.ReLU(),
        ]
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 10)]
        self.model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self._inputs = torch.randn(64, 512)
        self._distributed = dist

    def replicas(self, work: Workload) -> Sequence[int]:  # noqa: ARG002
        return ()  # it has data of its own

    def ready(self, work: Workload, inputs: Sequence[data.Arrays]) -> Measurable:  # noqa: ARG002
        return self

    def turn(self, place: ResultPlace, repeats: int) -> float:  # noqa: ARG002
        self._distributed.barrier()
        begin = time.perf_counter()
        for _ in range(repeats):
            self._optimizer.zero_grad()
            self.model(self._inputs).square().mean().backward()
            self._optimizer.step()
        return (time.perf_counter() - begin) / repeats

    def inspect(self, place: ResultPlace, *, counts_wrong: bool) -> Inspection:  # noqa: ARG002
        """Wrong are parameters that the processes do not have in common."""
        import torch

        flat = torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])
        first = flat.clone()
        self._distributed.broadcast(first, 0)
        return Inspection("own", int((flat != first).sum()))

    def close(self) -> None:
        self._distributed.destroy_process_group()


class HookedTraining(PlainTraining):
    """The same with our hook."""

    name = "DDP with our hook"

    def __init__(self, setup: PeerSetup) -> None:
        super().__init__(setup)
        from crossdevice.integrations.torch import ReproducibleMean, reproducible_hook

        self.model.register_comm_hook(ReproducibleMean(), reproducible_hook)


class Contender(NamedTuple):
    """What takes turns: a peer of the bench in one process per replica, or a class above in two.

    It needs what that peer of the bench does. Results that are not rounded once are not counted as wrong.
    """

    name: str
    place: ResultPlace
    needs: str
    runs: Runs | None = None
    rounds_once: bool = True

    def started(self) -> PeerProcesses:
        if self.runs is None:
            return PeerProcesses(self.name, NUM_REPLICAS)
        return PeerProcesses(
            f"process_groups:{self.name}", NUM_REPLICAS, runs=self.runs, num_processes=NUM_PROCESSES
        )


OURS_ON_GLOO = Contender("OursOnGloo", "fresh", "gloo", "processes")
OURS_IN_FLOAT32_ON_GLOO = Contender("OursInFloat32OnGloo", "fresh", "gloo", "processes", rounds_once=False)
OURS_ON_MPI = Contender("OursOnMpi", "fresh", "mpi", "mpirun")
GLOO = Contender("gloo", "in_place", "gloo")
MPI = Contender("mpi", "given", "mpi")
DDP = Contender("PlainTraining", "in_place", "gloo", "processes")
HOOKED = Contender("HookedTraining", "in_place", "gloo", "processes")


class Row(NamedTuple):
    """One promise: how many times as fast as the other, or at most how many times as slow."""

    text: str
    work: Workload
    floor: float | None
    is_ceiling: bool = False


class Pair(NamedTuple):
    """Two contenders, whose processes stay for all rows in which they take turns."""

    ours: Contender
    against: Contender
    rows: tuple[Row, ...]


def pairs(*, quick: bool) -> list[Pair]:
    """The whole table."""

    def sizes(where: str, floor: float, how: str = "") -> tuple[Row, ...]:
        return tuple(
            Row(
                f"2 x 4 x {size} MiB on {where}{how} against 8 ranks of {where}",
                Workload("all_reduce", "SUM", "float32", NUM_REPLICAS, ((size * MIB // 4 // shrink,),)),
                None if size == 1 else floor,
            )
            for size in (1, 16, 64)
        )

    shrink = 64 if quick else 1
    step = Row("a DDP step with our hook against without", TRAINING, 1.3, is_ceiling=True)
    return [
        Pair(OURS_ON_GLOO, GLOO, sizes("gloo", 3.0)),
        Pair(OURS_IN_FLOAT32_ON_GLOO, GLOO, sizes("gloo", 3.0, ", fast")),
        Pair(OURS_ON_MPI, MPI, sizes("MPI", 1.5)),
        Pair(HOOKED, DDP, (step,)),
    ]


def lines(pair: Pair, schedule: Schedule, *, quick: bool) -> Iterator[tuple[str, bool]]:
    """Each row's line, and whether its promise is kept; a peer that is missing breaks none."""
    missing = peer_unavailable(pair.against.needs)
    if missing is not None:
        yield from ((f"{row.text:<56} skipped: {missing}", True) for row in pair.rows)
        return
    both = {"ours": pair.ours, "against": pair.against}
    places = {key: contender.place for key, contender in both.items()}
    with contextlib.ExitStack() as closing:
        started = {}
        for key, contender in both.items():
            started[key] = contender.started()
            closing.callback(started[key].close)
        for row in pair.rows:
            ready = {key: processes.ready(row.work, []) for key, processes in started.items()}
            turns = seconds_in_turns(ready, places, schedule)
            ours, against = (statistics.median(turns[key]) for key in both)
            wrong = ready["ours"].inspect(pair.ours.place, counts_wrong=pair.ours.rounds_once).wrong
            yield judged(row, ours, against, wrong or 0, quick=quick)


def judged(row: Row, ours: float, against: float, wrong: int, *, quick: bool) -> tuple[str, bool]:
    ratio = ours / against if row.is_ceiling else against / ours
    is_kept = row.floor is None or (ratio <= row.floor if row.is_ceiling else ratio >= row.floor)
    verdict = "not judged" if quick or row.floor is None else "ok" if is_kept else "MISSED"
    verdict += f", {wrong} WRONG" if wrong else ""
    floor = "" if row.floor is None else f"{'<=' if row.is_ceiling else '>='} {row.floor:g}"
    line = f"{row.text:<56} {ours * 1e3:>9.2f} {against * 1e3:>9.2f} {ratio:>7.2f} x {floor:>6}  {verdict}"
    return line, (is_kept or quick) and not wrong


def selected(table: Sequence[Pair], pattern: str) -> list[Pair]:
    """Pairs with the rows whose text has the pattern in it."""
    kept = [
        pair._replace(rows=tuple(row for row in pair.rows if is_asked_for(row.text, pattern)))
        for pair in table
    ]
    return [pair for pair in kept if pair.rows]


def main() -> int:
    arguments = parser_of(__doc__).parse_args()
    schedule = schedule_of(arguments)
    table = selected(pairs(quick=arguments.quick), arguments.rows)
    if not table:
        print(f"no row has {arguments.rows!r} in its text", file=sys.stderr)
        return 2
    # Where the processes find the classes above.
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    print(f"# {machine()}, {schedule.iterations} rounds", flush=True)
    title = "float32, accurate unless said otherwise"
    print(f"# {title:<54} {'ours, ms':>9} {'theirs':>9} {'ratio':>9} {'floor':>6}")
    missed = 0
    for pair in table:
        for line, is_kept in lines(pair, schedule, quick=arguments.quick):
            missed += not is_kept
            print(line, flush=True)
    print(f"# {missed} of {sum(len(pair.rows) for pair in table)} rows missed or wrong")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
