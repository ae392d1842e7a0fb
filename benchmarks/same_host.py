"""Processes of one host against gloo's and MPI's own all-reduce, side by side in the same processes.

    python benchmarks/same_host.py [--rows PATTERN] [--rounds N] [--quick]

One float32 replica per rank, precision accurate. The contenders of a launch take turns, round after round;
the slowest rank counts, and medians are compared. Ours are checked: every bit is that of one process.
Run it on a quiet machine.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import process_groups
from promised_rows import is_asked_for, parser_of, schedule_of

import crossdevice as cd
from crossdevice.cli.bench.peers import peer_unavailable
from crossdevice.cli.bench.report import machine

KIB, MIB = 1 << 10, 1 << 20
AS_RANK = "--as-rank"


class Row(NamedTuple):
    """One promise: a time, or how many times as fast as the engine's own all-reduce."""

    text: str
    engine: str
    num_ranks: int
    num_bytes: int
    ours: str
    """The name of a contender below."""
    floor: float
    is_time: bool = False


def rows() -> list[Row]:
    """The whole table."""
    table = [
        Row("4 B, 2 ranks, plain call", "gloo", 2, 4, "plain", 80e-6, is_time=True),
        Row("4 B, 2 ranks, bound", "gloo", 2, 4, "bound", 25e-6, is_time=True),
        Row("4 B, 2 ranks, plain, without shared memory", "MPI", 2, 4, "engine", 100e-6, is_time=True),
    ]
    for engine, small, medium, large, shared in (("gloo", 4, 2, 2.2, 5), ("MPI", 0.7, 1, 2, 4)):
        table += [
            Row("64 KiB, 2 ranks, private arrays", engine, 2, 64 * KIB, "plain", small),
            Row("16 MiB, 4 ranks, private arrays", engine, 4, 16 * MIB, "plain", medium),
            Row("100 MiB, 4 ranks, private arrays", engine, 4, 100 * MIB, "plain", large),
            Row("100 MiB, 4 ranks, bound, in shared memory", engine, 4, 100 * MIB, "shared", shared),
        ]
        # With a core for each rank of two; nobody may be more than 1.1 times as fast from 1 MiB on.
        for text, num_bytes in (("1 MiB", MIB), ("16 MiB", 16 * MIB), ("100 MiB", 100 * MIB)):
            table.append(Row(f"{text}, 2 ranks, private arrays", engine, 2, num_bytes, "plain", 0.91))
    return [*table, Row("16 MiB, 8 ranks, private arrays", "gloo", 8, 16 * MIB, "plain", 1.5)]


STEP = process_groups.Row(
    "a DDP step with our hook against without", process_groups.TRAINING, 1.0, is_ceiling=True
)


# ---------------------------------------------------------------- in each rank


def be_rank(engine: str, sizes: Sequence[int], rounds: int) -> None:
    """Measures everything of these sizes; rank 0 prints what was found."""
    cluster = cd.cluster_from_env()
    name = "torch" if engine == "gloo" else "mpi"
    group = cluster.form_group(name, name="through shared memory")
    without = cluster.form_group(name, name="through the engine", shared_memory=False)
    if group.shared is None:
        print(f"# not through shared memory: {group.not_shared_reason}", file=sys.stderr)
    for num_bytes in sizes:
        contenders = _contenders(engine, group, without, num_bytes // 4)
        times = in_turns(group, contenders, rounds, repeats=max(1, min(200, MIB // num_bytes)))
        if group.rank == 0:
            print(json.dumps([num_bytes, {each: statistics.median(found) for each, found in times.items()}]))


def _contenders(engine: str, group: Any, without: Any, size: int) -> dict[str, Callable[[], Any]]:
    inputs = [np.random.default_rng(rank).standard_normal(size, np.float32) for rank in range(group.size)]
    expected = cd.ReductionToOneDevice().reduce("sum", cd.PerReplica(inputs), "cpu:0").tobytes()
    array, out = inputs[group.rank], np.empty(size, np.float32)
    del inputs
    ops, plain = cd.CollectiveAllReduce(group=group), cd.CollectiveAllReduce(group=without)
    shared = group.empty(size)
    shared[:] = array
    contenders = {
        "plain": lambda: ops.reduce("sum", array, "cpu:0", out=out),
        "bound": ops.bind("sum", array, "cpu:0"),
        "shared": ops.bind("sum", shared, "cpu:0"),
        "engine": lambda: plain.reduce("sum", array, "cpu:0", out=out),
    }
    for name, call in contenders.items():
        if call().tobytes() != expected:
            raise AssertionError(f"{name} is wrong at {4 * size} bytes")
    if engine == "gloo":
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        tensor = torch.from_numpy(array.copy())
        contenders["theirs"] = lambda: dist.all_reduce(tensor)
    else:
        from mpi4py import MPI

        theirs = np.empty_like(array)
        contenders["theirs"] = lambda: MPI.COMM_WORLD.Allreduce(array, theirs)
    return contenders


def in_turns(
    group: Any, contenders: dict[str, Callable[[], Any]], rounds: int, repeats: int
) -> dict[str, list[float]]:
    """Seconds of one call, by contender and round, of the slowest rank."""
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            call = contenders[name]
            gathered(group, 0.0)
            begin = time.perf_counter()
            for _ in range(repeats):
                call()
            slowest = max(gathered(group, (time.perf_counter() - begin) / repeats))
            if number >= 0:  # the first round is for memory and kernels
                times[name].append(slowest)
    return times


def gathered(group: Any, number: float) -> list[float]:
    with group.call("meet", b"meet") as call:
        return [
            np.frombuffer(record, np.float64)[0] for record in call.all_gather(np.float64(number).tobytes())
        ]


# ---------------------------------------------------------------- around them


def measured(engine: str, num_ranks: int, sizes: Sequence[int], rounds: int) -> dict[int, dict[str, float]]:
    """What a launch of so many ranks has found, by size."""
    if engine == "gloo":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={num_ranks}"]
        words = [__file__]
    else:
        command, words = ["mpirun", "-n", str(num_ranks)], [sys.executable, __file__]
    words += [AS_RANK, engine, ",".join(map(str, sizes)), str(rounds)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }
    if num_ranks > len(os.sched_getaffinity(0)):  # else MPI polls, each rank on a core of its own
        environment["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
        environment["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
        environment["OMPI_MCA_mpi_yield_when_idle"] = "1"
    run = subprocess.run([*command, *words], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("[")]
    return dict(found)


def judged(row: Row, times: dict[str, float], *, quick: bool) -> tuple[str, bool]:
    ours, theirs = times[row.ours], times["theirs"]
    is_kept = ours <= row.floor if row.is_time else theirs / ours >= row.floor
    floor = f"<= {row.floor * 1e6:g} us" if row.is_time else f">= {row.floor:g} x"
    verdict = "not judged" if quick else "ok" if is_kept else "MISSED"
    text = f"{row.text}, {row.engine}"
    line = f"{text:<56} {ours * 1e3:>9.3f} {theirs * 1e3:>9.3f} {theirs / ours:>7.2f} x {floor:>9}  {verdict}"
    return line, is_kept or quick


def lines(table: Sequence[Row], rounds: int, *, quick: bool) -> Iterator[tuple[str, bool]]:
    """Each row's line, and whether its promise is kept; an engine that is missing breaks none."""
    launches: dict[tuple[str, int], list[Row]] = {}
    for row in table:
        launches.setdefault((row.engine, row.num_ranks), []).append(row)
    for (engine, num_ranks), together in launches.items():
        missing = peer_unavailable("gloo" if engine == "gloo" else "mpi")
        if missing is not None:
            yield from ((f"{row.text}, {engine}: skipped: {missing}", True) for row in together)
            continue
        sizes = {row.num_bytes // (64 if quick and row.num_bytes > MIB else 1): row for row in together}
        found = measured(engine, num_ranks, list(sizes), rounds)
        for num_bytes in sizes:
            for row in together:
                if row.num_bytes == sizes[num_bytes].num_bytes:
                    yield judged(row, found[num_bytes], quick=quick)


def main() -> int:
    arguments = parser_of(__doc__).parse_args()
    schedule = schedule_of(arguments)
    table = [row for row in rows() if is_asked_for(f"{row.text}, {row.engine}", arguments.rows)]
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    print(f"# {machine()}, {schedule.iterations} rounds", flush=True)
    print(f"# {'one float32 replica per rank, accurate':<54} {'ours, ms':>9} {'theirs':>9} {'ratio':>9}")
    results = list(_printed(lines(table, schedule.iterations, quick=arguments.quick)))
    if is_asked_for(STEP.text, arguments.rows):
        pair = process_groups.Pair(process_groups.HOOKED, process_groups.DDP, (STEP,))
        results += _printed(process_groups.lines(pair, schedule, quick=arguments.quick))
    if not results:
        print(f"no row has {arguments.rows!r} in its text", file=sys.stderr)
        return 2
    print(f"# {results.count(False)} of {len(results)} rows missed or wrong")
    return 1 if False in results else 0


def _printed(found: Iterator[tuple[str, bool]]) -> Iterator[bool]:
    for line, is_kept in found:
        print(line, flush=True)
        yield is_kept


if __name__ == "__main__":
    if AS_RANK in sys.argv:
        engine, sizes, rounds = sys.argv[sys.argv.index(AS_RANK) + 1 :]
        be_rank(engine, [int(size) for size in sizes.split(",")], int(rounds))
    else:
        sys.exit(main())
